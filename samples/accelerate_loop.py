"""A training loop with Accelerate and gradient accumulation: a step of the recording is an update of the parameters."""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gpudiag.integrations.accelerate import profile


def main(path: str = "runs/accelerate_loop") -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=4)
    inputs = torch.randn(4096, 64)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=32, shuffle=True))

    with profile(accelerator, path) as prof:
        for epoch in range(2):
            for x, y in prof.steps(loader):
                with accelerator.accumulate(model):
                    loss = nn.functional.mse_loss(model(x), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
            accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}")
    accelerator.print(f"bundle: {prof.path} (read it with: gpudiag report {prof.path})")


if __name__ == "__main__":
    main(*sys.argv[1:2])
