"""A healthy run: a residual network in channels_last, bf16 autocast where the device is fast at it, and a fused optimizer."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH = 512 if DEVICE == "cuda" else 16
SIDE, CHANNELS, BLOCKS = 32, 128, 4
FAST_BF16 = (
    torch.cuda.is_bf16_supported()
    if DEVICE == "cuda"
    else any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("amx_tile", "avx512_bf16"))
)
torch.backends.cudnn.benchmark = True


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.second = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.second(torch.relu_(self.first(x))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    args = parser.parse_args()
    torch.manual_seed(0)
    stem = nn.Conv2d(16, CHANNELS, 4, stride=4)
    model = nn.Sequential(stem, *(Block() for _ in range(BLOCKS)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 10))
    model = model.to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    images = [torch.randn(BATCH, 16, 4 * SIDE, 4 * SIDE, device=DEVICE).to(memory_format=torch.channels_last) for _ in range(4)]
    labels = torch.randint(10, (4, BATCH), device=DEVICE)
    start = time.perf_counter()
    for step in range(args.steps):
        which = step % len(images)
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=FAST_BF16):
            loss = nn.functional.cross_entropy(model(images[which]), labels[which])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    last = loss.item()
    print(f"{args.steps * BATCH / (time.perf_counter() - start):,.0f} samples/s, last loss {last:.5f}")


if __name__ == "__main__":
    main()
