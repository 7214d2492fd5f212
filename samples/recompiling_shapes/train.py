"""A compiled model that meets a new sequence length in nearly every step and is compiled anew each time; repaired by dynamic=True."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

LENGTHS = range(16, 1040)
VOCABULARY, WIDTH, BATCH = 512, 128, 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Tagger(nn.Module):
    """Two layers of convolution over the sequence, and a class for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index, mix in enumerate(self.mix):
            x = x + nn.functional.gelu(mix(self.norms[index](x).transpose(1, 2)).transpose(1, 2))
        return self.head(x)


def raise_the_limit(limit: int) -> None:
    """Let a function be compiled `limit` times before it runs uncompiled, as the warning about the limit invites people to do."""
    for name in ("recompile_limit", "accumulated_recompile_limit", "cache_size_limit", "accumulated_cache_size_limit"):
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="compile once, for all lengths")
    parser.add_argument("--steps", type=int, default=80)
    args = parser.parse_args()

    torch.manual_seed(0)
    raise_the_limit(2 * len(LENGTHS))
    model = Tagger().to(DEVICE)
    compiled = torch.compile(model, backend="eager", dynamic=args.fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    order = torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(1)).tolist()

    began = time.perf_counter()
    for step in range(args.steps):
        length = LENGTHS[order[step % len(order)]]
        tokens = torch.randint(VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(step)).to(DEVICE)
        loss = nn.functional.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{args.steps * BATCH / (time.perf_counter() - began):.1f} samples/s, last loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
