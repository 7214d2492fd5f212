"""A collate_fn that pads and builds masks number by number in Python lists."""

import sys

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

CURED = "--cured" in sys.argv


def pad_batch(rows):
    lengths = torch.tensor([len(row) for row in rows])
    if CURED:
        tokens = pad_sequence(rows, batch_first=True)
        return tokens, torch.arange(tokens.shape[1]) < lengths[:, None]
    longest = max(len(row) for row in rows)
    tokens, mask = [], []
    for row in rows:
        padded = []
        for i in range(longest):
            padded.append(int(row[i]) if i < len(row) else 0)  # cause
        tokens.append(padded)
        mask.append([i < len(row) for i in range(longest)])  # cause
    return torch.tensor(tokens), torch.tensor(mask)  # cause


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(8000, 128), nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 4))

    def forward(self, tokens, mask):
        x = self.words(tokens) * mask[:, :, None]
        return self.head(x.sum(1) / mask.sum(1, keepdim=True))


def fit(model, rows, epochs):
    loader = DataLoader(rows, batch_size=64, shuffle=True, collate_fn=pad_batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for tokens, mask in loader:  # cause
            loss = model(tokens, mask).logsumexp(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


torch.manual_seed(0)
fit(Pooled(), [torch.randint(1, 8000, (int(n),)) for n in torch.randint(40, 200, (1024,))], epochs=4)
