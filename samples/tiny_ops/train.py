"""Many small networks evaluated one by one in a Python loop; --fixed evaluates all of them with batched products."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MEMBERS, BATCH, WIDTH = 160, 64, 32


class Ensemble(nn.Module):
    """One small regression network for each of `MEMBERS` targets."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.randn(MEMBERS, WIDTH, WIDTH) / WIDTH**0.5)
        self.outer = nn.Parameter(torch.randn(MEMBERS, WIDTH, 1) / WIDTH**0.5)
        self.fixed = fixed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fixed:
            hidden = torch.tanh(torch.matmul(x, self.inner))
            return torch.matmul(hidden, self.outer)[..., 0].T
        outputs = [torch.tanh(x @ inner) @ outer for inner, outer in zip(self.inner.unbind(), self.outer.unbind(), strict=True)]
        return torch.cat(outputs, dim=1)


def loss_of(y: torch.Tensor, target: torch.Tensor, fixed: bool) -> torch.Tensor:
    if fixed:
        return nn.functional.mse_loss(y, target)
    errors = [(a - b).square().mean() for a, b in zip(y.unbind(1), target.unbind(1), strict=True)]
    return torch.stack(errors).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="the repaired twin: one batched product in place of the loop")
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Ensemble(args.fixed).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    inputs = torch.randn(8, BATCH, WIDTH, device=DEVICE)
    targets = torch.randn(8, BATCH, MEMBERS, device=DEVICE)
    batches = list(zip(inputs, targets, strict=True))
    start = time.perf_counter()
    for step in range(args.steps):
        x, target = batches[step % len(batches)]
        loss = loss_of(model(x), target, args.fixed)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    last = loss.item()
    print(f"{args.steps * BATCH / (time.perf_counter() - start):,.0f} samples/s, last loss {last:.5f}")


if __name__ == "__main__":
    main()
