"""Anomaly detection of a NaN hunt that was left in the training loop of a class."""

import contextlib
import sys

import torch
from torch import nn

CURED = "--cured" in sys.argv


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Experiment:
    def __init__(self):
        self.net = nn.Sequential(*(Block(64) for _ in range(24)), nn.Linear(64, 1))
        self.optimizer = torch.optim.RMSprop(self.net.parameters(), lr=1e-3, foreach=True)

    def guard(self):
        return contextlib.nullcontext() if CURED else torch.autograd.detect_anomaly(check_nan=True)  # cause

    def fit(self, batches):
        for x, y in batches:
            with self.guard():
                self.optimizer.zero_grad()
                loss = (self.net(x) - y).abs().mean()  # cause
                loss.backward()  # cause
            self.optimizer.step()


if __name__ == "__main__":
    torch.manual_seed(0)
    Experiment().fit((torch.randn(64, 64), torch.randn(64, 1)) for _ in range(60))
