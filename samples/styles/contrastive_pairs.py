"""SimCLR: the similarity of each pair of views is computed by itself."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

CURED = "--cured" in sys.argv


def nt_xent(z, temperature=0.5):
    """Chen et al. 2020, equation 1; rows i and i + n / 2 are views of one image."""
    n = len(z)
    if CURED:
        z = F.normalize(z, dim=1)
        scores = z @ z.T / temperature
    else:
        rows = []
        for i in range(n):
            rows.append(torch.stack([F.cosine_similarity(z[i], z[j], dim=0) / temperature for j in range(n)]))  # cause
        scores = torch.stack(rows)
    scores = scores.masked_fill(torch.eye(n, dtype=torch.bool), float("-inf"))
    return F.cross_entropy(scores, (torch.arange(n) + n // 2) % n)


def two_views(images):
    return torch.cat([images + 0.1 * torch.randn_like(images), images.flip(3) + 0.1 * torch.randn_like(images)])


torch.manual_seed(0)
encoder = nn.Sequential(
    nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 64, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(64)
)
data = torch.rand(256, 3, 32, 32)
encoder(data[:1])
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
for step in range(30):
    optimizer.zero_grad()
    loss = nt_xent(encoder(two_views(data[step % 8 * 6 :][:6])))
    loss.backward()
    optimizer.step()
