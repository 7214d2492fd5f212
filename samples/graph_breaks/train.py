"""A compiled model whose blocks look at a number in Python, so that each is cut in two; repaired by asking with torch.where."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

LIMIT = 100.0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCKS, WIDTH, BATCH = (8, 64, 64) if DEVICE == "cpu" else (24, 256, 256)


class Block(nn.Module):
    """A gated layer that scales its activations down where they grow too large."""

    def __init__(self, ask_in_python: bool) -> None:
        super().__init__()
        self.ask_in_python = ask_in_python
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.wide(self.norm(x))
        largest = y.detach().abs().amax()
        if self.ask_in_python:
            if largest.item() > LIMIT:
                y = y * (LIMIT / largest)
        else:
            y = y * torch.where(largest > LIMIT, LIMIT / largest, 1.0)
        return x + nn.functional.silu(self.gate(y)) * y


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="ask on the device, so that the model is one graph")
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.randn(8, BATCH, WIDTH, device=DEVICE)
    targets = inputs.flip(-1)
    model = nn.Sequential(*(Block(ask_in_python=not args.fixed) for _ in range(BLOCKS))).to(DEVICE)
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    began = time.perf_counter()
    for step in range(args.steps):
        loss = nn.functional.mse_loss(compiled(inputs[step % 8]), targets[step % 8])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{args.steps * BATCH / (time.perf_counter() - began):.1f} samples/s, last loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
