"""A real training run, small enough for any machine: a four-block GPT on a synthetic language, recorded by a Session."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from gpudiag.capture.session import Session
from gpudiag.model.bundle import Manifest
from gpudiag.model.hardware import Device

VOCABULARY, WIDTH, HEADS, BLOCKS, LENGTH, BATCH = 512, 256, 4, 4, 128, 8
SUCCESSORS = 4
"""Each token is followed by one of this many: the loss can fall from ln 512 = 6.2 to about ln 4 = 1.4 nats."""

MIN_STEPS = 20
"""Enough for 5 plain, 2 + 6 + 1 timing, 1 + 2 + 1 site steps, and a few plain steps after them."""

BUSY_STEP_S = 0.6
"""A forward and backward pass takes a third of this on two idle cores. Slower: other programs hold the cores, and threads that
wait for each other at every op then make a step ten times slower than one thread alone."""


class DemoRun(msgspec.Struct, frozen=True):
    """What the demo trained: where the bundle is, how many steps, and the loss (nats per token) before and after."""

    path: Path
    device: str
    steps: int
    seconds: float
    parameters: int
    first_loss: float
    last_loss: float
    warnings: tuple[str, ...] = ()


def _build_network() -> Any:
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):  # type: ignore[misc]  # torch has no types here
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

        def forward(self, x: Any) -> Any:
            batch, length, _ = x.shape
            query, key, value = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
            return x + self.mlp(self.mlp_norm(x))

    class Gpt(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
            self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, tokens: Any) -> Any:
            places = torch.arange(tokens.shape[1], device=tokens.device)
            return self.output(self.norm(self.blocks(self.token(tokens) + self.position(places))))

    return Gpt()


def _build_dataset(examples: int) -> Any:
    """Return sequences of a random Markov chain: learnable, and made on the fly from the index alone."""
    import torch
    from torch.utils.data import Dataset

    follow = torch.randint(VOCABULARY, (VOCABULARY, SUCCESSORS), generator=torch.Generator().manual_seed(0)).tolist()

    class Chains(Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return examples

        def __getitem__(self, index: int) -> Any:
            chance = random.Random(index)  # noqa: S311 - training data, no secret
            tokens = [chance.randrange(VOCABULARY)]
            for choice in chance.choices(range(SUCCESSORS), k=LENGTH):
                tokens.append(follow[tokens[-1]][choice])
            return torch.tensor(tokens)

    return Chains()


def train_demo(
    path: Path,
    seconds: float = 8,
    device: str = "auto",
    log: Callable[[str], None] | None = None,
    peaks: Callable[[Manifest], Device | None] | None = None,
) -> DemoRun:
    """Return what was trained in about `seconds` (at least MIN_STEPS steps) on `device`, recorded into a bundle at `path`.

    `peaks` gives the peaks once the loop has ended. Raises MissingDependencyError without torch.
    The global random state is left as it was found.
    """
    session = Session(path, peaks=peaks)  # checks that torch is there
    import torch

    chosen = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = _build_network().to(chosen)
        parameters = sum(weight.numel() for weight in model.parameters())
        if log is not None:
            log(f"training a transformer of {parameters / 1e6:.1f} M parameters on {chosen} for about {seconds:.0f} s")
        threads = torch.get_num_threads()
        try:
            if threads > 1 and chosen == "cpu" and _time_pass(model) > BUSY_STEP_S:
                torch.set_num_threads(1)
                if log is not None:
                    log("the cores are busy with other programs: training with one thread")
            begun = time.perf_counter()
            losses = _train(session, model, chosen, begun + seconds)
            took = time.perf_counter() - begun
        finally:
            torch.set_num_threads(threads)
    return DemoRun(
        path=session.path,
        device=chosen,
        steps=len(losses),
        seconds=took,
        parameters=parameters,
        first_loss=losses[0],
        last_loss=losses[-1],
        warnings=tuple(session.warnings),
    )


def _time_pass(model: Any) -> float:
    import torch

    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    for _ in range(2):
        begun = time.perf_counter()
        model(tokens).mean().backward()
        model.zero_grad()
    return time.perf_counter() - begun


def _train(session: Session, model: Any, device: str, deadline: float) -> list[float]:
    import torch
    from torch.nn import functional
    from torch.utils.data import DataLoader

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    with session as prof:
        for tokens in prof.steps(DataLoader(_build_dataset(5_000 * BATCH), batch_size=BATCH)):
            tokens = tokens.to(device)
            logits = model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) >= MIN_STEPS and time.perf_counter() >= deadline:
                break
    return losses
