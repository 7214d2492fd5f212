"""Layers of 4095 and 8191 features in bfloat16, which tensor cores take in pieces; --fixed has 4096 and 8192."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
WIDTH, INNER, LAYERS, ROWS = (4095, 8191, 4, 8192) if ON_GPU else (127, 255, 2, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="the repaired twin: one feature more, multiples of 64")
    parser.add_argument("--steps", type=int, default=300 if ON_GPU else 20)
    args = parser.parse_args()
    torch.manual_seed(0)
    width, inner = WIDTH + args.fixed, INNER + args.fixed
    pairs = [(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width)) for _ in range(LAYERS)]
    model = nn.Sequential(*(layer for pair in pairs for layer in pair)).to(DEVICE, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    batches = [torch.randn(ROWS, width, device=DEVICE, dtype=torch.bfloat16) for _ in range(8)]
    start = time.perf_counter()
    for step in range(args.steps):
        batch = batches[step % len(batches)]
        loss = nn.functional.mse_loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    last = loss.item()
    print(f"{args.steps * ROWS / (time.perf_counter() - start):,.0f} samples/s, last loss {last:.5f}")


if __name__ == "__main__":
    main()
