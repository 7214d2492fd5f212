"""One of several ranks comes late to every exchange of gradients, and the others wait for it; --fixed has all ranks alike.

--late says why: its storage is slow ("loader"), its batches are larger ("batch"), or its storage becomes slow at --from ("later").
"""

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
from torch.utils.data import DataLoader, Dataset

ON_GPU = torch.cuda.device_count() >= 2
WIDTH, LAYERS, ROWS, LATE_ROWS = (4096, 12, 2048, 4096) if ON_GPU else (256, 4, 64, 1280)
READ_S, LATE_READ_S = 0.002, 0.025


class Storage(Dataset):
    """Batches that take some time to be read, longer from batch `late_from` on (None: never)."""

    def __init__(self, steps: int, rows: int, late_from: int | None) -> None:
        self.steps, self.rows, self.late_from = steps, rows, late_from

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, number: int) -> torch.Tensor:
        late = self.late_from is not None and number >= self.late_from
        time.sleep(LATE_READ_S if late else READ_S)
        return torch.randn(self.rows, WIDTH, generator=torch.Generator().manual_seed(number))


def storage(args: argparse.Namespace, rank: int) -> Storage:
    if args.fixed or rank != args.rank:
        return Storage(args.steps, ROWS, None)
    if args.late == "batch":
        return Storage(args.steps, LATE_ROWS, None)
    return Storage(args.steps, ROWS, args.begin if args.late == "later" else 0)


def train(args: argparse.Namespace) -> None:
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPU else torch.device("cpu")
    if ON_GPU:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    start = time.perf_counter()
    for batch in DataLoader(storage(args, rank), batch_size=None):
        batch = batch.to(device)
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    final = loss.item()
    if rank == 0:
        print(f"{args.steps / (time.perf_counter() - start):,.1f} steps/s, last loss {final:.5f}")
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="the repaired twin: no rank is late")
    parser.add_argument("--late", choices=("loader", "batch", "later"), default="loader", help="why the rank is late")
    parser.add_argument("--rank", type=int, default=1, help="the late rank")
    parser.add_argument("--from", dest="begin", type=int, default=60, help="step from which on it is late, with --late later")
    parser.add_argument("--ranks", type=int, default=2 if ON_GPU else 3, help="how many there are, where torchrun has not started this")
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        return subprocess.call([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}", *sys.argv])  # noqa: S603
    train(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
