"""A checkpoint in every second step, and a log line that is flushed in each; repaired by rare checkpoints from a copy, in a thread."""

from __future__ import annotations

import argparse
import copy
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH, BATCH = (1024, 64) if DEVICE == "cpu" else (8192, 4096)
OFTEN, RARELY = 2, 100


def save(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Write all that is needed to go on from here."""
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def save_in_background(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> threading.Thread:
    """Copy what is to be saved, and let a thread write it while training goes on."""
    state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    thread = threading.Thread(target=torch.save, args=(state, path))
    thread.start()
    return thread


def train(steps: int, fixed: bool, folder: Path) -> float:
    """Train, and return the last loss."""
    torch.manual_seed(0)
    inputs = torch.randn(8, BATCH, WIDTH, device=DEVICE)
    layers = [module for _ in range(4) for module in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    with (folder / "log.txt").open("w") as log:
        for step in range(1, steps + 1):
            x = inputs[step % 8]
            loss = nn.functional.mse_loss(model(x).squeeze(-1), x[:, 0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if fixed:
                if step % RARELY == 0:
                    log.write(f"{step} {loss.item():.5f}\n")
                    save_in_background(model, optimizer, folder / "last.pt")
            else:
                log.write(f"{step} {loss.item():.5f}\n")
                log.flush()
                if step % OFTEN == 0:
                    save(model, optimizer, folder / "last.pt")
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="save rarely, from a copy, in a thread")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        loss = train(args.steps, args.fixed, Path(folder))
        print(f"{args.steps * BATCH / (time.perf_counter() - began):.1f} samples/s, last loss {loss:.5f}")


if __name__ == "__main__":
    main()
