"""A small training that goes wrong where it is told to: `faulty.py [--do WHAT] [--at STEP] [--rank N] [--steps N]`."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

SLEEP = "import time; time.sleep(300)"


def fail() -> None:
    raise RuntimeError("planted failure")


def lock() -> None:
    held = threading.Lock()
    held.acquire()
    held.acquire()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def memory() -> None:
    torch.empty(1 << 50)


def leak() -> None:
    held = []
    while True:
        held.append(torch.ones(4 << 20))
        time.sleep(0.01)


def stdin() -> None:
    input("go on? ")


def chdir() -> None:
    os.chdir("/")


def children() -> None:
    """Start what outlives a program: a plain child, one in a session of its own, one without its environment, a forked daemon."""
    subprocess.Popen([sys.executable, "-c", SLEEP])
    subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
    subprocess.Popen([sys.executable, "-c", SLEEP], env={}, start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        time.sleep(300)
        os._exit(0)


def children_and_chdir() -> None:
    children()
    chdir()


def nothing() -> None:
    """Go on."""


def fill() -> None:
    """Write until the disk is full."""
    with open(Path(os.environ["FULL"]) / "log", "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


ACTIONS = {act.__name__: act for act in (fail, lock, kill, memory, leak, stdin, children_and_chdir, nothing, fill)}


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of ones; of a worker that hangs only so many."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, row: int) -> torch.Tensor:
        if self.limit and row >= self.limit:
            time.sleep(300)
        return torch.ones(16)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--do", default="nothing")
    parser.add_argument("--at", type=int, default=3)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1_000_000_000)
    parser.add_argument("--hanging-worker", type=int, default=0)
    parser.add_argument("--no-updates", action="store_true")
    parser.add_argument("--catch", action="store_true")
    parser.add_argument("--pause-ms", type=float, default=1.0)
    args = parser.parse_args()
    if args.at < 0:
        ACTIONS[args.do]()
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    model: torch.nn.Module = torch.nn.Linear(16, 4)
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    if args.hanging_worker:
        loader = iter(torch.utils.data.DataLoader(Rows(8 * args.hanging_worker), 8, num_workers=1))
    step = 0
    while step < args.steps:
        try:
            x = next(loader) if args.hanging_worker else torch.ones(8, 16)
            model(x).square().mean().backward()
            if not args.no_updates:
                optimizer.step()
                optimizer.zero_grad()
            time.sleep(args.pause_ms / 1e3)
            step += 1
            if step == args.at and rank == args.rank:
                ACTIONS[args.do]()
        except BaseException:
            if not args.catch:
                raise


if __name__ == "__main__":
    main()
