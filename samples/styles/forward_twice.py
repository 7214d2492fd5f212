"""The model runs once for the loss and once more, in the same mode and with a graph, for the accuracy that is shown."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

CURED = "--cured" in sys.argv


class Encoder(nn.Module):
    def __init__(self, width=96, classes=6):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.body(x).mean(1))


def train(model, optimizer, steps):
    right = torch.zeros((), dtype=torch.long)
    for _ in range(steps):
        x, y = torch.randn(24, 32, 96), torch.randint(6, (24,))
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = logits if CURED else model(x)  # cause
        right += (shown.detach().argmax(1) == y).sum()
    return right


torch.manual_seed(0)
model = Encoder()
print(train(model, torch.optim.AdamW(model.parameters(), fused=True), 60).item())
