"""A healthy control: a loader whose worker keeps up with training, prefetches, stays alive between epochs, and pins for a GPU."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH, BATCH, WORKERS = (1024, 256, 1) if DEVICE == "cpu" else (8192, 4096, 8)
SAMPLES = 64 * BATCH


class Records(Dataset[torch.Tensor]):
    """Rows of bytes in memory that are read and scaled, a whole batch in one call."""

    def __init__(self) -> None:
        self.rows = torch.randint(256, (SAMPLES, WIDTH), dtype=torch.uint8)

    def __len__(self) -> int:
        return SAMPLES

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return self.rows[indices].float().div_(255)


def as_it_is(batch: torch.Tensor) -> torch.Tensor:
    """Return the batch: the data set has put it together already."""
    return batch


def endless(batches: DataLoader[torch.Tensor]) -> Iterator[torch.Tensor]:
    while True:
        yield from batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="nothing is planted here, so nothing changes")
    parser.add_argument("--steps", type=int, default=250)
    args = parser.parse_args()

    torch.manual_seed(0)
    loader = DataLoader(
        Records(), BATCH, shuffle=True, num_workers=WORKERS, collate_fn=as_it_is, persistent_workers=True, prefetch_factor=4,
        pin_memory=DEVICE == "cuda",
    )  # fmt: skip
    batches = endless(loader)
    layers = [module for _ in range(4) for module in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    fast_bf16 = DEVICE == "cuda" or any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("amx_tile", "avx512_bf16"))
    autocast = torch.autocast(DEVICE, torch.bfloat16) if fast_bf16 else contextlib.nullcontext()

    began = time.perf_counter()
    for _ in range(args.steps):
        x = next(batches).to(DEVICE, non_blocking=True)
        with autocast:
            loss = nn.functional.mse_loss(model(x).float().squeeze(-1), x[:, 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{args.steps * BATCH / (time.perf_counter() - began):.1f} samples/s, last loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
