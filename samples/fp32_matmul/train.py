"""A wide network trained in fp32 on a device with fast 16-bit matrix units; --fixed runs it under bf16 autocast."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 16384 if DEVICE == "cuda" else 1024
WIDTH = 4096 if DEVICE == "cuda" else 1024
torch.backends.cuda.matmul.allow_tf32 = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="the repaired twin: bf16 autocast")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(0)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*hidden, nn.Linear(WIDTH, WIDTH)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    inputs = torch.randn(4, ROWS, WIDTH, device=DEVICE)
    start = time.perf_counter()
    for step in range(args.steps):
        x = inputs[step % len(inputs)]
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=args.fixed):
            y = model(x)
        loss = nn.functional.mse_loss(y.float(), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    last = loss.item()
    print(f"{args.steps * ROWS / (time.perf_counter() - start):,.0f} samples/s, last loss {last:.5f}")


if __name__ == "__main__":
    main()
