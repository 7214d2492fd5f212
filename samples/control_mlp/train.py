"""A healthy run: a wide network with a good batch, bf16 autocast where the device is fast at it, and a fused optimizer."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 16384 if DEVICE == "cuda" else 2048
WIDTH = 4096 if DEVICE == "cuda" else 1024
FAST_BF16 = (
    torch.cuda.is_bf16_supported()
    if DEVICE == "cuda"
    else any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("amx_tile", "avx512_bf16"))
)
torch.backends.cuda.matmul.allow_tf32 = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    torch.manual_seed(0)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))]
    model = nn.Sequential(*hidden, nn.Linear(WIDTH, WIDTH)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    inputs = torch.randn(4, ROWS, WIDTH, device=DEVICE, dtype=torch.bfloat16 if FAST_BF16 else torch.float32)
    start = time.perf_counter()
    for step in range(args.steps):
        x = inputs[step % len(inputs)]
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=FAST_BF16):
            loss = nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    last = loss.item()
    print(f"{args.steps * ROWS / (time.perf_counter() - start):,.0f} samples/s, last loss {last:.5f}")


if __name__ == "__main__":
    main()
