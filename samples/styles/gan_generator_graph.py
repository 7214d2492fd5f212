"""A GAN at module level: the discriminator's step runs backward through the generator too, for the fakes are not detached."""

import sys

import torch
from torch import nn

CURED = "--cured" in sys.argv
torch.manual_seed(0)
up = [nn.ConvTranspose2d(i, o, 4, 2, 1) for i, o in [(128, 64), (64, 32), (32, 3)]]
G = nn.Sequential(nn.Linear(64, 128 * 16), nn.Unflatten(1, (128, 4, 4)), up[0], nn.ReLU(), up[1], nn.ReLU(), up[2], nn.Tanh())
D = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 4), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(128, 1))
opt_g = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
opt_d = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
bce = nn.BCEWithLogitsLoss()
images = torch.rand(2048, 3, 32, 32) * 2 - 1

for step in range(60):
    real = images[step * 32 % 2048 :][:64]
    ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

    opt_d.zero_grad()
    if CURED:
        with torch.no_grad():
            fake = G(torch.randn(len(real), 64))
    else:
        fake = G(torch.randn(len(real), 64))  # cause
    loss_d = bce(D(real), ones) + bce(D(fake), zeros)
    loss_d.backward()  # cause
    opt_d.step()

    opt_g.zero_grad()
    loss_g = bce(D(G(torch.randn(len(real), 64))), ones)
    loss_g.backward()
    opt_g.step()
