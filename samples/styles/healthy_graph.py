"""Healthy: message passing by index_add on a batch of graphs."""

import torch
import torch.nn.functional as F
from torch import nn

BF16 = any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("amx_tile", "avx512_bf16"))


class Sage(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.own, self.others = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, source, target, degree):
        mean = torch.zeros_like(x).index_add(0, target, x[source]) / degree
        return F.relu(self.own(x) + self.others(mean))


def sample(nodes=6000, edges=30_000):
    source, target = torch.randint(nodes, (2, edges))
    degree = torch.bincount(target, minlength=nodes).clamp(min=1)[:, None]
    return torch.randn(nodes, 96), source, target, degree, torch.randint(8, (nodes,))


def train(batches):
    layers, head = nn.ModuleList(Sage(96) for _ in range(2)), nn.Linear(96, 8)
    optimizer = torch.optim.Adam([*layers.parameters(), *head.parameters()], lr=1e-3, fused=True)
    for x, source, target, degree, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=BF16):
            for layer in layers:
                x = layer(x, source, target, degree)
            loss = F.cross_entropy(head(x), y)
        loss.backward()
        optimizer.step()


torch.manual_seed(0)
graphs = [sample() for _ in range(5)]
train(graphs[i % 5] for i in range(50))
