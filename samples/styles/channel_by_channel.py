"""A depthwise convolution written as a loop over channels."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

CURED = "--cured" in sys.argv


class Depthwise(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, 1, 9) * 0.1)

    def forward(self, x):
        if CURED:
            return F.conv1d(x, self.weight, padding=4, groups=len(self.weight))
        return torch.cat([F.conv1d(x[:, c : c + 1], self.weight[c : c + 1], padding=4) for c in range(x.shape[1])], dim=1)  # cause


class Keywords(nn.Module):
    def __init__(self, channels=64):
        super().__init__()
        self.first = nn.Conv1d(1, channels, 16, stride=8)
        self.mix = nn.ModuleList(nn.Sequential(Depthwise(channels), nn.Conv1d(channels, channels, 1), nn.ReLU()) for _ in range(2))
        self.last = nn.Linear(channels, 12)

    def forward(self, x):
        x = self.first(x)
        for layer in self.mix:
            x = x + layer(x)
        return self.last(x.mean(2))


def train():
    torch.manual_seed(0)
    model = Keywords()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(50):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(16, 1, 2000)), torch.randint(12, (16,))).backward()
        optimizer.step()


train()
