"""Gradient accumulation over 32 batches of one row, on a model whose batch of 32 would fit."""

import argparse

import torch
from torch import nn


def build():
    return nn.Sequential(nn.Linear(100, 256), nn.SiLU(), nn.LayerNorm(256), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 20))


def update(model, optimizer, x, y, micro):
    optimizer.zero_grad()
    parts = len(x) // micro
    for a, b in zip(x.split(micro), y.split(micro), strict=True):
        loss = nn.functional.cross_entropy(model(a), b) / parts  # cause
        loss.backward()  # cause
    optimizer.step()


def main(args):
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(80):
        update(model, optimizer, torch.randn(32, 100), torch.randint(20, (32,)), 32 if args.cured else args.micro_batch)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--cured", action="store_true")
    main(parser.parse_args())
