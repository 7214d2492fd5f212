"""Regression on a table that numpy made: float64, so the model was made double to fit ("expected Float but found Double")."""

import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CURED = "--cured" in sys.argv
rng = np.random.default_rng(0)
table = rng.standard_normal((12_800, 256))
target = table[:, :4].sum(axis=1, keepdims=True)

x, y = torch.from_numpy(table), torch.from_numpy(target)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
if CURED:
    x, y = x.float(), y.float()
else:
    model = model.double()  # cause

loader = DataLoader(TensorDataset(x, y), batch_size=256, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loss_fn = nn.MSELoss()
for epoch in range(2):
    for inputs, wanted in loader:
        prediction = model(inputs)  # cause
        loss = loss_fn(prediction, wanted)
        optimizer.zero_grad()
        loss.backward()  # cause
        optimizer.step()
