"""A training loop with habits, distributed under torchrun: `[--save FILE] [--write FILE] [--leak] [--kill-rank N]`."""

from __future__ import annotations

import argparse
import os
import signal

import torch

parser = argparse.ArgumentParser()
for name in ("--save", "--write"):
    parser.add_argument(name)
parser.add_argument("--leak", action="store_true")
parser.add_argument("--kill-rank", type=int, default=-1)
args = parser.parse_args()
torch.set_num_threads(1)
rank = int(os.environ.get("RANK", "0"))
model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
held: list[bytearray] = []
for step in range(1_000_000):
    loss = model(torch.ones(32, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if args.save and step % 10 == 0:
        torch.save(model.state_dict(), args.save)
    if args.write and step % 10 == 0:
        with open(args.write, "a", encoding="utf-8") as file:
            file.write("x")
    if args.leak:
        held.append(bytearray(b"x" * (4 << 20)))
    if step == 40 and rank == args.kill_rank:
        os.kill(os.getpid(), signal.SIGKILL)
