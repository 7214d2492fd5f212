"""Trainings that fixes are tried on, without an end: python target.py text|narrow|copies|images [--pinned] [--hold SHARE] [--tiny]."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from networks import TEXT, Gpt, TextSize, resnet

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

NARROW = TextSize(1000, 128, 4, 12, 64, 4)
"""Its kernels are shorter than their launches."""

WIDTH, ROWS = 4096, 8192
"""Of `copies`: 128 MiB a batch, and about as much time for the products in TF32 as for the copy over PCIe."""


def texts(size: TextSize, device: str, batch: int | None = None) -> tuple[nn.Module, DataLoader[Any], Any]:
    """Return a language model, a loader of random texts, and its loss."""
    model = Gpt(size).to(device)
    rows = torch.randint(size.vocabulary, (64 * size.batch, size.length + 1))

    def loss(rows: torch.Tensor) -> torch.Tensor:
        logits = model(rows[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())

    return model, DataLoader(TensorDataset(rows), batch or size.batch, drop_last=True), loss


def copies(tiny: bool, pinned: bool) -> tuple[nn.Module, DataLoader[Any], Any]:
    """Return a network that is fed with large batches from host memory."""
    width, rows = (64, 64) if tiny else (WIDTH, ROWS)
    torch.set_float32_matmul_precision("high")
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(2))).to(DEVICE)
    batches = [(torch.randn(rows, width),) for _ in range(8)]
    return model, DataLoader(batches, batch_size=None, pin_memory=pinned), lambda x: (model(x) - x).square().mean()  # type: ignore[arg-type]


def images(tiny: bool) -> tuple[nn.Module, DataLoader[Any], Any]:
    """Return a small residual network in NCHW."""
    model = (resnet((1, 1), 8, 10) if tiny else resnet((1, 1, 1, 1))).to(DEVICE)
    rows = torch.randn(16 if tiny else 512, 3, 32 if tiny else 128, 32 if tiny else 128)
    return model, DataLoader(TensorDataset(rows), 4 if tiny else 64), lambda x: model(x).square().mean()


TRAININGS = {
    "text": lambda args: texts(TEXT[args.tiny], DEVICE),
    "narrow": lambda _: texts(NARROW, DEVICE),
    "copies": lambda args: copies(args.tiny, args.pinned),
    "images": lambda args: images(args.tiny),
}


def build(cfg: Any) -> Any:
    """Return the training of texts for gpudiag.ab, which alone can apply accumulation."""
    import gpudiag

    size = TEXT[cfg.device == "cpu"]
    model, loader, loss = texts(size, cfg.device, cfg.get("batch_size", size.batch))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return gpudiag.Task(model, optimizer, loader, lambda batch: loss(batch[0].to(cfg.device)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=tuple(TRAININGS))
    parser.add_argument("--pinned", action="store_true")
    parser.add_argument("--hold", type=float, default=0.0, help="hold this share of the free memory of the GPU")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--empty-cache", action="store_true", help="give memory back to the driver in each step")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.hold:
        held = torch.empty(int(args.hold * torch.cuda.mem_get_info()[0]), dtype=torch.uint8, device=DEVICE)
        assert held.numel()
    model, loader, loss_of = TRAININGS[args.kind](args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    while True:
        for (batch,) in loader:
            loss = loss_of(batch.to(DEVICE))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if args.empty_cache:
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
