"""The networks of the sample recordings, each in two sizes: one that keeps a data-centre GPU busy, one that runs on any CPU in a second."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class TextSize(NamedTuple):
    """Shape of a transformer and its batches."""

    vocabulary: int
    width: int
    heads: int
    blocks: int
    length: int
    batch: int


TEXT = {False: TextSize(32_000, 1024, 16, 8, 1024, 8), True: TextSize(64, 32, 2, 2, 16, 2)}


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, size: TextSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.project = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.mlp = nn.Sequential(nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.mlp_norm(x))


class Gpt(nn.Module):
    """A decoder-only language model; `checkpointed`: its blocks run again in the backward pass."""

    def __init__(self, size: TextSize, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.norm, self.output = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)
        self.checkpointed = checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.output(self.norm(x))


class Bottleneck(nn.Module):
    """The residual block of ResNet-50 (He et al., arXiv:1512.03385, figure 5; stride in the 3x3 convolution)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        layers = ((inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        self.convs = nn.ModuleList(nn.Conv2d(a, b, k, s, padding=k // 2, bias=False) for a, b, k, s in layers)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in layers)
        same = stride == 1 and inputs == 4 * width
        self.shortcut = None if same else nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x if self.shortcut is None else self.shortcut(x)
        for place, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = norm(conv(x))
            x = functional.relu(x) if place < 2 else x
        return functional.relu(x + kept)


def resnet(stages: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> nn.Module:
    """Return a ResNet with so many bottlenecks a stage; the default is ResNet-50."""
    stem = (nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1))
    inputs, blocks = width, []
    for stage, count in enumerate(stages):
        for place in range(count):
            blocks.append(Bottleneck(inputs, width << stage, 2 if stage and not place else 1))
            inputs = 4 * (width << stage)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class Dlrm(nn.Module):
    """Recommendation model: embedding bags, bottom and top MLP, pairwise dot products (Naumov et al., arXiv:1906.00091)."""

    def __init__(self, tables: int, rows: int, width: int, dense: int, hidden: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum", sparse=True) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(dense, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(pairs + width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, offset=-1))

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        bottom = self.bottom(numbers)
        rows = torch.stack([bottom, *(bag(ids[:, place]) for place, bag in enumerate(self.bags))], dim=1)
        products = torch.bmm(rows, rows.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([bottom, products], dim=1)).squeeze(1)


class Lstm(nn.Module):
    """A language model of LSTM layers."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.output = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.lstm(self.token(tokens))[0])
