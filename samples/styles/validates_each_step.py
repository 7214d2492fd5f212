"""The whole validation set is run after each training step, and with a graph that nobody uses."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

EVERY = 30 if "--cured" in sys.argv else 1


def train_step(model, optimizer, x, y):
    model.train()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def evaluate(model, x, y):
    model.eval()
    right = 0
    for inputs, labels in zip(x.split(256), y.split(256), strict=True):
        right += (model(inputs).argmax(1) == labels).sum()  # cause
    return right / len(x)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train_x, train_y = torch.randn(4096, 256), torch.randint(20, (4096,))
    valid_x, valid_y = torch.randn(2048, 256), torch.randint(20, (2048,))
    best = torch.zeros(())
    for step in range(90):
        rows = torch.randint(4096, (128,))
        train_step(model, optimizer, train_x[rows], train_y[rows])
        if step % EVERY == 0:
            best = torch.maximum(best, evaluate(model, valid_x, valid_y))  # cause
    print(f"best accuracy {best.item():.3f}")


main()
