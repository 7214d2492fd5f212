"""Parse trees of many small Python objects, which the garbage collector looks through again and again; repaired by collecting rarely."""

from __future__ import annotations

import argparse
import gc
import pickle
import random
import time
from collections import deque

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH, BATCH = (512, 64) if DEVICE == "cpu" else (4096, 1024)
TREES, NODES, KEPT = 32, 40_000, 12
COLLECT_EVERY = 50


def tree(seed: int) -> bytes:
    """Return a pickled parse tree: nodes [parent, value, children...], which point at each other."""
    draw = random.Random(seed)
    nodes: list[list[object]] = [[None, 0]]
    for value in range(1, NODES):
        parent = nodes[draw.randrange(value)]
        nodes.append([parent, value])
        parent.append(nodes[-1])
    return pickle.dumps(nodes, protocol=pickle.HIGHEST_PROTOCOL)


def features(nodes: list[list[object]]) -> torch.Tensor:
    """Return how many children the first nodes have, as input of the model."""
    return torch.tensor([float(len(node) - 2) for node in nodes[: BATCH * 8]]).view(BATCH, 8).repeat(1, WIDTH // 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help=f"no automatic collection, but one every {COLLECT_EVERY} steps")
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()

    torch.manual_seed(0)
    trees = [tree(seed) for seed in range(TREES)]
    recent: deque[list[list[object]]] = deque(maxlen=KEPT)
    layers = [module for _ in range(4) for module in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if args.fixed:
        gc.collect()
        gc.freeze()
        gc.disable()

    began = time.perf_counter()
    for step in range(1, args.steps + 1):
        recent.append(pickle.loads(trees[step % TREES]))  # noqa: S301  # pickled by this script itself
        x = features(recent[-1]).to(DEVICE)
        loss = nn.functional.mse_loss(model(x).squeeze(-1), x[:, 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if args.fixed and step % COLLECT_EVERY == 0:
            gc.collect()
    print(f"{args.steps * BATCH / (time.perf_counter() - began):.1f} samples/s, last loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
