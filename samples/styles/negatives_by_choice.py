"""word2vec with negative sampling: np.random.choice(..., p=...) sums and searches the whole vocabulary for each centre word."""

import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

CURED = "--cured" in sys.argv
WORDS, NEGATIVES = 30_000, 5
rng = np.random.RandomState(0)
weights = (1 / np.arange(1, WORDS + 1)) ** 0.75
weights /= weights.sum()
cumulative = weights.cumsum()


def draw_negatives(n):
    if CURED:
        return torch.from_numpy(np.searchsorted(cumulative, rng.random_sample((n, NEGATIVES))).clip(max=WORDS - 1))
    rows = [rng.choice(WORDS, size=NEGATIVES, p=weights) for _ in range(n)]  # cause
    return torch.from_numpy(np.stack(rows))  # cause


class SkipGram(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.centre = nn.Embedding(WORDS, width, sparse=True)
        self.context = nn.Embedding(WORDS, width, sparse=True)

    def forward(self, word, context, negatives):
        v = self.centre(word)
        good = F.logsigmoid((v * self.context(context)).sum(1))
        bad = F.logsigmoid(-torch.einsum("nd,nkd->nk", v, self.context(negatives))).sum(1)
        return -(good + bad).mean()


def train(model, pairs, batch=128):
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=1e-3)
    for word, context in pairs.split(batch, dim=1):
        optimizer.zero_grad()
        loss = model(word, context, draw_negatives(len(word)))  # cause
        loss.backward()
        optimizer.step()


torch.manual_seed(0)
train(SkipGram(), torch.randint(WORDS, (2, 128 * 50)))
