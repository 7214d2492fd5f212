"""DDPM on small images: the noise schedule is multiplied up again for each sample of each batch, in Python."""

import math
import sys

import torch
import torch.nn.functional as F
from torch import nn

CURED = "--cured" in sys.argv
T = 1000


class UNet(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.time = nn.Linear(1, c)
        self.down, self.low = nn.Conv2d(1, c, 3, padding=1), nn.Conv2d(c, 2 * c, 3, stride=2, padding=1)
        self.up, self.out = nn.ConvTranspose2d(2 * c, c, 2, 2), nn.Conv2d(2 * c, 1, 3, padding=1)

    def forward(self, x, t):
        top = F.silu(self.down(x) + self.time(t[:, None] / T)[:, :, None, None])
        return self.out(torch.cat([top, F.silu(self.up(F.silu(self.low(top))))], 1))


def alpha_bar(t):
    product = 1.0
    for s in range(t + 1):
        product *= 1 - (1e-4 + (0.02 - 1e-4) * s / (T - 1))  # cause
    return product


TABLE = torch.tensor([alpha_bar(t) for t in range(T)]) if CURED else None


def add_noise(images, t, noise):
    if CURED:
        signal = TABLE[t][:, None, None, None]
        return signal.sqrt() * images + (1 - signal).sqrt() * noise
    noisy = []
    for image, step, n in zip(images, t.tolist(), noise, strict=True):
        signal = alpha_bar(step)  # cause
        noisy.append(math.sqrt(signal) * image + math.sqrt(1 - signal) * n)  # cause
    return torch.stack(noisy)  # cause


def train(steps=60):
    torch.manual_seed(0)
    images, model = torch.randn(512, 1, 16, 16), UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        batch = images[torch.randint(512, (64,))]
        t, noise = torch.randint(T, (64,)), torch.randn_like(batch)
        loss = F.mse_loss(model(add_noise(batch, t, noise), t), noise)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


train()
