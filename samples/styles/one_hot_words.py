"""A language model that multiplies one-hot rows with its word vectors instead of looking them up."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

CURED = "--cured" in sys.argv
WORDS = 4000


class WordModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(WORDS, 96) * 0.02)
        self.mix = nn.GRU(96, 96, batch_first=True)
        self.head = nn.Linear(96, 50)

    def forward(self, tokens):
        if CURED:
            x = F.embedding(tokens, self.vectors)
        else:
            x = F.one_hot(tokens, WORDS).float() @ self.vectors  # cause
        return self.head(self.mix(x)[0][:, -1])


def corpus(steps):
    for _ in range(steps):
        yield torch.randint(WORDS, (32, 24)), torch.randint(50, (32,))


def run():
    torch.manual_seed(0)
    model = WordModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (tokens, target) in enumerate(corpus(50)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens), target)
        loss.backward()
        optimizer.step()
        if i % 25 == 0:
            print(i, loss.item())


run()
