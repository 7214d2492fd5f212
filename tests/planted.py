"""Training scripts with one planted reason to wait, and what the analysis of their bundle says."""

from __future__ import annotations

import contextlib
import io
import runpy
import textwrap
from pathlib import Path
from typing import NamedTuple

import polars as pl

from gpudiag.analysis import analyse
from gpudiag.inputs import resolve_input
from gpudiag.model.analysis import Analysis

_SCRIPT = """\
import gc, time
import torch
from torch.utils.data import DataLoader, Dataset
import gpudiag

DEVICE = "{device}"


class Samples(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
{item}
        return torch.ones(64), torch.tensor(1.0)


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
{setup}


def forward(x, step):
{forward}


def plant(step, loss):
{plant}


def train(prof, loader):
    for step, (x, y) in enumerate(prof.steps(loader)):
        if step == 14:
            break
        loss = (forward(x.to(DEVICE), step)[:, 0] - y.to(DEVICE)[: len(x)]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plant(step, loss)


with gpudiag.profile(BUNDLE, skip=3) as prof:
    train(prof, DataLoader(Samples(), batch_size=8, num_workers={workers}))
"""


class Plant(NamedTuple):
    """Lines of the script where the cause is, and the cause that has to be found at the line that holds `marker`."""

    cause: str
    marker: str
    plant: str = "pass"
    item: str = "pass"
    setup: str = ""
    forward: str = "return model(x)"
    workers: int = 0


class Found(NamedTuple):
    """The largest idle cause, its place, and the lines that may be named: that of the marker and that of its function."""

    analysis: Analysis
    cause: str
    evidence: str | None
    place: str
    lines: tuple[str, ...]


def script(folder: Path, plant: Plant, device: str) -> Path:
    """Write the script and return its path."""

    def body(text: str, depth: int) -> str:
        return textwrap.indent(text, " " * depth)

    text = _SCRIPT.format(
        device=device, item=body(plant.item, 8), setup=plant.setup, forward=body(plant.forward, 4), plant=body(plant.plant, 4),
        workers=plant.workers,
    )  # fmt: skip
    path = folder / "train.py"
    path.write_text(text)
    return path


def analysed(folder: Path, plant: Plant, device: str = "cpu") -> Found:
    """Run the script under gpudiag.profile and return what its bundle shows."""
    path = script(folder, plant, device)
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(str(path), init_globals={"BUNDLE": str(folder / "run")})
    analysis = analyse(resolve_input(str(folder / "run"), None), lambda _: None)
    pieces = analysis.idle.with_columns(time=pl.col("end_ns") - pl.col("start_ns"), line=pl.col("site").str.extract(r"([^/]+\.py\(\d+\))"))
    cause = pieces.group_by("cause").agg(pl.col("time").sum()).sort("time")["cause"][-1]
    places = pieces.filter(cause=cause).group_by("line").agg(pl.col("time").sum(), pl.col("evidence").first()).sort("time")
    return Found(analysis, cause, places["evidence"][-1], str(places["line"][-1]), _lines(path, plant.marker))


def _lines(path: Path, marker: str) -> tuple[str, ...]:
    """Return the line of the marker and that of the function around it: frames carry the latter."""
    lines = path.read_text().splitlines()
    row = next(row for row, line in enumerate(lines) if marker in line)
    around = next(above for above in range(row, -1, -1) if lines[above].lstrip().startswith("def ") or not lines[above][:1].isspace())
    return f"train.py({row + 1})", f"train.py({around + 1})"
