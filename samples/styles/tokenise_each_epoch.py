"""Bag of bigrams: a generator splits the same texts by regular expressions in every epoch."""

import random
import re
import sys
from itertools import pairwise

import torch
from torch import nn

CURED = "--cured" in sys.argv
TOKEN = re.compile(r"\w+|[^\w\s]")


def tokenise(text, buckets=20_000):
    tokens = [t.strip("'") for t in TOKEN.findall(text.lower())]  # cause
    pairs = [a + "_" + b for a, b in pairwise(tokens)]  # cause
    return torch.tensor([sum(map(ord, p)) * 31 % buckets for p in tokens + pairs])  # cause


def make_texts(count=320):
    random.seed(0)
    words = ["".join(random.choices("abcdefghij", k=random.randint(2, 9))) for _ in range(500)]
    return [" ".join(random.choices(words, k=150)) + "." for _ in range(count)]


def epochs(texts, labels, count, size=32):
    known = [tokenise(text) for text in texts] if CURED else None
    for _ in range(count):
        for start in range(0, len(texts), size):
            rows = known[start : start + size] if CURED else [tokenise(text) for text in texts[start : start + size]]  # cause
            offsets = torch.tensor([0] + [len(row) for row in rows[:-1]]).cumsum(0)
            yield torch.cat(rows), offsets, labels[start : start + size]


torch.manual_seed(0)
texts = make_texts()
bag, head = nn.EmbeddingBag(20_000, 64), nn.Linear(64, 3)
optimizer = torch.optim.SGD([*bag.parameters(), *head.parameters()], lr=0.1)
for tokens, offsets, target in epochs(texts, torch.randint(3, (len(texts),)), count=8):
    optimizer.zero_grad()
    nn.functional.cross_entropy(head(bag(tokens, offsets)), target).backward()
    optimizer.step()
