"""A trainer saves a checkpoint whenever the loss is the best so far, which early in a training is nearly every step."""

import io
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

PATIENCE = 50 if "--cured" in sys.argv else 1


class Trainer:
    best = float("inf")

    def __init__(self, folder):
        self.path = Path(folder) / "best.pt"
        self.model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def checkpoint(self, step, loss):
        if step % PATIENCE == 0 and loss < self.best:
            self.best = loss
            buffer = io.BytesIO()
            torch.save({"step": step, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, buffer)  # cause
            self.path.write_bytes(buffer.getvalue())  # cause

    def train(self, steps):
        x = torch.randn(64, 512)
        for step in range(steps):
            self.optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.mse_loss(self.model(x), x)
            loss.backward()
            self.optimizer.step()
            self.checkpoint(step, float(loss.detach()))


if __name__ == "__main__":
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(folder).train(70)
