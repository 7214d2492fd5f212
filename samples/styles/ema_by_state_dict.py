"""Mean teacher (Tarvainen and Valpola 2017): the average is kept by deep copies of two state dicts at each step."""

import copy
import sys

import torch
from torch import nn

CURED = "--cured" in sys.argv


class Averaged:
    def __init__(self, model, decay=0.999):
        self.decay, self.model = decay, copy.deepcopy(model)

    @torch.no_grad()
    def update(self, model):
        if CURED:
            torch._foreach_lerp_(list(self.model.parameters()), list(model.parameters()), 1 - self.decay)
            return
        new = copy.deepcopy(self.model.state_dict())  # cause
        live = copy.deepcopy(model.state_dict())  # cause
        for name in new:
            new[name] = self.decay * new[name] + (1 - self.decay) * live[name]  # cause
        self.model.load_state_dict(new)  # cause


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), *(nn.Linear(1024, 1024) for _ in range(6)), nn.Linear(1024, 10))
    averaged = Averaged(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(50):
        x, y = torch.randn(32, 256), torch.randint(10, (32,))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        averaged.update(model)


main()
