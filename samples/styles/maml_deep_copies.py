"""First-order MAML (Finn et al. 2017): the model and a new optimizer are deep-copied for each task of each meta step."""

import copy
import math
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

CURED = "--cured" in sys.argv


def make_task(n=10):
    shift, size = torch.rand(()) * math.pi, 0.1 + 4.9 * torch.rand(())
    x = torch.rand(2, n, 1) * 10 - 5
    return x, size * torch.sin(x + shift)


def adapt_by_copy(model, x, y, inner=1, lr=0.01):
    learner = copy.deepcopy(model)  # cause
    optimizer = torch.optim.Adam(learner.parameters(), lr=lr)  # cause
    for _ in range(inner):
        optimizer.zero_grad()
        F.mse_loss(learner(x[0]), y[0]).backward()
        optimizer.step()  # cause
    learner.zero_grad()
    F.mse_loss(learner(x[1]), y[1]).backward()
    return [p.grad for p in learner.parameters()]


def adapt_by_function(model, x, y, inner=1, lr=0.01):
    params = dict(model.named_parameters())
    for _ in range(inner):
        loss = F.mse_loss(functional_call(model, params, (x[0],)), y[0])
        grads = torch.autograd.grad(loss, list(params.values()))
        params = {k: (p - lr * g).detach().requires_grad_() for (k, p), g in zip(params.items(), grads, strict=True)}
    loss = F.mse_loss(functional_call(model, params, (x[1],)), y[1])
    return torch.autograd.grad(loss, list(params.values()))


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), *(nn.Linear(40, 40) for _ in range(6)), nn.ReLU(), nn.Linear(40, 1))
    meta = torch.optim.SGD(model.parameters(), lr=0.01)
    adapt = adapt_by_function if CURED else adapt_by_copy
    for _ in range(40):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for _task in range(8):
            torch._foreach_add_(total, list(adapt(model, *make_task())))
        for p, g in zip(model.parameters(), total, strict=True):
            p.grad = g / 8
        meta.step()


main()
