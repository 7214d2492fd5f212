"""Wide layers trained with batches of 4, so that each step reads all weights for four rows; --fixed takes batches of 128."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 8192 if DEVICE == "cuda" else 2048
SMALL, LARGE = 4, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help=f"the repaired twin: batches of {LARGE}")
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    torch.manual_seed(0)
    batch = LARGE if args.fixed else SMALL
    rows = torch.randn(batch * args.steps, 64)
    hidden = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(nn.Linear(64, WIDTH), *hidden, nn.Linear(WIDTH, 64)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    start = time.perf_counter()
    for (x,) in DataLoader(TensorDataset(rows), batch_size=batch, pin_memory=DEVICE == "cuda"):
        x = x.to(DEVICE, non_blocking=True)
        loss = nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    last = loss.item()
    print(f"{len(rows) / (time.perf_counter() - start):,.0f} samples/s, last loss {last:.5f}")


if __name__ == "__main__":
    main()
