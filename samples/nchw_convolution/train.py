"""An image denoiser whose convolutions run in the default NCHW layout; --fixed keeps model and images in channels_last."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH = 32 if DEVICE == "cuda" else 4
SIDE = 256 if DEVICE == "cuda" else 128
CHANNELS = 128 if DEVICE == "cuda" else 32
FAST_BF16 = (
    torch.cuda.is_bf16_supported()
    if DEVICE == "cuda"
    else any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("amx_tile", "avx512_bf16"))
)
torch.backends.cudnn.benchmark = True


def network() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(8, CHANNELS, 1)]
    for _ in range(4):
        layers += [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU(inplace=True)]
        layers += [nn.Conv2d(CHANNELS, CHANNELS, 1), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Conv2d(CHANNELS, 8, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="the repaired twin: channels_last")
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    torch.manual_seed(0)
    layout = torch.channels_last if args.fixed else torch.contiguous_format
    model = network().to(DEVICE, memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    batches = [torch.randn(BATCH, 8, SIDE, SIDE, device=DEVICE).to(memory_format=layout) for _ in range(4)]
    start = time.perf_counter()
    for step in range(args.steps):
        x = batches[step % len(batches)]
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=FAST_BF16):
            y = model(x)
        loss = nn.functional.mse_loss(y.float(), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    last = loss.item()
    print(f"{args.steps * BATCH / (time.perf_counter() - start):,.1f} samples/s, last loss {last:.5f}")


if __name__ == "__main__":
    main()
