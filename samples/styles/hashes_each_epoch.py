"""Features of raw records are hashed in the loop of a script, again in each epoch."""

import hashlib
import random
import sys

import torch
from torch import nn

CURED = "--cured" in sys.argv
random.seed(0)
torch.manual_seed(0)
records = [{f"field{n}": random.choice("abcdefgh") * random.randint(1, 4) for n in range(30)} for _ in range(1024)]
labels = torch.tensor([float(random.random() < 0.3) for _ in records])
known = []
if CURED:
    known = [[int(hashlib.blake2b(f"{k}={v}".encode()).hexdigest()[:8], 16) % 4096 for k, v in record.items()] for record in records]
table = nn.EmbeddingBag(4096, 16, mode="sum")
top = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam([*table.parameters(), *top.parameters()], lr=1e-3, fused=True)

for step in range(100):
    at = step * 128 % len(records)
    if CURED:
        rows = known[at : at + 128]
    else:
        rows = []
        for record in records[at : at + 128]:
            row = []
            for key, value in record.items():
                digest = hashlib.blake2b(f"{key}={value}".encode()).hexdigest()  # cause
                row.append(int(digest[:8], 16) % 4096)  # cause
            rows.append(row)
    scores = top(table(torch.tensor(rows))).squeeze(1)
    loss = nn.functional.binary_cross_entropy_with_logits(scores, labels[at : at + 128])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
