"""Two ranks accumulate gradients over eight micro-batches and exchange them after each; --fixed exchanges them once, with no_sync."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
ON_GPU = torch.cuda.device_count() >= RANKS
WIDTH, LAYERS, ROWS = (4096, 8, 1024) if ON_GPU else (512, 8, 32)
MICRO_BATCHES = 8


def train(steps: int, fixed: bool) -> None:
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    device = torch.device("cuda", dist.get_rank()) if ON_GPU else torch.device("cpu")
    if ON_GPU:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = DistributedDataParallel(nn.Sequential(*layers).to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    batches = [torch.randn(ROWS, WIDTH, device=device) for _ in range(MICRO_BATCHES)]

    start = time.perf_counter()
    for _ in range(steps):
        for index, batch in enumerate(batches):
            last = index == MICRO_BATCHES - 1
            with contextlib.nullcontext() if last or not fixed else model.no_sync():
                loss = (model(batch) - batch).square().mean() / MICRO_BATCHES
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    final = loss.item()
    if dist.get_rank() == 0:
        samples = steps * ROWS * MICRO_BATCHES * RANKS
        print(f"{samples / (time.perf_counter() - start):,.0f} samples/s, last loss {final:.5f}")
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="the repaired twin: no_sync around all but the last micro-batch")
    parser.add_argument("--steps", type=int, default=200 if ON_GPU else 60)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        return subprocess.call([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", *sys.argv])  # noqa: S603
    train(args.steps, args.fixed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
