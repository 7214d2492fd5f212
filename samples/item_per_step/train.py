"""A network that reads the largest activation of each layer with .item(); --fixed keeps the maximum on the device."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
LAYERS, WIDTH, ROWS = (64, 2048, 2048) if ON_GPU else (4, 64, 64)
READ_EVERY = 50


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.gelu(self.norm(self.linear(x)))


class Network(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.fixed, self.on_host = fixed, 0.0
        self.register_buffer("on_device", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            largest = x.detach().abs().amax()
            if self.fixed:
                self.on_device = torch.maximum(self.on_device, largest)
            else:
                self.on_host = max(self.on_host, largest.item())
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="the repaired twin: read the maximum every 50 steps")
    parser.add_argument("--steps", type=int, default=400 if ON_GPU else 20)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Network(args.fixed).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    batches = [torch.randn(ROWS, WIDTH, device=DEVICE) for _ in range(8)]
    start = time.perf_counter()
    for step in range(args.steps):
        batch = batches[step % len(batches)]
        loss = (model(batch) - batch.roll(1, dims=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if args.fixed and step % READ_EVERY == READ_EVERY - 1:
            model.on_host = model.on_device.item()
    last = loss.item()
    print(f"{args.steps * ROWS / (time.perf_counter() - start):,.0f} samples/s, last loss {last:.5f}")


if __name__ == "__main__":
    main()
