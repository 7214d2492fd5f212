"""Retrieval: all items are sorted at each step to see whether the right one is among the first ten."""

import sys

import torch
from torch import nn

CURED = "--cured" in sys.argv


def hits_at_10(scores, wanted):
    if CURED:
        best = scores.topk(10, dim=1).indices
    else:
        best = torch.argsort(scores, dim=1, descending=True)[:, :10]  # cause
    return (best == wanted[:, None]).any(1).float().mean()


class TwoTowers(nn.Module):
    def __init__(self, queries=2000, items=20_000, width=48):
        super().__init__()
        self.query = nn.Sequential(nn.Embedding(queries, width), nn.Linear(width, width))
        self.item = nn.Parameter(torch.randn(items, width) * 0.1)

    def forward(self, q):
        return self.query(q) @ self.item.T


torch.manual_seed(0)
model = TwoTowers()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
running = torch.zeros(())
for _ in range(50):
    q, wanted = torch.randint(2000, (64,)), torch.randint(20_000, (64,))
    scores = model(q)
    loss = nn.functional.cross_entropy(scores, wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    running = 0.9 * running + 0.1 * hits_at_10(scores.detach(), wanted)
