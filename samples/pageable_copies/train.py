"""Batches are copied to the GPU from ordinary memory, each copy holding up the host; --fixed pins them and copies beside it."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
LAYERS, WIDTH, ROWS = (8, 4096, 4096) if ON_GPU else (2, 128, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="the repaired twin: pinned memory and non_blocking=True")
    parser.add_argument("--steps", type=int, default=500 if ON_GPU else 20)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    batches = [torch.randn(ROWS, WIDTH) for _ in range(8)]
    if args.fixed and ON_GPU:
        batches = [batch.pin_memory() for batch in batches]
    start = time.perf_counter()
    for step in range(args.steps):
        batch = batches[step % len(batches)].to(DEVICE, non_blocking=args.fixed)
        loss = (model(batch) - batch.roll(1, dims=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    last = loss.item()
    print(f"{args.steps * ROWS / (time.perf_counter() - start):,.0f} samples/s, last loss {last:.5f}")


if __name__ == "__main__":
    main()
