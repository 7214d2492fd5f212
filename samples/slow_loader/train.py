"""An image classifier whose DataLoader reads and decodes each sample in the training process; --fixed gives it workers."""

from __future__ import annotations

import argparse
import time
import zlib

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, SIDE = 16, 64
FAST_BF16 = (
    torch.cuda.is_bf16_supported()
    if DEVICE == "cuda"
    else any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("amx_tile", "avx512_bf16"))
)
READ_S = 0.004
"""What the storage needs for one file."""


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Compressed images on a slow disk."""

    def __init__(self, length: int) -> None:
        draw = np.random.default_rng(0)
        pixels = draw.integers(0, 32, (64, 3, SIDE, SIDE), dtype=np.uint8)
        self.files = [zlib.compress(image.tobytes()) for image in pixels]
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(READ_S)
        raw = zlib.decompress(self.files[index % len(self.files)])
        image = torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(3, SIDE, SIDE)
        return image.float().div_(31).sub_(0.5), index % 10


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="the repaired twin: four worker processes that stay")
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = network().to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    workers = {"num_workers": 4, "prefetch_factor": 4, "persistent_workers": True} if args.fixed else {}
    loader = DataLoader(Images(BATCH * args.steps), batch_size=BATCH, pin_memory=DEVICE == "cuda", **workers)
    start = time.perf_counter()
    for images, labels in loader:
        images = images.to(DEVICE, non_blocking=True, memory_format=torch.channels_last)
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=FAST_BF16):
            loss = nn.functional.cross_entropy(model(images), labels.to(DEVICE, non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    last = loss.item()
    print(f"{args.steps * BATCH / (time.perf_counter() - start):,.0f} samples/s, last loss {last:.5f}")


if __name__ == "__main__":
    main()
