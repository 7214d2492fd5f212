"""Parity runs in the test's own process: a recorder, the boundary rule that marks its steps, and two small trainings to record."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from gpudiag.capture.hooks import Events, Patches
from gpudiag.capture.run_script.driver import Driver
from gpudiag.capture.run_script.plan import Plan
from gpudiag.experiment.trial.applied_fixes import AppliedFixes
from gpudiag.experiment.trial.parity import ParityRecorder
from gpudiag.experiment.trial.protocol import Control, Over, ParityPlan, ParityRun, ParityStep, TrialPlan, read_rows
from gpudiag.fixes.fix import Site

STEPS = 12


class Run(NamedTuple):
    """What a parity run wrote down, as runner.ParityRecord."""

    steps: tuple[ParityStep, ...]
    run: ParityRun
    sketch: Any


class _Switch:
    on = True

    def waited(self, what: str, wait_ns: int, frame: object) -> None:
        """Keep nothing."""


class _Context:
    """What Driver.start uses of a session."""

    def __init__(self, folder: Path, patches: Patches) -> None:
        self.path, self.patches = folder, patches
        self.events = Events(_Switch(), self._note)
        self.errors: list[BaseException | None] = []

    def _note(self, message: str, error: BaseException | None, *_: object) -> None:
        self.errors.append(error or RuntimeError(message))

    def notices(self) -> tuple[object, ...]:
        return ()


class _Stay:
    """In place of Leaving: the process of the test goes on."""

    marks = 0

    def look(self) -> None:
        """Stay."""


def record(train: Callable[[], object], folder: Path, plan: ParityPlan | None = None, fix: Callable[[Site], object] | None = None) -> Run:
    """Return the parity run of `train`, with `fix` put in place as the fixes of an arm are."""
    folder.mkdir(parents=True)
    patches = Patches()
    applied = AppliedFixes((), patches)
    recorder = ParityRecorder(TrialPlan(str(folder), 10, 5.0, 2, parity=plan or ParityPlan(steps=STEPS)))
    context = _Context(folder, patches)
    try:
        recorder.install(applied.site, patches)
        applied.install(find=True)
        if fix is not None:
            fix(applied.site)
        driver = Driver(Plan(str(folder)))
        driver.session = recorder
        driver.start(context)  # type: ignore[arg-type]
        for listener in (recorder, driver):
            context.events.add(listener)
        context.events.install(patches)
        recorder.follow(driver, _Stay())
        train()
        recorder.finish(driver.reason())
    finally:
        applied.evidence()
        patches.restore()
    for error in context.errors:
        raise error  # type: ignore[misc]
    return _read(folder)


def _read(folder: Path) -> Run:
    rows = read_rows(folder)
    run = next((row for row in rows if isinstance(row, ParityRun)), None)
    if run is None:
        raise AssertionError([row for row in rows if isinstance(row, Over)])
    assert not Control.open(folder).failed
    sketch = np.load(folder / run.sketch, allow_pickle=False) if run.sketch else None
    return Run(tuple(row for row in rows if isinstance(row, ParityStep)), run, sketch)


# -- trainings ------------------------------------------------------------------------------------------------------------


class Conv(nn.Module):
    def __init__(self, dropout: float = 0.1, momentum: float = 0.1) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(16, momentum=momentum), nn.BatchNorm2d(32, momentum=momentum)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm1(self.first(x)))
        x = functional.relu(self.norm2(self.second(x)))
        return self.head(self.drop(x.mean((2, 3))))


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout
        self.fused = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self._attend(self.norm1(x)))
        return x + functional.dropout(self.down(functional.gelu(self.up(self.norm2(x)))), self.dropout, self.training)

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = (part.view(rows, length, 4, -1).transpose(1, 2) for part in self.qkv(x).split(width, -1))
        p = self.dropout if self.training else 0.0
        if self.fused:
            mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
            hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            mixed = functional.dropout(scores.masked_fill(hidden, -torch.inf).softmax(-1), p, self.training) @ v
        return mixed.transpose(1, 2).reshape(rows, length, width)


class Gpt(nn.Module):
    def __init__(self, dropout: float = 0.1, width: int = 32) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(64, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 64, bias=False)
        self.checkpoints = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(self.norm(x))


class Knobs(NamedTuple):
    """A training, with what a change to it may do, right or wrong."""

    rate: float = 3e-3
    decay: float = 1e-2
    clear: bool = True
    normalise: bool = True
    momentum: float = 0.1
    shift: int = 0
    clip: float | None = 0.5
    weights: torch.dtype | None = None
    loss: torch.dtype | None = None
    frozen: bool = False
    rows: int | None = None
    options: tuple[tuple[str, object], ...] = ()
    layout: bool = False
    autocast: torch.dtype | None = None
    fused: bool = False
    checkpoints: bool = False
    parts: int = 1
    compiled: bool = False
    device: str = "cpu"


def conv(knobs: Knobs) -> None:
    """Train a small conv net with batch normalisation; it sets no seed."""
    net = Conv(momentum=knobs.momentum)
    images, labels = torch.randn(448, 3, 12, 12), torch.randint(10, (448,))
    if knobs.layout:
        net = net.to(memory_format=torch.channels_last)
    if not knobs.normalise:
        for norm in (net.norm1, net.norm2):
            norm.eval()
    _train(net, torch.utils.data.TensorDataset(images, labels), net.first, knobs)


def gpt(knobs: Knobs) -> None:
    """Train a small transformer; it sets no seed."""
    net = Gpt()
    net.checkpoints = knobs.checkpoints
    for block in net.blocks:
        block.fused = knobs.fused
    if knobs.compiled:
        net.forward = torch.compile(net.forward)  # type: ignore[method-assign]
    words = torch.randint(64, (448, 17))
    _train(net, torch.utils.data.TensorDataset(words[:, :-1], words[:, 1:]), net.blocks[0].qkv, knobs)


def _train(net: Any, data: Any, layer: Any, knobs: Knobs) -> None:
    net = net.to(knobs.device, knobs.weights)
    optimizer = torch.optim.AdamW(net.parameters(), lr=knobs.rate, weight_decay=knobs.decay, **dict(knobs.options))
    if knobs.frozen:
        layer.requires_grad_(False)
    for x, y in torch.utils.data.DataLoader(data, batch_size=32, shuffle=True):
        x, y = x[: knobs.rows].to(knobs.device), y[: knobs.rows].roll(knobs.shift, -1).to(knobs.device)
        for part, wanted in zip(x.chunk(knobs.parts), y.chunk(knobs.parts), strict=True):
            (_loss(net, part, wanted, knobs) / knobs.parts).backward()
        if knobs.clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), knobs.clip)
        optimizer.step()
        if knobs.clear:
            optimizer.zero_grad()


def _loss(net: Any, x: torch.Tensor, y: torch.Tensor, knobs: Knobs) -> torch.Tensor:
    if knobs.weights is not None and x.is_floating_point():
        x = x.to(knobs.weights)
    if knobs.layout:
        x = x.contiguous(memory_format=torch.channels_last)
    with torch.autocast(knobs.device, dtype=knobs.autocast) if knobs.autocast is not None else nullcontext():
        scores = net(x)
    scores = scores.to(knobs.loss or torch.float32)
    return functional.cross_entropy(scores.flatten(0, -2), y.flatten())
