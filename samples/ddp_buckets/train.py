"""Two ranks exchange all gradients in one bucket after the backward pass; --fixed keeps the 25 MiB buckets, sent while it runs."""

from __future__ import annotations

import argparse
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
WIDTH, LAYERS, ROWS = (4096, 16, 4096) if ON_GPU else (1024, 8, 256)
ONE_BUCKET_MB, DEFAULT_MB = 10_000, 25 if ON_GPU else 4


def train(steps: int, fixed: bool) -> None:
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    device = torch.device("cuda", dist.get_rank()) if ON_GPU else torch.device("cpu")
    if ON_GPU:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    bucket_mb = DEFAULT_MB if fixed else ONE_BUCKET_MB
    model = DistributedDataParallel(nn.Sequential(*layers).to(device), bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    batches = [torch.randn(ROWS, WIDTH, device=device) for _ in range(8)]

    start = time.perf_counter()
    for step in range(steps):
        batch = batches[step % len(batches)]
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    final = loss.item()
    if dist.get_rank() == 0:
        print(f"{steps * ROWS * RANKS / (time.perf_counter() - start):,.0f} samples/s, last loss {final:.5f}")
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="the repaired twin: buckets of the default size")
    parser.add_argument("--steps", type=int, default=300 if ON_GPU else 100)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        return subprocess.call([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", *sys.argv])  # noqa: S603
    train(args.steps, args.fixed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
