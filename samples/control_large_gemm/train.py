"""A healthy run: one large square product in the fastest training type of the device, forward and backward."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE = 16384 if DEVICE == "cuda" else 3072
FAST_BF16 = (
    torch.cuda.is_bf16_supported()
    if DEVICE == "cuda"
    else any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("amx_tile", "avx512_bf16"))
)
DTYPE = torch.bfloat16 if FAST_BF16 else torch.float32
torch.backends.cuda.matmul.allow_tf32 = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Linear(SIZE, SIZE, bias=False, device=DEVICE, dtype=DTYPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    inputs = torch.randn(SIZE, SIZE, device=DEVICE, dtype=DTYPE).requires_grad_()
    start = time.perf_counter()
    for _ in range(args.steps):
        inputs.grad = None
        loss = model(inputs).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    last = loss.item()
    print(f"{args.steps * SIZE / (time.perf_counter() - start):,.0f} samples/s, last loss {last:.5f}")


if __name__ == "__main__":
    main()
