"""Differentially private SGD (Abadi et al. 2016): the clipped gradient of each sample by a backward pass of its own."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

CURED = "--cured" in sys.argv


def loss_of_one(params, model, x, y):
    return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])


def private_gradients(model, xs, ys, limit=1.0):
    params = dict(model.named_parameters())
    if CURED:
        grads = vmap(lambda x, y: grad(loss_of_one)({k: p.detach() for k, p in params.items()}, model, x, y))(xs, ys)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        scale = (limit / norms).clamp(max=1)
        return {k: torch.tensordot(scale, g, 1) / len(xs) for k, g in grads.items()}
    sums = {k: torch.zeros_like(p) for k, p in params.items()}
    for x, y in zip(xs, ys, strict=True):
        model.zero_grad()
        F.cross_entropy(model(x[None]), y[None]).backward()  # cause
        norm = torch.stack([p.grad.norm() for p in params.values()]).norm()  # cause
        for k, p in params.items():
            sums[k] += p.grad * (limit / norm).clamp(max=1) / len(xs)  # cause
    return sums


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(40):
        xs, ys = torch.randn(64, 32), torch.randint(4, (64,))
        for name, gradient in private_gradients(model, xs, ys).items():
            parameter = model.get_parameter(name)
            parameter.grad = gradient + 0.01 * torch.randn_like(gradient)
        optimizer.step()


main()
