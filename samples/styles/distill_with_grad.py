"""Knowledge distillation: the teacher's forward builds a graph, and backward computes the teacher's gradients as well."""

import argparse
import contextlib

import torch
import torch.nn.functional as F
from torch import nn


def network(width, depth):
    layers = [nn.Linear(128, width), nn.GELU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 100))


class Distiller:
    def __init__(self, cured):
        self.teacher, self.student = network(768, 4).eval(), network(192, 2)
        self.optimizer = torch.optim.SGD(self.student.parameters(), lr=0.05, momentum=0.9)
        self.teaching = torch.no_grad if cured else contextlib.nullcontext

    def loss(self, x, y, temperature=4.0):
        with self.teaching():
            wanted = F.softmax(self.teacher(x) / temperature, dim=1)  # cause
        logits = self.student(x)
        soft = F.kl_div(F.log_softmax(logits / temperature, dim=1), wanted, reduction="batchmean")
        return F.cross_entropy(logits, y) + temperature**2 * soft

    def fit(self, steps):
        for _ in range(steps):
            x, y = torch.randn(128, 128), torch.randint(100, (128,))
            self.optimizer.zero_grad()
            loss = self.loss(x, y)
            loss.backward()  # cause
            self.optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cured", action="store_true")
    torch.manual_seed(0)
    Distiller(parser.parse_args().cured).fit(60)
