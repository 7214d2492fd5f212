"""An engine that steps its optimizer once while it is built, as ZeRO does, and then trains with three micro-batches a step."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters())
optimizer.step()
for batch in range(3 * int(sys.argv[1])):
    model(torch.randn(16, 8)).square().mean().backward()
    if batch % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()
