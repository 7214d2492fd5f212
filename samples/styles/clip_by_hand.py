"""Gradient clipping written by hand in a trainer's hook: a norm, a Python float and a scale for each parameter."""

import sys

import torch
from torch import nn

CURED = "--cured" in sys.argv


class Trainer:
    def __init__(self, model):
        self.model, self.hooks = model, {"after_backward": []}
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def on(self, event, function):
        self.hooks[event].append(function)

    def run(self, data):
        for x, y in data:
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(x), y).backward()
            for hook in self.hooks["after_backward"]:
                hook(self.model)
            self.optimizer.step()


def clip(model, limit=1.0):
    if CURED:
        nn.utils.clip_grad_norm_(model.parameters(), limit, foreach=True)
        return
    total = 0.0
    for _name, parameter in model.named_parameters():
        total += parameter.grad.data.norm(2).item() ** 2  # cause
    scale = limit / (total**0.5 + 1e-6)
    for _name, parameter in model.named_parameters():
        if scale < 1:
            parameter.grad.data.mul_(scale)  # cause
        assert not torch.isnan(parameter.grad).any(), "bad gradient"  # cause


def main():
    torch.manual_seed(0)
    deep = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Tanh()) for _ in range(60)))
    trainer = Trainer(deep)
    trainer.on("after_backward", clip)
    trainer.run((torch.randn(16, 32), torch.randn(16, 32)) for _ in range(80))


main()
