"""A healthy control: a small language model with fused attention, a fused optimizer, bf16 where the device has it, and full batches."""

from __future__ import annotations

import argparse
import contextlib
import time

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 2048
LAYERS, WIDTH, BATCH, LENGTH = (2, 256, 8, 128) if DEVICE == "cpu" else (12, 2048, 16, 1024)


class Block(nn.Module):
    """Causal attention and a feed-forward layer, both with what is normalised before them added."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.projections, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in self.projections(self.norms[0](x)).chunk(3, dim=-1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norms[1](x))


def build() -> nn.Module:
    """Return the language model."""
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="nothing is planted here, so nothing changes")
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()

    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (8, BATCH, LENGTH + 1), device=DEVICE)
    model = build().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    fast_bf16 = DEVICE == "cuda" or any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("amx_tile", "avx512_bf16"))
    autocast = torch.autocast(DEVICE, torch.bfloat16) if fast_bf16 else contextlib.nullcontext()

    began = time.perf_counter()
    for step in range(args.steps):
        batch = tokens[step % 8]
        with autocast:
            logits = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{args.steps * BATCH / (time.perf_counter() - began):.1f} samples/s, last loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
