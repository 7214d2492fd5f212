"""A deep and narrow network whose kernels are shorter than the time to launch them; --fixed replays it as CUDA graphs."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
LAYERS, WIDTH, ROWS = (200, 256, 64) if ON_GPU else (8, 64, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="the repaired twin: torch.cuda.make_graphed_callables")
    parser.add_argument("--steps", type=int, default=400 if ON_GPU else 20)
    args = parser.parse_args()
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    batches = [torch.randn(ROWS, WIDTH, device=DEVICE) for _ in range(8)]
    if args.fixed and ON_GPU:
        model = torch.cuda.make_graphed_callables(model, (batches[0].clone(),))
    start = time.perf_counter()
    for step in range(args.steps):
        batch = batches[step % len(batches)]
        loss = (model(batch) - batch.roll(1, dims=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    last = loss.item()
    print(f"{args.steps * ROWS / (time.perf_counter() - start):,.0f} samples/s, last loss {last:.5f}")


if __name__ == "__main__":
    main()
