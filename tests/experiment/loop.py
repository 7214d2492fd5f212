"""A small training loop: `loop.py [--work N] [--workers N] [--batch N] [--steps N] [--fail STEP] [--hang STEP]`."""

from __future__ import annotations

import argparse
import time

import torch

parser = argparse.ArgumentParser()
for name, default in (("--work", 1), ("--workers", 0), ("--batch", 64), ("--steps", 1_000_000), ("--fail", -1), ("--hang", -1)):
    parser.add_argument(name, type=int, default=default)
parser.add_argument("--loader", action="store_true")
parser.add_argument("--validate", action="store_true")
args = parser.parse_args()
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.ReLU(), torch.nn.Linear(512, 128), torch.nn.Linear(128, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
rows = torch.randn(args.batch * 100, 128)
loader = torch.utils.data.DataLoader(rows, args.batch, num_workers=args.workers) if args.loader else list(rows.split(args.batch))


def train() -> None:
    step = 0
    while True:
        for x in loader:
            if step == args.steps:
                return
            if step == args.fail:
                raise RuntimeError("planted failure")
            if step == args.hang:
                time.sleep(1000)
            step += 1
            for _ in range(args.work):  # the same rows again: more work, not more samples
                loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if args.validate and step % 10 == 0:
                with torch.no_grad():
                    for y in loader:
                        model(y)


train()
