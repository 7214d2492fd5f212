"""Anomaly detection and deterministic algorithms left on after a search for a NaN; repaired by leaving them off."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCKS, WIDTH, BATCH = (24, 256, 64) if DEVICE == "cpu" else (48, 1024, 1024)


class Block(nn.Module):
    """A small residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.gelu(self.linear(self.norm(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="without the debug features")
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    if not args.fixed:
        torch.autograd.set_detect_anomaly(True)
        torch.use_deterministic_algorithms(True, warn_only=True)

    torch.manual_seed(0)
    inputs = torch.randn(8, BATCH, WIDTH, device=DEVICE)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 1)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    began = time.perf_counter()
    for step in range(args.steps):
        x = inputs[step % 8]
        loss = nn.functional.mse_loss(model(x).squeeze(-1), x[:, 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{args.steps * BATCH / (time.perf_counter() - began):.1f} samples/s, last loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
