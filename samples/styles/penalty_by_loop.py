"""Weight decay written into the loss: a square, a sum and an addition for each parameter, and their backward."""

import sys

import torch
from torch import nn

CURED = "--cured" in sys.argv
DECAY = 1e-4


def blocks(n, width=48):
    for _ in range(n):
        yield nn.Linear(width, width)
        yield nn.BatchNorm1d(width)
        yield nn.PReLU()


def penalty(model):
    total = torch.tensor(0.0)
    for p in model.parameters():
        total = total + torch.norm(p, 2) ** 2  # cause
    return 0.5 * DECAY * total


torch.manual_seed(0)
net = nn.Sequential(*blocks(30), nn.Linear(48, 8))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=DECAY if CURED else 0.0)
for _ in range(80):
    x, y = torch.randn(64, 48), torch.randint(8, (64,))
    loss = nn.functional.cross_entropy(net(x), y)
    if not CURED:
        loss = loss + penalty(net)  # cause
    optimizer.zero_grad()
    loss.backward()  # cause
    optimizer.step()
