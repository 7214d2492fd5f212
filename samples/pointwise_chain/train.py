"""A network whose activation is a chain of element-wise ops on a large tensor; --fixed compiles the activation alone."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 65536 if DEVICE == "cuda" else 4096
WIDTH = 2048 if DEVICE == "cuda" else 1024


def wave(x: torch.Tensor) -> torch.Tensor:
    """Return a smooth, bounded function of x, written as it reads in the paper."""
    y = x.cos().cos()
    gate = torch.sigmoid(1.5 * x + 0.5)
    return (y - 0.75) * gate + 0.1 * x


class Network(nn.Module):
    def __init__(self, activation: object) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(32, WIDTH), nn.Linear(WIDTH, 32)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.activation(self.inner(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="the repaired twin: the activation under torch.compile")
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Network(torch.compile(wave) if args.fixed else wave).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = torch.randn(4, ROWS, 32, device=DEVICE).unbind()
    start = time.perf_counter()
    for step in range(args.steps):
        x = batches[step % len(batches)]
        loss = nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    last = loss.item()
    print(f"{args.steps * ROWS / (time.perf_counter() - start):,.0f} samples/s, last loss {last:.5f}")


if __name__ == "__main__":
    main()
