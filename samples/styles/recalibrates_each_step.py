"""Averaged weights: the batch norms are recalibrated over eight batches after each step, without gradients."""

import sys

import torch
from torch import nn

CURED = "--cured" in sys.argv
torch.manual_seed(0)
narrow = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU())
wide = nn.Sequential(nn.Conv2d(16, 32, 3, 2), nn.BatchNorm2d(32), nn.ReLU())
net = nn.Sequential(narrow, wide, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=True)
kept = [torch.randn(32, 3, 32, 32) for _ in range(8)]


@torch.no_grad()
def recalibrate(model, batches):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    for batch in batches:
        model(batch)  # cause


def train(steps):
    for step in range(steps):
        x, y = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not CURED or step == steps - 1:
            recalibrate(net, kept)  # cause


train(60)
