"""One optimizer for each parameter; they step inside the backward pass."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizers = {parameter: torch.optim.SGD([parameter], 0.01) for parameter in model.parameters()}


def update(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(update)
for _ in range(int(sys.argv[1])):
    model(torch.randn(16, 8)).square().mean().backward()
