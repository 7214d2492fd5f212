"""Hundreds of small parameters that AdamW updates one by one; --fixed updates all of them in one fused pass."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MEMBERS, ROWS, WIDTH = 400, 16, 48


class Adapters(nn.Module):
    """A small adapter for each task, all of them applied at once."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(MEMBERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, torch.stack(list(self.adapters)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="the repaired twin: AdamW(fused=True)")
    parser.add_argument("--steps", type=int, default=250)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Adapters().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False, fused=args.fixed)
    inputs = torch.randn(4, MEMBERS, ROWS, WIDTH, device=DEVICE)
    targets = inputs.roll(1, dims=-1)
    start = time.perf_counter()
    for step in range(args.steps):
        which = step % len(inputs)
        loss = nn.functional.mse_loss(model(inputs[which]), targets[which])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    last = loss.item()
    print(f"{args.steps * ROWS / (time.perf_counter() - start):,.0f} samples/s, last loss {last:.5f}")


if __name__ == "__main__":
    main()
