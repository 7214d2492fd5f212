"""An ordinary loop: DataLoader, AdamW, accumulation on request, a loss written to a file."""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--validate", action="store_true")
parser.add_argument("--out", type=Path)
arguments = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(32, 16)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
training, validation = DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=2)
model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses, batches = [], 0
while len(losses) < arguments.steps * arguments.accumulation:
    for inputs, targets in training:
        loss = (model(inputs) - targets).square().mean() / arguments.accumulation
        loss.backward()
        losses.append(loss.item())
        batches += 1
        if batches % arguments.accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {batches // arguments.accumulation}: {losses[-1]!r}")
    if arguments.validate:
        with torch.no_grad():
            print("validation", sum((model(inputs) - targets).square().mean().item() for inputs, targets in validation))
if arguments.out:
    arguments.out.write_text("\n".join(map(repr, losses)))
