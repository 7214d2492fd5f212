"""Causal attention over long sequences written as product, softmax, product; --fixed calls scaled_dot_product_attention."""

from __future__ import annotations

import argparse
import math
import time

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH = 16 if DEVICE == "cuda" else 1
LENGTH = 2048 if DEVICE == "cuda" else 1536
WIDTH, HEADS = 256, 4
FAST_BF16 = (
    torch.cuda.is_bf16_supported()
    if DEVICE == "cuda"
    else any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("amx_tile", "avx512_bf16"))
)


class Attention(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("future", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), persistent=False)
        self.fixed = fixed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        if self.fixed:
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            y = scores.masked_fill(self.future, float("-inf")).softmax(dim=-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(fixed)
        self.feed = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.feed(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="the repaired twin: scaled_dot_product_attention")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(Block(args.fixed), Block(args.fixed)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = torch.randn(4, BATCH, LENGTH, WIDTH, device=DEVICE)
    start = time.perf_counter()
    for step in range(args.steps):
        x = batches[step % len(batches)]
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=FAST_BF16):
            y = model(x)
        loss = nn.functional.mse_loss(y.float(), x.roll(-1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    last = loss.item()
    print(f"{args.steps * BATCH / (time.perf_counter() - start):,.1f} samples/s, last loss {last:.5f}")


if __name__ == "__main__":
    main()
