"""Which rank is late, and since when: by the time that each takes for itself in each step."""

from __future__ import annotations

import msgspec
import numpy as np

from gpudiag.job.change import rises_at
from gpudiag.timeline.rank_steps import Floats
from gpudiag.units import format_share

MIN_SHARE = 0.05
"""A rank is late in a step where it takes this much longer than the median of the others (heuristic: machines differ by less)."""

HABIT = 0.7
"""Share of the steps in which a straggler is late (as rule DST-06): of two ranks that take turns each is in half."""

SURE = 4.0
"""Its mean lateness in standard errors: by chance, one of some hundred ranks reaches 4."""

BEYOND = 3.0
"""Its lateness in standard deviations of the others' (robust: 1.4826 times the median deviation): ranks that differ anyway."""

CHANCE = 0.01
"""Chance that one of equal ranks takes longest in every step: ranks ^ (1 - steps). Below it, a rank that does is late by habit."""

FEW = 10
"""Fewer steps have no robust deviation of their own: that of all ranks is taken."""


class Late(msgspec.Struct, frozen=True):
    """A rank that is late for long. Times in ns."""

    column: int
    """Of the ranks compared."""
    begin: int
    """Row of the first step in which it is late."""
    excess_ns: float
    """Mean of its own time less the median of the others'."""
    share: float
    """excess_ns over the mean of the others' median."""
    late_share: float
    last_share: float


def late_ranks(own: Floats, least: int) -> list[Late]:
    """Return the ranks that are late for long, the latest first, from their own times (steps x ranks).

    `least`: steps in which a rank has to be seen. Ranks that take turns are not among them, nor ranks that differ as the others do.
    """
    if own.shape[0] < least or own.shape[1] < 2:
        return []
    others = others_median(own)
    found = [_judged(own, others, column, least) for column in range(own.shape[1])]
    return sorted((late for late in found if late is not None), key=lambda late: -late.excess_ns)


def _judged(own: Floats, others: Floats, column: int, least: int) -> Late | None:
    begin = _begin(own[:, column], others[:, column], least)
    found = _since(begin, own, others[:, column], column)
    return found if found is not None or begin == 0 else _since(0, own, others[:, column], column)


def _since(begin: int, own: Floats, base: Floats, column: int) -> Late | None:
    """Return the rank where it is late for long from row `begin` on; `base`: what the others take."""
    lateness = own[:, column] - base
    own, base, beyond = own[begin:], base[begin:], lateness[begin:]
    late_share = float((beyond > MIN_SHARE * base).mean())
    excess, share = float(beyond.mean()), float(np.median(beyond) / max(float(np.median(base)), 1.0))
    if late_share < HABIT or share < MIN_SHARE or excess <= 0 or not _beyond(own, column):
        return None
    if float(np.median(beyond)) <= SURE * _error(lateness, begin, own) and not _always_last(own, column):
        return None
    last = float((own.argmax(axis=1) == column).mean())
    return Late(column, begin, excess, excess / max(float(base.mean()), 1.0), late_share, last)


def _begin(own: Floats, others: Floats, least: int) -> int:
    """Return the row from which on a rank is late; 0 where it is so from the start, or never."""
    begin = rises_at(own - others)
    if begin is None or own.size - begin < least:
        return 0
    before, base = own[:begin] - others[:begin], others[:begin]
    was_late = float((before > MIN_SHARE * base).mean()) >= 1 - HABIT and float(np.median(before)) > MIN_SHARE / 2 * float(np.median(base))
    return 0 if was_late else begin


def _always_last(own: Floats, column: int) -> bool:
    """Return whether the rank takes longest in every one of few steps, of so many that equal ranks would hardly do so."""
    steps, ranks = own.shape
    return steps < FEW and bool((own.argmax(axis=1) == column).all()) and float(ranks) ** (1 - steps) < CHANCE


def _error(lateness: Floats, begin: int, own: Floats) -> float:
    """Return the standard error of the lateness from row `begin` on, in ns; `own`: all ranks from there on.

    Neighbouring steps are alike where a machine is busy for a while: they count as (1 - r) / (1 + r) of as many that are not, with r their
    correlation (Bayley and Hammersley 1946).
    """
    if lateness.size - begin < FEW:
        apart = own - np.median(own, axis=1, keepdims=True)
        freedom = max((own.shape[0] - 1) * (own.shape[1] - 1), 1)
        return float(np.sqrt(((apart - apart.mean(axis=0)) ** 2).sum() / freedom / own.shape[0]))
    parts = [part - np.median(part) for part in (lateness[:begin], lateness[begin:]) if part.size]
    left = np.concatenate(parts)
    deviation = 1.4826 * float(np.median(np.abs(left)))
    left = left.clip(-SURE * deviation, SURE * deviation)
    alike = float((left[1:] * left[:-1]).sum() / max(float((left * left).sum()), 1e-9))
    return deviation * float(np.sqrt((1 + max(alike, 0.0)) / (1 - min(alike, 0.99)) / (lateness.size - begin)))


def _beyond(own: Floats, column: int) -> bool:
    """Return whether a rank differs by more than the others do among each other."""
    usual = np.median(own, axis=0)
    others = np.delete(usual, column)
    deviation = 1.4826 * float(np.median(np.abs(others - np.median(others))))
    return float(usual[column] - np.median(others)) > BEYOND * deviation


def others_median(own: Floats) -> Floats:
    """Return for each step and rank the median over the other ranks (steps x ranks)."""
    count = own.shape[1] - 1
    place = own.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    ordered = np.sort(own, axis=1)
    low, high = (count - 1) // 2, count // 2
    without = [np.where(place <= at, ordered[:, [at + 1]], ordered[:, [at]]) for at in (low, high)]
    return np.asarray((without[0] + without[1]) / 2)


def nobody(own: Floats, ranks: list[int]) -> str:
    """Return a sentence about ranks of which none is late for long."""
    others = others_median(own)
    late = own - others > MIN_SHARE * others
    if float(late.any(axis=1).mean()) >= HABIT:
        last = np.bincount(own.argmax(axis=1), minlength=len(ranks))
        most, share = ranks[int(last.argmax())], format_share(float(last.max()) / own.shape[0])
        return f"no rank is late for long: ranks take turns, rank {most} is last most often, in {share} of {own.shape[0]} steps"
    usual = np.median(own - others, axis=0) / np.maximum(np.median(others, axis=0), 1.0)
    top = int(usual.argmax())
    return (
        f"no rank is late for long: rank {ranks[top]} takes longest for itself, {format_share(float(usual[top]), 1)} more than the median "
        f"of the others in {own.shape[0]} steps"
    )
