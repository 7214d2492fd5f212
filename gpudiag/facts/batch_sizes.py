"""Facts about how step time grows with the batch (EFF-04), T = a + c b: from a run whose batch size varied, or from an experiment."""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from gpudiag.facts.registry import NotKnownError, fact
from gpudiag.facts.window import Window
from gpudiag.model.experiment import ExperimentData, Outcome
from gpudiag.timeline.history import SETTLED_AFTER

MIN_STEPS = 5
"""Plain steps of a batch size whose median counts (heuristic)."""

MIN_RATIO = 1.5
"""Largest over smallest batch size from which a line through them can be told from scatter (heuristic)."""

ASK = "run a few steps with twice the batch in the same recording, or test it: gpudiag ab -o BUNDLE --fix batch-size=x2 ..."

FIX = "batch-size"


class Fit(NamedTuple):
    """Step time in ns by batch size in samples: fixed_ns + sample_ns x batch."""

    fixed_ns: float
    sample_ns: float
    batch: int
    """The size that is asked to be doubled: the largest of a run, that of the unchanged program in an experiment."""
    smallest: int
    largest: int
    """The smallest and the largest size seen."""

    def step_ns(self, batch: float) -> float:
        """Return the time of a step of `batch` samples in ns."""
        return self.fixed_ns + self.sample_ns * batch


def fit(window: Window) -> Fit:
    """Return the line of an experiment with another batch size, else of the batch sizes of the run. Raises NotKnownError without either."""
    tested = next((found for data in reversed(window.analysis.experiments) if (found := experiment_fit(data)) is not None), None)
    return tested or run_fit(window)


def experiment_fit(data: ExperimentData) -> Fit | None:
    """Return the line through the unchanged batch and the largest other one that was compared with it; None where none was.

    With f times the batch a step takes f / (ratio of samples a second) times as long.
    """
    samples = data.baseline.samples_per_step if data.baseline else None
    if data.baseline is None or not samples or data.baseline.step_ns <= 0:
        return None
    step_ns = data.baseline.step_ns
    known = [(factor, one.ratio) for one in data.experiments if (factor := _factor(one, samples)) and one.ratio]
    if not known:
        return None
    factor, ratio = max(known)
    slope = min(max(step_ns * (factor / ratio - 1) / (samples * (factor - 1)), 0.0), step_ns / samples)
    return Fit(step_ns - slope * samples, slope, round(samples), round(samples), round(factor * samples))


def _factor(one: Outcome, samples: float) -> float | None:
    """Return how many times the batch of `samples` a measured experiment had; None unless it changed the batch alone, by 1.5 or more."""
    name, _, value = one.fix.partition("=")
    if name != FIX or one.variant or one.screening or one.unit != "samples" or one.verdict in ("failed", "not_applied", "unstable"):
        return None
    try:
        factor = float(value[1:]) if value.startswith("x") else float(value) / samples
    except ValueError:
        return None
    return factor if factor >= MIN_RATIO else None


def run_fit(window: Window) -> Fit:
    """Return the least-squares line through the median step time of each batch size of the run, no part of it negative.

    Raises NotKnownError unless two sizes with a ratio of 1.5 have 5 unprofiled steps each.
    """
    records = window.analysis.step_records
    if records is None:
        raise NotKnownError("a trace does not hold the steps outside it: record with gpudiag.profile")
    plain = records.filter((pl.col("step") >= SETTLED_AFTER) & (pl.col("window") == "plain") & (pl.col("samples") > 0))
    sizes = plain.group_by("samples").agg(pl.len().alias("steps"), pl.col("wall_ns").median()).filter(pl.col("steps") >= MIN_STEPS)
    sizes = sizes.sort("samples")
    if sizes.height < 2 or int(sizes["samples"][-1]) < MIN_RATIO * int(sizes["samples"][0]):
        raise NotKnownError(f"the batch size did not vary (two sizes, 1.5 apart, {MIN_STEPS} unprofiled steps each): {ASK}")
    at, times = sizes["samples"].cast(pl.Float64).to_numpy(), sizes["wall_ns"].to_numpy()
    weights = sizes["steps"].cast(pl.Float64).to_numpy()
    mean_at, mean_time = (weights * at).sum() / weights.sum(), (weights * times).sum() / weights.sum()
    slope = float((weights * (at - mean_at) * (times - mean_time)).sum() / (weights * (at - mean_at) ** 2).sum())
    slope = min(max(slope, 0.0), float(mean_time / mean_at))
    return Fit(float(mean_time - slope * mean_at), slope, int(at[-1]), int(at[0]), int(at[-1]))


@fact("smallest_batch", unit="count")
def smallest_batch(window: Window) -> int:
    """Samples of the smallest batch of at least 5 unprofiled steps, where the batch size varied; in an experiment the unchanged one."""
    return fit(window).smallest


@fact("largest_batch", unit="count")
def largest_batch(window: Window) -> int:
    """Samples of the largest batch of at least 5 unprofiled steps, where the batch size varied; in an experiment the largest tested."""
    return fit(window).largest


@fact("doubling_ratio", unit="ratio")
def doubling_ratio(window: Window) -> float:
    """How many times as long a step takes with twice the largest batch of the run, by the line T = a + c b through its batch sizes; where
    an experiment has tested another batch size, with twice that of the unchanged program.

    1: a larger batch costs nothing (overhead, latency, weight reads); 2: the device is saturated.
    """
    found = fit(window)
    return found.step_ns(2 * found.batch) / found.step_ns(found.batch)


@fact("fixed_step_ns", unit="ns")
def fixed_step_ns(window: Window) -> float:
    """The part of a step that does not grow with the batch (a of T = a + c b)."""
    return fit(window).fixed_ns


@fact("doubling_saves_ns", unit="ns")
def doubling_saves_ns(window: Window) -> float:
    """Time that the samples of the analysed steps save with twice the batch: 1 - doubling_ratio / 2 of it."""
    return (1 - float(doubling_ratio(window)) / 2) * window.wall_ns
