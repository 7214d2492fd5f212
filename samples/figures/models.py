"""Small models that the claims about training steps share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from bench import Bench


def mlp(bench: Bench, width: int, layers: int) -> Any:
    """Return `layers` linear layers of `width` with ReLU on the device."""
    nn = bench.torch.nn
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU()))).to(bench.device)


def transformer(bench: Bench, width: int, layers: int, *, checkpointed: bool = False) -> Any:
    """Return a causal-free transformer encoder on the device; `checkpointed`: each layer is computed again in the backward pass."""
    torch = bench.torch

    class Encoder(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            layer = [torch.nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)]
            self.layers = torch.nn.ModuleList(layer)

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
            return x

    return Encoder().to(bench.device)


def convolutional(bench: Bench) -> Any:
    """Return a network of 3x3 convolutions with batch norm."""
    nn, channels = bench.torch.nn, (3, 64, 128, 256, 256)
    blocks = [
        part
        for before, after in itertools.pairwise(channels)
        for part in (nn.Conv2d(before, after, 3, padding=1, stride=2), nn.BatchNorm2d(after), nn.ReLU())
    ]
    return nn.Sequential(*blocks).to(bench.device)


def step(bench: Bench, model: Any, batch: Any, *, autocast: str | None = None, optimizer: Any = None) -> Callable[[], None]:
    """Return a function that runs one training step of `model` on `batch`."""
    torch = bench.torch
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), fused=True)
    kind = getattr(torch, autocast or "bfloat16")

    def run() -> None:
        optimizer.zero_grad()
        with torch.autocast(bench.device, dtype=kind, enabled=autocast is not None):
            loss = model(batch).float().square().mean()
        loss.backward()
        optimizer.step()

    return run
