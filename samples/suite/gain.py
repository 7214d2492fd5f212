"""What the repaired twin of a sample gains: two live processes that take turns (gpudiag.experiment)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from gpudiag.experiment.compare import compare_arms
from gpudiag.experiment.design import Arm, Design
from gpudiag.model.experiment import Comparison
from suite.expected import Sample

STEPS = 5000
"""More than a trial takes: it ends by itself. Some samples make all their batches at first."""


class Gain(msgspec.Struct, frozen=True):
    """The share of the planted sample's time that its twin gives back, per sample of training data: 1 - 1 / ratio."""

    share: float
    low: float
    high: float
    unit: str
    """samples; steps where the number of samples of a step is not known."""
    over: str
    """blocks or pairs: what the interval is over."""
    pairs: int
    device: str = ""


def measure(sample: Sample, pairs: int, scratch: Path, tell: Callable[[str], None]) -> Gain | str:
    """Return the gain of the twin of `sample`, or why there is none. `scratch`: an empty folder to train in."""
    # shared: this process has used the GPU itself, to see how fast its bf16 is (suite.needs)
    design = Design(looks=(pairs,), blocks=4, block_steps=6, block_s=1.2, warm_limit_s=10.0, shared_ok=True)
    arms = []
    for name, more in (("planted", ()), ("fixed", ("--fixed",))):
        cwd = scratch / name
        cwd.mkdir()
        arms.append(Arm(name=name, command=(sys.executable, str(sample.script), "--steps", str(STEPS), *more), cwd=cwd))
    return of(compare_arms(arms[0], arms[1], design, progress=tell))


def of(found: Comparison) -> Gain | str:
    """Return the gain that a comparison shows, or why it shows none."""
    if found.verdict == "failed" or found.ratio is None or found.interval is None:
        return "; ".join(found.notes) or "failed"
    low, high = found.interval
    return Gain(share(found.ratio), share(low), share(high), found.unit, found.over, found.pairs)


def share(ratio: float) -> float:
    """Return the share of the time that a throughput `ratio` times as high gives back."""
    return 1 - 1 / ratio
