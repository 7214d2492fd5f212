"""An optimizer that calls its closure, and so the backward pass, as often as it likes within one step."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model, x, y = nn.Linear(20, 1), torch.randn(256, 20), torch.randn(256, 1)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=int([*sys.argv, 4][2]))


def closure():
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    return loss


for _ in range(int(sys.argv[1])):
    optimizer.step(closure)
