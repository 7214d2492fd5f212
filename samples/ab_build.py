"""An experiment from Python: which of some changes make this training faster? `python samples/ab_build.py [BUDGET]`, on a CPU too.

`build` makes the training, once in each process that gpudiag starts; `cfg` carries what an experiment has otherwise there.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gpudiag


class FlushDenormals(gpudiag.Applier):
    """A fix of one's own: tiny values are flushed to zero, because processors are slow at denormal numbers."""

    def install(self, site: Any) -> None:
        torch.set_flush_denormal(True)

    def evidence(self, site: Any) -> str:
        if float(torch.tensor([1e-39]) * 1) != 0:
            raise gpudiag.NotAppliedError("denormal numbers are kept")
        return "1e-39 is 0"


def build(cfg: Any) -> gpudiag.Task:
    width = cfg.get("width", 256)
    inputs = torch.randn(4096, 64)
    data = TensorDataset(inputs, inputs[:, :8].sum(dim=1, keepdim=True))
    layers = [layer for _ in range(16) for layer in (nn.Linear(width, width), nn.Tanh())]
    model = nn.Sequential(nn.Linear(64, width), *layers, nn.Linear(width, 1)).to(cfg.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    loader = DataLoader(data, batch_size=cfg.get("batch_size", 32), shuffle=True)

    def step(batch: Any) -> Any:
        x, y = (tensor.to(cfg.device) for tensor in batch)
        return nn.functional.mse_loss(model(x), y)

    return gpudiag.Task(model, optimizer, loader, step)


def main(budget: str = "10m") -> None:
    gpudiag.register_fix(
        FlushDenormals, gpudiag.Fix("flush-denormals", "Flush tiny values to zero", "rounding", "torch.set_flush_denormal(True)")
    )
    found = gpudiag.ab(
        build,
        fixes=["fused-optimizer", "batch-size=x2", "flush-denormals"],
        variants={"narrow": {"width": 128}},
        budget=budget,
    )
    print(found)


if __name__ == "__main__":
    main(*sys.argv[1:2])
