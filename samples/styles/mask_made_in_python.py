"""A decoder makes its causal mask and its sinusoidal positions with nested Python loops in each forward."""

import math
import sys

import torch
import torch.nn.functional as F
from torch import nn

CURED = "--cured" in sys.argv


def causal_mask(n):
    return torch.tensor([[0.0 if j <= i else float("-inf") for j in range(n)] for i in range(n)])  # cause


def positions(n, width):
    table = []
    for i in range(n):
        angles = [i / 10_000 ** (2 * (k // 2) / width) for k in range(width)]  # cause
        table.append([math.sin(a) if k % 2 == 0 else math.cos(a) for k, a in enumerate(angles)])  # cause
    return torch.tensor(table)  # cause


class Decoder(nn.Module):
    def __init__(self, vocabulary=300, width=64, n=96):
        super().__init__()
        self.embed, self.out = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.qkv, self.mlp = nn.Linear(width, 3 * width), nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, width))
        if CURED:
            self.register_buffer("table", positions(n, width))

    def forward(self, tokens):
        b, n = tokens.shape
        x = self.embed(tokens)
        x = x + (self.table if CURED else positions(n, x.shape[2]))  # cause
        q, k, v = self.qkv(x).view(b, n, 3, 4, -1).permute(2, 0, 3, 1, 4)
        if CURED:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_mask(n))  # cause
        x = x + y.transpose(1, 2).reshape(b, n, -1)
        return self.out(x + self.mlp(x))


torch.manual_seed(0)
decoder = Decoder()
optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-4, fused=True)
for _ in range(80):
    text = torch.randint(300, (4, 97))
    loss = F.cross_entropy(decoder(text[:, :-1]).transpose(1, 2), text[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
