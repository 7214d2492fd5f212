"""Healthy: nn.LSTM on packed sequences that a generator has put into buckets of similar length."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence


def buckets(texts, labels, size):
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        yield pack_sequence([texts[i] for i in rows]), labels[rows]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(64, 128), nn.Linear(128, 3)

    def forward(self, packed):
        return self.head(self.rnn(packed)[1][0][0])


torch.manual_seed(0)
texts = [torch.randn(int(n), 64) for n in torch.randint(20, 60, (1600,))]
labels = torch.randint(3, (1600,))
model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
for packed, wanted in buckets(texts, labels, 32):
    loss = nn.functional.cross_entropy(model(packed), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
