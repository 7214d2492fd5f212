"""Facts about how the ranks of a run compare, from the step records that each of them keeps in the bundle."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window
from gpudiag.timeline.history import SETTLED_AFTER

MIN_STEPS = 10
"""Fewer unprofiled steps that all ranks recorded tell chance from habit badly."""

_PARTS = {"loader": "loader_wait_ns", "host-to-device copies": "h2d_ns", "forward": "forward_ns", "optimizer": "optimizer_ns"}
REST = "rest"

Floats = npt.NDArray[np.float64]


class Ranks:
    """The unprofiled steps that all ranks recorded, as arrays (steps x ranks) in ns. Raises NotKnownError where they cannot be compared.

    A rank that comes late to the exchange of gradients waits least in its backward pass, where the others wait for it. Its own time in a
    step is therefore the wall time less what its backward pass took beyond the shortest one.
    """

    def __init__(self, window: Window) -> None:
        read = window.analysis.rank_records
        if read is None:
            raise NotKnownError(
                "one rank alone: other ranks are compared by the step records of a bundle of all (gpudiag run torchrun ...)"
            )
        records = read().filter((pl.col("step") >= SETTLED_AFTER) & (pl.col("window") == "plain"))
        self.ranks = sorted(records["rank"].unique().to_list())
        require(len(self.ranks) > 1, "only one rank recorded unprofiled steps")
        records = records.filter(pl.len().over("step") == len(self.ranks)).sort("step", "rank")
        self._records = records
        require(records.height >= MIN_STEPS * len(self.ranks), f"fewer than {MIN_STEPS} unprofiled steps that all ranks recorded")
        require(records["backward_ns"].null_count() == 0, "no backward pass was seen in the unprofiled steps of some rank")

    def column(self, name: str) -> Floats:
        """Return a column of the step records as (steps x ranks); NaN where it is null."""
        return np.asarray(self._records[name].cast(pl.Float64).fill_null(float("nan")).to_numpy()).reshape(-1, len(self.ranks))

    @cached_property
    def wall(self) -> Floats:
        """Return the wall time of each step on each rank."""
        return self.column("wall_ns")

    @cached_property
    def least_backward(self) -> Floats:
        """Return the shortest backward pass of each step (steps x 1): that of the rank that came last."""
        return np.asarray(self.column("backward_ns").min(axis=1, keepdims=True))

    @cached_property
    def own(self) -> Floats:
        """Return the time that each rank takes for itself."""
        return self.wall - self.column("backward_ns") + self.least_backward

    @cached_property
    def usual(self) -> Floats:
        """Return the median of each rank's own time."""
        return np.asarray(np.median(self.own, axis=0))

    @cached_property
    def late(self) -> int:
        """Return the row (not the number) of the rank with the longest own time."""
        return int(self.usual.argmax())

    def others(self, values: Floats) -> float:
        """Return the median of `values` (one a rank) over the ranks that are not late."""
        return float(np.median(np.delete(values, self.late)))

    def forward(self) -> Floats | None:
        """Return the median forward time of each rank; None where it was not seen."""
        found = self.column("forward_ns")
        return None if np.isnan(found).any() else np.asarray(np.median(found, axis=0))


@fact("ranks_compared", unit="count")
def ranks_compared(window: Window) -> int:
    """Ranks of the bundle whose unprofiled steps are compared."""
    return len(Ranks(window).ranks)


@fact("late_rank", unit="text")
def late_rank(window: Window) -> str:
    """Number of the rank whose steps take longest without its waits for the others."""
    found = Ranks(window)
    return str(found.ranks[found.late])


@fact("late_rank_own_ns", unit="ns")
def late_rank_own_ns(window: Window) -> float:
    """Median time of a step that the late rank takes for itself: without its waits for others in the backward pass."""
    found = Ranks(window)
    return float(found.usual[found.late])


@fact("other_ranks_own_ns", unit="ns")
def other_ranks_own_ns(window: Window) -> float:
    """Median time of a step that the other ranks take for themselves."""
    found = Ranks(window)
    return found.others(found.usual)


@fact("straggler_share", unit="share")
def straggler_share(window: Window) -> float:
    """How much longer the late rank takes for itself than the other ranks (median): late / others - 1."""
    found = Ranks(window)
    return float(found.usual[found.late]) / max(found.others(found.usual), 1.0) - 1


@fact("late_rank_step_share", unit="share")
def late_rank_step_share(window: Window) -> float:
    """Share of the unprofiled steps in which the late rank comes last: about 1 / ranks where ranks take turns."""
    found = Ranks(window)
    return float((found.own.argmax(axis=1) == found.late).mean())


@fact("late_rank_phase", unit="text")
def late_rank_phase(window: Window) -> str:
    """What takes the late rank longest beyond the others: loader, host-to-device copies, forward, optimizer or rest (code around them)."""
    found = Ranks(window)
    medians = {name: np.median(np.nan_to_num(found.column(column)), axis=0) for name, column in _PARTS.items()}
    rest = np.median(
        found.wall - found.column("backward_ns") - sum(np.nan_to_num(found.column(column)) for column in _PARTS.values()), axis=0
    )
    medians[REST] = np.clip(rest, 0, None)  # a GPU's phases may exceed the wall time
    return max(medians, key=lambda name: float(medians[name][found.late]) - found.others(medians[name]))


@fact("late_rank_excess_ns", unit="ns")
def late_rank_excess_ns(window: Window) -> float:
    """Time of the analysed steps that the late rank costs, were it like the others: the own time beyond theirs, over the step's.

    Where its forward pass is slower than theirs, its backward pass counts as slower by the same factor.
    """
    found = Ranks(window)
    excess = found.usual[found.late] - found.others(found.usual)
    forward = found.forward()
    if forward is not None and forward[found.late] > 0:
        slower = max(0.0, 1 - found.others(forward) / float(forward[found.late]))
        excess += float(np.median(found.least_backward)) * slower
    return min(1.0, float(excess / np.median(found.wall.max(axis=1)))) * window.wall_ns


# -- lengths ----------------------------------------------------------------------------------------------------------


class Lengths:
    """The positions of each rank's batches (steps x ranks), padding included: the device computes on it. Raises NotKnownError."""

    def __init__(self, window: Window) -> None:
        self.ranks = Ranks(window)
        self.positions = self.ranks.column("batch_elements")
        require(not np.isnan(self.positions).any(), "no batch told its positions: a field attention_mask, padding_mask or lengths does")
        require(bool((self.positions.max(axis=1) > 0).all()), "a batch held no position")

    @property
    def imbalance(self) -> Floats:
        """Return 1 - mean / max over the ranks for each step."""
        return np.asarray(1 - self.positions.mean(axis=1) / self.positions.max(axis=1))

    @property
    def compute(self) -> Floats:
        """Return the compute of each rank: its forward pass, else its own time."""
        forward = self.ranks.column("forward_ns")
        return self.ranks.own if np.isnan(forward).any() else forward


@fact("length_imbalance_share", unit="share")
def length_imbalance_share(window: Window) -> float:
    """Mean over the unprofiled steps of 1 - mean / max over the ranks of the positions (padding included) in their batches."""
    return float(Lengths(window).imbalance.mean())


@fact("length_time_correlation", unit="ratio")
def length_time_correlation(window: Window) -> float:
    """Pearson correlation over steps and ranks of positions with forward time (else own time), each less the mean of its step."""
    found = Lengths(window)
    x = found.positions - found.positions.mean(axis=1, keepdims=True)
    y = found.compute - found.compute.mean(axis=1, keepdims=True)
    scale = float(np.sqrt((x * x).sum() * (y * y).sum()))
    require(scale > 0, "all ranks have batches of one size, or take the same time")
    return float((x * y).sum()) / scale


@fact("length_balanced_ns", unit="ns")
def length_balanced_ns(window: Window) -> float:
    """Time of the analysed steps saved were the work of all ranks equal: forward pass and shortest backward pass by max - mean over ranks.

    Work is taken by positions or by forward time, whichever differs more: attention costs more than in proportion to length.
    """
    found = Lengths(window)
    longest = found.compute.max(axis=1)
    by_time = 1 - found.compute.mean(axis=1) / np.maximum(longest, 1.0)
    uneven = np.maximum(found.imbalance, by_time)
    spent = np.minimum(longest + found.ranks.least_backward[:, 0], found.ranks.wall.max(axis=1))
    return float((uneven * spent).sum() / found.ranks.wall.max(axis=1).sum()) * window.wall_ns
