"""Healthy: logistic regression by LBFGS with features that are made once."""

import torch
import torch.nn.functional as F

BF16 = any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("amx_tile", "avx512_bf16"))


def fit(features, labels, epochs):
    weight = torch.zeros(features.shape[1], 10, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], lr=0.5, max_iter=5, tolerance_grad=0, tolerance_change=0)

    def closure():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=BF16):
            loss = F.cross_entropy(features @ weight, labels) + 1e-4 * weight.square().sum()
        loss.backward()
        return loss

    for _ in range(epochs):
        optimizer.step(closure)
    return weight.detach()


torch.manual_seed(0)
fit(torch.randn(10_000, 500), torch.randint(10, (10_000,)), epochs=35)
