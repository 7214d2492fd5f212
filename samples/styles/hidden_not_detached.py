"""Chunks of one stream through a frozen encoder: the hidden state is never detached, so backward goes further back at each step."""

import sys

import torch
from torch import nn

CURED = "--cured" in sys.argv


def main():
    torch.manual_seed(0)
    stream = torch.randint(500, (8, 2001))
    embed, rnn, head = nn.Embedding(500, 48), nn.GRU(48, 48, batch_first=True).requires_grad_(False), nn.Linear(48, 500)
    optimizer = torch.optim.SGD([*embed.parameters(), *head.parameters()], lr=0.1)
    criterion = nn.CrossEntropyLoss()
    hidden = torch.zeros(1, 8, 48)
    for start in range(0, 1200, 20):
        x, y = stream[:, start : start + 20], stream[:, start + 1 : start + 21]
        if CURED:
            hidden = hidden.detach()
        out, hidden = rnn(embed(x), hidden)  # cause
        loss = criterion(head(out).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward(retain_graph=not CURED)  # cause
        optimizer.step()


main()
