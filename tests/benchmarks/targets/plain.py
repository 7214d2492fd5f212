"""An ordinary loop that knows nothing of gpudiag: images, a network of torch's own classes, clipping, a log and a checkpoint an epoch."""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def network(width: int) -> nn.Sequential:
    """Return a root whose class is torch's own: compiling it must reach what it calls."""
    block = [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
    first = [nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *block, nn.Flatten(), nn.Dropout(0.1), nn.Linear(width * 16, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--pause-ms", type=float, default=0.0, help="the planted harm: wait so long in each step")
    parser.add_argument("--out", type=Path, default=Path("trained"))
    given = parser.parse_args()
    torch.manual_seed(0)
    images, classes = torch.randn(512, 3, 16, 16), torch.randint(0, 10, (512,))
    loader = DataLoader(TensorDataset(images, classes), batch_size=32, shuffle=True)
    model = network(32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.rate)
    given.out.mkdir(parents=True, exist_ok=True)
    with open(given.out / "log.csv", "w", newline="") as file:
        log = csv.writer(file)
        for epoch in range(given.epochs):
            for x, y in loader:
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if given.pause_ms:
                    time.sleep(given.pause_ms / 1e3)
                log.writerow([epoch, loss.item()])
            torch.save(model.state_dict(), given.out / "last.pt")


if __name__ == "__main__":
    main()
