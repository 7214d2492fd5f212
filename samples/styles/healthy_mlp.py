"""Healthy: a table in memory, batches by index, a fused optimizer, the loss shown now and then."""

import torch
from torch import nn

BF16 = any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("amx_tile", "avx512_bf16"))


def main():
    torch.manual_seed(0)
    x, y = torch.randn(20_000, 200), torch.randint(10, (20_000,))
    model = nn.Sequential(nn.Linear(200, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    order = torch.randperm(len(x))
    for step, rows in enumerate(order.split(256)):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=BF16):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            print(f"{step}: {loss.item():.3f}")


main()
