"""Sixteen micro-batches of two for each optimizer step, though memory is free; repaired by one batch of 32."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, WIDTH = (3, 768) if DEVICE == "cpu" else (8, 8192)
BATCH, PARTS = 32, 16


def endless(batches: DataLoader[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    while True:
        yield from batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="one batch for each optimizer step")
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    parts = 1 if args.fixed else PARTS

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64 * BATCH, WIDTH))
    batches = endless(DataLoader(data, BATCH // parts))
    layers = [module for _ in range(LAYERS) for module in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    began = time.perf_counter()
    for _ in range(args.steps):
        total = torch.zeros((), device=DEVICE)
        for _ in range(parts):
            x = next(batches)[0].to(DEVICE)
            loss = nn.functional.mse_loss(model(x).squeeze(-1), x[:, 0]) / parts
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
    print(f"{args.steps * BATCH / (time.perf_counter() - began):.1f} samples/s, last loss {total.item():.5f}")


if __name__ == "__main__":
    main()
