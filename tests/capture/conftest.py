"""A tiny real training loop, and looks into the bundle that it leaves."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gpudiag.capture.session import Session


class Loop:
    """A model with its optimizer and data; `train` does one step and keeps the loss."""

    def __init__(self, batches: int = 24) -> None:
        torch.manual_seed(0)
        inputs = torch.randn(4 * batches, 8)
        self.data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=False)
        self.losses: list[float] = []

    def loader(self, **options: Any) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=4, shuffle=True, **options)

    def train(self, batch: Any) -> None:
        x, y = batch
        loss = (self.model(x) - y).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def epoch(self, batches: Iterable[Any]) -> None:
        for batch in batches:
            self.train(batch)


@pytest.fixture(autouse=True)
def _no_profiler_is_left() -> Iterator[None]:
    """Fail the test that leaves torch's profiler running, not the next one in this process."""
    yield
    assert not torch._C._autograd._profiler_enabled()


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def make_loop() -> type[Loop]:
    return Loop


@pytest.fixture
def recorded(tmp_path: Path, loop: Loop) -> Path:
    """A finished bundle of 24 steps with default windows."""
    with Session(tmp_path / "run") as prof:
        loop.epoch(prof.steps(loop.loader()))
    return prof.path


@pytest.fixture
def trace_of() -> Callable[[Path], dict[str, Any]]:
    return lambda path: json.loads(gzip.decompress(path.read_bytes()))


@pytest.fixture
def profiler_steps(trace_of: Callable[[Path], dict[str, Any]]) -> Callable[[Path], list[dict[str, Any]]]:
    """The ProfilerStep annotations of a trace, by time."""

    def steps(path: Path) -> list[dict[str, Any]]:
        events = trace_of(path)["traceEvents"]
        return sorted((e for e in events if e["name"].startswith("ProfilerStep#") and e["ph"] == "X"), key=lambda e: e["ts"])

    return steps
