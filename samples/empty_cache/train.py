"""A network that gives its cached memory back to the driver after each step; --fixed leaves it to the allocator."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
LAYERS, WIDTH, ROWS = (24, 2048, 8192) if ON_GPU else (2, 128, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="the repaired twin: no torch.cuda.empty_cache()")
    parser.add_argument("--steps", type=int, default=400 if ON_GPU else 20)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    batches = [torch.randn(ROWS, WIDTH, device=DEVICE) for _ in range(8)]
    start = time.perf_counter()
    for step in range(args.steps):
        batch = batches[step % len(batches)]
        loss = (model(batch) - batch.roll(1, dims=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not args.fixed:
            torch.cuda.empty_cache()
    last = loss.item()
    print(f"{args.steps * ROWS / (time.perf_counter() - start):,.0f} samples/s, last loss {last:.5f}")


if __name__ == "__main__":
    main()
