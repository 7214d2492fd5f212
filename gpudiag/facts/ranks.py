"""Facts about how the ranks of a run compare: from the comparison of all ranks, or from the step records that each keeps in the bundle."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window
from gpudiag.model.job import Balance, Straggler
from gpudiag.timeline.rank_steps import PARTS, Floats, RankSteps, rank_steps

REST = "rest"


class Late:
    """The rank with the longest own time, by the step records of all ranks. Raises NotKnownError where they cannot be compared."""

    def __init__(self, window: Window) -> None:
        self.steps = records_of(window)
        self.ranks = self.steps.ranks

    @cached_property
    def usual(self) -> Floats:
        """Return the median of each rank's own time."""
        return np.asarray(np.median(self.steps.own, axis=0))

    @cached_property
    def late(self) -> int:
        """Return the row (not the number) of the rank with the longest own time."""
        return int(self.usual.argmax())

    def others(self, values: Floats) -> float:
        """Return the median of `values` (one a rank) over the ranks that are not late."""
        return float(np.median(np.delete(values, self.late)))

    def forward(self) -> Floats | None:
        """Return the median forward time of each rank; None where it was not seen."""
        found = self.steps.column("forward_ns")
        return None if np.isnan(found).any() else np.asarray(np.median(found, axis=0))


def records_of(window: Window) -> RankSteps:
    """Return the step records of all ranks side by side. Raises NotKnownError where they cannot be compared."""
    read = window.analysis.rank_records
    if read is None:
        raise NotKnownError(
            "one rank alone: other ranks are compared by a folder of their traces, or by a bundle of all (gpudiag run torchrun ...)"
        )
    found = rank_steps(read())
    if isinstance(found, str):
        raise NotKnownError(found)
    return found


def straggler(window: Window) -> Straggler | None:
    """Return the rank for which the others wait, where all ranks were compared and one is late for long."""
    return window.analysis.job.straggler if window.analysis.job is not None else None


def none_is_late(window: Window) -> bool:
    """Return whether all ranks were compared and none is late for long. Raises NotKnownError where their own times are not known."""
    job = window.analysis.job
    if job is None or job.straggler is not None:
        return False
    if job.own is None and window.analysis.rank_records is None:
        raise NotKnownError(job.no_straggler or "the own times of the ranks are not known")
    if job.own is None:
        records_of(window)
    return True


def _others_own_ns(found: Straggler) -> float:
    return found.excess_ns / found.excess_share


@fact("ranks_compared", unit="count")
def ranks_compared(window: Window) -> int:
    """Ranks of the job that are compared."""
    job = window.analysis.job
    return len(Late(window).ranks) if job is None else sum(row.wall_ns is not None for row in job.ranks)


@fact("late_rank", unit="text")
def late_rank(window: Window) -> str:
    """Number of the rank whose steps take longest without its waits for the others."""
    found = straggler(window)
    if found is not None:
        return str(found.rank)
    require(not none_is_late(window), "no rank is late for long")
    late = Late(window)
    return str(late.ranks[late.late])


@fact("late_rank_own_ns", unit="ns")
def late_rank_own_ns(window: Window) -> float:
    """Time of a step that the late rank takes for itself, without its waits for others (median; mean where all ranks were compared)."""
    found = straggler(window)
    if found is not None:
        return _others_own_ns(found) + found.excess_ns
    late = Late(window)
    return float(late.usual[late.late])


@fact("other_ranks_own_ns", unit="ns")
def other_ranks_own_ns(window: Window) -> float:
    """Time of a step that the other ranks take for themselves (median over them)."""
    found = straggler(window)
    if found is not None:
        return _others_own_ns(found)
    late = Late(window)
    return late.others(late.usual)


@fact("straggler_share", unit="share")
def straggler_share(window: Window) -> float:
    """How much longer the late rank takes for itself than the other ranks: late / others - 1; 0 where ranks were compared and none is."""
    found = straggler(window)
    if found is not None:
        return found.excess_share
    if none_is_late(window):
        return 0.0
    late = Late(window)
    return float(late.usual[late.late]) / max(late.others(late.usual), 1.0) - 1


@fact("late_rank_step_share", unit="share")
def late_rank_step_share(window: Window) -> float:
    """Share of the steps in which the late rank is late; by records alone: comes last, about 1 / ranks where ranks take turns."""
    found = straggler(window)
    if found is not None:
        if found.late_share is None:
            raise NotKnownError("the steps of the ranks could not be compared one by one")
        return found.late_share
    late = Late(window)
    return float((late.steps.own.argmax(axis=1) == late.late).mean())


@fact("late_rank_since_step", unit="count")
def late_rank_since_step(window: Window) -> int:
    """Number of the step from which on the late rank is late; unknown where it was so from the first one that was seen."""
    found = straggler(window)
    require(found is not None, "ranks were not compared, or none is late")
    since = found.since_step if found is not None else None
    if since is None:
        raise NotKnownError("it is late from the first step that was seen on")
    return since


@fact("late_rank_reason", unit="text")
def late_rank_reason(window: Window) -> str:
    """What differs on the late rank from the median rank, in one sentence with figures."""
    found = straggler(window)
    require(found is not None and bool(found.reason), "ranks were not compared, or none is late")
    return found.reason if found is not None else ""


@fact("late_rank_phase", unit="text")
def late_rank_phase(window: Window) -> str:
    """What takes the late rank longest beyond the others: loader, host-to-device copies, forward, optimizer or rest (code around them).

    By the step records alone; late_rank_reason tells more where all ranks were compared.
    """
    require(straggler(window) is None, "late_rank_reason tells more")
    late = Late(window)
    medians = {name: np.median(late.steps.part(name), axis=0) for name in PARTS}
    medians[REST] = np.clip(np.median(late.steps.rest, axis=0), 0, None)
    return max(medians, key=lambda name: float(medians[name][late.late]) - late.others(medians[name]))


@fact("late_rank_excess_ns", unit="ns")
def late_rank_excess_ns(window: Window) -> float:
    """Time of the analysed steps that the late rank costs, were it like the others: the own time beyond theirs, over the step's.

    A step takes as long as the late rank takes for itself. By records alone: where its forward pass is slower than theirs, its backward
    pass counts as slower by the same factor.
    """
    found = straggler(window)
    if found is not None:
        return found.excess_share / (1 + found.excess_share) * window.wall_ns
    late = Late(window)
    excess = late.usual[late.late] - late.others(late.usual)
    forward = late.forward()
    if forward is not None and forward[late.late] > 0:
        slower = max(0.0, 1 - late.others(forward) / float(forward[late.late]))
        excess += float(np.median(late.steps.least_backward)) * slower
    return min(1.0, float(excess / np.median(late.steps.wall.max(axis=1)))) * window.wall_ns


# -- lengths ----------------------------------------------------------------------------------------------------------


def _balance(window: Window) -> Balance | None:
    return window.analysis.job.balance if window.analysis.job is not None else None


def _lengths(window: Window) -> RankSteps:
    """Return the step records of all ranks, with positions. Raises NotKnownError."""
    found = records_of(window)
    require(found.positions is not None, "no batch told its positions: a field attention_mask, padding_mask or lengths does")
    return found


@fact("length_measure", unit="text")
def length_measure(window: Window) -> str:
    """What the work of the ranks' batches is told by: positions (padding included), or matrix FLOP where no batch tells its positions."""
    found = _balance(window)
    if found is not None:
        return found.measure
    _lengths(window)
    return "positions"


@fact("length_imbalance_share", unit="share")
def length_imbalance_share(window: Window) -> float:
    """Mean over the steps of 1 - mean / max over the ranks of the work in their batches: positions (padding included), else matrix FLOP."""
    found = _balance(window)
    return float(_lengths(window).imbalance.mean()) if found is None else found.imbalance_share


@fact("length_time_correlation", unit="ratio")
def length_time_correlation(window: Window) -> float:
    """Pearson correlation over steps and ranks of that work with the ranks' compute, each less the mean of its step."""
    found = _balance(window)
    value = _lengths(window).follows_positions if found is None else found.correlation
    if value is None:
        raise NotKnownError("all ranks have batches of one size, or take the same time, or there are too few steps and ranks to tell")
    return value


@fact("length_balanced_ns", unit="ns")
def length_balanced_ns(window: Window) -> float:
    """Time of the analysed steps saved were the work of all ranks equal: forward pass and shortest backward pass by max - mean over ranks.

    Work is taken by positions or by forward time, whichever differs more: attention costs more than in proportion to length. By matrix
    FLOP: the busy time of the rank that has most, by max - mean.
    """
    found = _balance(window)
    if found is not None:
        return found.saved_share * window.wall_ns
    lengths = _lengths(window)
    return float(lengths.balanced.sum() / lengths.wall.max(axis=1).sum()) * window.wall_ns
