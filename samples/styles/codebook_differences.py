"""VQ-VAE: distances to the codebook by a tensor of all differences (rows x codes x width)."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

CURED = "--cured" in sys.argv


class Quantiser(nn.Module):
    def __init__(self, codes=512, width=32):
        super().__init__()
        self.codebook = nn.Parameter(torch.randn(codes, width))

    def forward(self, z):
        if CURED:
            with torch.no_grad():
                distances = self.codebook.pow(2).sum(1) - 2 * z @ self.codebook.T
        else:
            distances = (z[:, None, :] - self.codebook[None, :, :]).pow(2).sum(-1)  # cause
        q = F.embedding(distances.argmin(1), self.codebook)
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        return z + (q - z).detach(), loss


class VqVae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
        self.decode = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
        self.quantise = Quantiser()

    def forward(self, x):
        z, loss = self.quantise(self.encode(x).view(-1, 32))
        return F.mse_loss(self.decode(z.view(-1, 256)), x) + loss


def train(steps):
    torch.manual_seed(0)
    model = VqVae()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(128, 256)).backward()
        optimizer.step()


train(60)
