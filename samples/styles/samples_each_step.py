"""A character model that shows a sample after each step: the whole prefix again for each character."""

import sys

import torch
from torch import nn

CURED = "--cured" in sys.argv


class CharRnn(nn.Module):
    def __init__(self, characters=60, width=64):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(characters, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, characters)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


@torch.no_grad()
def sample(model, length=30):
    ids = torch.zeros(1, 1, dtype=torch.long)
    for _ in range(length):
        chances = model(ids)[:, -1].softmax(-1)  # cause
        ids = torch.cat([ids, torch.multinomial(chances, 1)], 1)  # cause
    return ids[0].tolist()


def run(epochs, shown):
    model = CharRnn()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    for _ in range(epochs):
        for batch in range(20):
            ids = torch.randint(60, (16, 33))
            loss = nn.functional.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not CURED or batch == 0:
                shown.append(sample(model))  # cause


torch.manual_seed(0)
run(3, [])
