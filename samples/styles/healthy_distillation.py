"""Healthy: a student learns from a frozen teacher that builds no graph; evaluation now and then."""

import torch
import torch.nn.functional as F
from torch import nn

BF16 = any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("amx_tile", "avx512_bf16"))


def network(width):
    return nn.Sequential(nn.Linear(256, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 50))


@torch.inference_mode()
def evaluate(model, x, y):
    return (model(x).argmax(1) == y).float().mean().item()


def main(steps=60):
    torch.manual_seed(0)
    teacher, student = network(768).eval().requires_grad_(False), network(384)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, fused=True)
    x, y = torch.randn(8192, 256), torch.randint(50, (8192,))
    for step in range(steps):
        rows = torch.randint(8192, (256,))
        with torch.autocast("cpu", torch.bfloat16, enabled=BF16):
            with torch.no_grad():
                wanted = F.softmax(teacher(x[rows]) / 2, dim=1)
            loss = F.kl_div(F.log_softmax(student(x[rows]) / 2, dim=1), wanted, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 29:
            print(evaluate(student, x[:1024], y[:1024]))


main()
