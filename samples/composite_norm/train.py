"""Layer norm and cross-entropy written out in element-wise ops and reductions; --fixed calls the fused functions."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 32768 if DEVICE == "cuda" else 2048
WIDTH, CLASSES, BLOCKS = 1024, 256, 4


class Norm(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.fixed = fixed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fixed:
            return nn.functional.layer_norm(x, (WIDTH,), self.weight, self.bias, eps=1e-5)
        centred = x - x.mean(dim=-1, keepdim=True)
        variance = centred.pow(2).mean(dim=-1, keepdim=True)
        return centred * torch.rsqrt(variance + 1e-5) * self.weight + self.bias


class Block(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.norm, self.down, self.up = Norm(fixed), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(torch.relu(self.down(self.norm(x))))


def loss_of(logits: torch.Tensor, labels: torch.Tensor, fixed: bool) -> torch.Tensor:
    if fixed:
        return nn.functional.cross_entropy(logits, labels)
    shifted = logits - logits.max(dim=-1, keepdim=True).values
    log_probabilities = shifted - shifted.exp().sum(dim=-1, keepdim=True).log()
    return -log_probabilities.gather(1, labels[:, None]).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="the repaired twin: layer_norm and cross_entropy of torch")
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(args.fixed) for _ in range(BLOCKS)), nn.Linear(WIDTH, CLASSES)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = torch.randn(4, ROWS, WIDTH, device=DEVICE)
    labels = torch.randint(CLASSES, (4, ROWS), device=DEVICE)
    start = time.perf_counter()
    for step in range(args.steps):
        which = step % len(batches)
        loss = loss_of(model(batches[which]), labels[which], args.fixed)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    last = loss.item()
    print(f"{args.steps * ROWS / (time.perf_counter() - start):,.0f} samples/s, last loss {last:.5f}")


if __name__ == "__main__":
    main()
