"""LBFGS on random Fourier features: each call of the closure makes the features of all the data again."""

import math
import sys

import torch
import torch.nn.functional as F

CURED = "--cured" in sys.argv
torch.manual_seed(0)
points, labels = torch.randn(6000, 20), torch.randint(2, (6000,)).float()
frequencies, shifts = torch.randn(20, 400), torch.rand(400) * 2 * math.pi
weight = torch.zeros(400, requires_grad=True)
optimizer = torch.optim.LBFGS([weight], lr=0.5, max_iter=6, history_size=5, tolerance_change=0, tolerance_grad=0)


def fourier(x):
    """Rahimi and Recht 2007."""
    return math.sqrt(2 / 400) * torch.cos(x @ frequencies + shifts)  # cause


known = fourier(points) if CURED else None


def closure():
    optimizer.zero_grad()
    features = known if CURED else fourier(points)  # cause
    loss = F.binary_cross_entropy_with_logits(features @ weight, labels) + 1e-4 * weight.pow(2).sum()
    loss.backward()
    return loss


for _epoch in range(40):
    optimizer.step(closure)
