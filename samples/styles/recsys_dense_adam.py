"""Matrix factorisation: a batch touches 512 rows of two tables, the gradient and Adam's state are those of all 150,000."""

import sys

import torch
from torch import nn

CURED = "--cured" in sys.argv


class Factors(nn.Module):
    def __init__(self, users, items, width):
        super().__init__()
        self.user = nn.Embedding(users, width, sparse=CURED)
        self.item = nn.Embedding(items, width, sparse=CURED)

    def forward(self, user, item):
        return (self.user(user) * self.item(item)).sum(1)


class Recommender:
    def __init__(self, users=100_000, items=50_000, width=32):
        self.users, self.items = users, items
        self.model = Factors(users, items, width)
        if CURED:
            self.optimizer = torch.optim.SparseAdam(list(self.model.parameters()), lr=1e-3)
        else:
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def fit(self, ratings, batch=512):
        for user, item, rating in zip(*(column.split(batch) for column in ratings), strict=True):
            self.partial_fit(user, item, rating)

    def partial_fit(self, user, item, rating):
        self.optimizer.zero_grad()
        error = self.model(user, item) - rating
        error.pow(2).mean().backward()  # cause
        self.optimizer.step()  # cause


if __name__ == "__main__":
    torch.manual_seed(0)
    n = 512 * 60
    Recommender().fit((torch.randint(100_000, (n,)), torch.randint(50_000, (n,)), torch.rand(n) * 5))
