"""A callback writes norms and histograms of all parameters to a JSON file after each batch, and syncs the file to disk."""

import json
import os
import sys
import tempfile

import torch
from torch import nn

EVERY = 40 if "--cured" in sys.argv else 1


class JsonLogger:
    def __init__(self, path):
        self.file = open(path, "w")  # noqa: SIM115

    def on_batch_end(self, step, model, loss):
        if step % EVERY:
            return
        record = {"step": step, "loss": loss.item()}
        for name, p in model.named_parameters():
            record[name] = {
                "norm": p.norm().item(),  # cause
                "grad": p.grad.norm().item(),  # cause
                "histogram": torch.histc(p.detach(), 64).tolist(),  # cause
                "values": p.detach().flatten()[:2000].tolist(),  # cause
            }
        self.file.write(json.dumps(record) + "\n")  # cause
        self.file.flush()  # cause
        os.fsync(self.file.fileno())  # cause


class Fit:
    def __init__(self, model, callbacks):
        self.model, self.callbacks = model, callbacks
        self.optimizer = torch.optim.Adam(model.parameters(), fused=True)

    def __call__(self, steps):
        for step in range(steps):
            x = torch.randn(64, 128)
            loss = (self.model(x) - x.roll(1, 1)).pow(2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            for callback in self.callbacks:
                callback.on_batch_end(step, self.model, loss)


torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU()) for _ in range(8)]
with tempfile.TemporaryDirectory() as folder:
    Fit(nn.Sequential(*layers, nn.Linear(128, 128)), [JsonLogger(os.path.join(folder, "log.jsonl"))])(80)
