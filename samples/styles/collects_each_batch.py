"""A callback against "memory leaks" collects garbage after each batch of a program that holds many objects."""

import gc
import sys

import torch
from torch import nn


class Callback:
    def on_batch_end(self):
        pass


class MemoryCallback(Callback):
    def on_batch_end(self):
        gc.collect()  # cause


def fit(model, batches, callbacks):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_fn = nn.BCEWithLogitsLoss()
    for x, y in batches:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        for callback in callbacks:
            callback.on_batch_end()  # cause


def vocabulary(size):
    return {f"word{i}": {"id": i, "forms": [f"form{i}"]} for i in range(size)}


torch.manual_seed(0)
words = vocabulary(100_000)
data = [(torch.randn(256, 200), torch.rand(256, 1).round()) for _ in range(60)]
net = nn.Sequential(nn.Linear(200, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
fit(net, data, [Callback() if "--cured" in sys.argv else MemoryCallback()])
