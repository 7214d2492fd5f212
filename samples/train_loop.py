"""The smallest training loop that gpudiag records: three lines of it are gpudiag's."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gpudiag


def main(path: str = "runs/train_loop") -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2048, 64)
    data = TensorDataset(inputs, inputs[:, :8].sum(dim=1, keepdim=True))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with gpudiag.profile(path) as prof:
        for epoch in range(2):
            for x, y in prof.steps(DataLoader(data, batch_size=64, shuffle=True)):
                loss = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    print(f"bundle: {prof.path} (read it with: gpudiag report {prof.path})")


if __name__ == "__main__":
    main(*sys.argv[1:2])
