"""What is set otherwise in one of two parity runs, and should not be."""

from __future__ import annotations

import math
import statistics
from typing import Literal, Protocol

from gpudiag.experiment.trial.protocol import ParityRun, ParityStep

NOT_SET = "not set"

RELATIVE = 1e-9
"""Learning rates are computed alike in both runs, or differ by more."""


class Run(Protocol):
    """What is used of a parity run."""

    @property
    def steps(self) -> tuple[ParityStep, ...]:
        """Return its steps."""

    @property
    def run(self) -> ParityRun:
        """Return its settings."""


def changed_settings(kind: Literal["exact", "rounding", "low_precision", "semantics"], before: Run, after: Run) -> tuple[str, ...]:
    """Return one line 'what: before -> after' for each setting that differs, though changes of this class leave it as it is.

    A change of semantics may give other batches; everything else must stay, whatever the class.
    """
    names = dict.fromkeys([*before.run.settings, *after.run.settings])
    pairs = [(name, before.run.settings.get(name, NOT_SET), after.run.settings.get(name, NOT_SET)) for name in names]
    found = [f"{name}: {old} -> {new}" for name, old, new in pairs if old != new]
    if kind != "semantics":
        found += _samples(before, after)
    return (*found, *_rates(before, after))


def _samples(before: Run, after: Run) -> list[str]:
    """Compare the samples of a usual update: a loader that runs ahead has those of two in the first."""
    old, new = (_usual([step.samples for step in run.steps]) for run in (before, after))
    return [f"samples of an update: {old:g} -> {new:g}"] if old is not None and new is not None and old != new else []


def _usual(samples: list[int | None]) -> float | None:
    known = [count for count in samples if count is not None]
    return statistics.median(known) if known else None


def _rates(before: Run, after: Run) -> list[str]:
    """Compare the learning rates of all steps; the first that differs is told."""
    for at, (old, new) in enumerate(zip(before.steps, after.steps, strict=False), 1):
        a, b = old.learning_rates, new.learning_rates
        if len(a) != len(b):
            return [f"learning rates of step {at}: {len(a)} -> {len(b)}"]
        for first, second in zip(a, b, strict=True):
            if not math.isclose(first, second, rel_tol=RELATIVE):
                return [f"learning rate of step {at}: {first:g} -> {second:g}"]
    return []
