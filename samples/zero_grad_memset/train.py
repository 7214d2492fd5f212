"""Many parameters, few rows, and gradients that are filled with zeros in each step; repaired by dropping them (set_to_none=True)."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, WIDTH, BATCH = (64, 768, 4) if DEVICE == "cpu" else (64, 4096, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="drop gradients instead of filling them with zeros")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.randn(8, BATCH, WIDTH, device=DEVICE)
    layers = [module for _ in range(LAYERS) for module in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)

    began = time.perf_counter()
    for step in range(args.steps):
        x = inputs[step % 8]
        loss = nn.functional.mse_loss(model(x).squeeze(-1), x[:, 0])
        optimizer.zero_grad(set_to_none=args.fixed)
        loss.backward()
        optimizer.step()
    print(f"{args.steps * BATCH / (time.perf_counter() - began):.1f} samples/s, last loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
