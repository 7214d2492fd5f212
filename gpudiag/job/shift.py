"""How far two ranks' sequences of calls are shifted against each other, where neither sequence numbers nor step numbers tell.

Calls repeat with each step, so several shifts fit. The true one shows in the ends of the calls: all ranks leave a collective together, so
their differences are constant but for the drift of the clocks; a shift by whole steps adds how steps vary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

PROBE = 48
"""Calls in a row whose likes are looked for."""

SAMPLES = 128
"""Calls whose ends are compared for each shift that fits."""

LEAST_AGREEMENT = 0.9
"""Share of the calls common to both sequences that must be alike (heuristic: a few may be missing from a recording)."""

DECISIVE = 3.0
"""A shift is the true one where the next best is this many times as bad (heuristic)."""

RESOLUTION_NS = 2_000
"""Times of older traces have whole microseconds."""

LONG_APART_NS = 1_000_000_000
"""Clocks that are set by NTP differ by much less."""

_NEAR = 4
"""Nearness by Unix time decides where the nearest shift is this many times nearer than the next."""


def find_shift(first: tuple[Ints, Ints], other: tuple[Ints, Ints], *, same_clock: bool) -> int | None:
    """Return how many places later in `first` each call of `other` stands; None where that cannot be told.

    Each sequence: (signatures, ends in ns). `same_clock`: both ends are Unix time, so that nearness counts too.
    """
    shifts = _fitting(first[0], other[0])
    if not len(shifts):
        return None
    differences = [_differences(first[1], other[1], int(shift)) for shift in shifts]
    if len(shifts) == 1:
        return int(shifts[0]) if not same_clock or _meet(first[1], other[1], differences[0]) else None
    if same_clock:
        near = _decided(np.array([abs(float(np.median(each))) for each in differences]), _NEAR, RESOLUTION_NS)
        if near is not None:
            return int(shifts[near])
    # two calls always have a straight line through them: they tell no shift
    spread = np.array([_spread(each) if len(each) > 2 else np.inf for each in differences])
    best = _decided(spread, DECISIVE, RESOLUTION_NS)
    return None if best is None else int(shifts[best])


def _meet(first: Ints, other: Ints, differences: Ints) -> bool:
    """Return whether two recordings by Unix time can be of the same moments: no further apart than they are long, or than LONG_APART_NS."""
    longest = max(int(first[-1] - first[0]), int(other[-1] - other[0]), LONG_APART_NS)
    return abs(float(np.median(differences))) <= longest


def _decided(badness: npt.NDArray[np.float64], factor: float, resolution: float) -> int | None:
    """Return the row of the least badness; None where another comes near."""
    order = np.argsort(badness, kind="stable")
    least, next_best = badness[order[0]], badness[order[1]]
    clear = np.isfinite(least) and next_best > factor * least + resolution
    return int(order[0]) if clear else None


def _fitting(first: Ints, other: Ints) -> Ints:
    """Return the shifts at which a probe of `other` occurs in `first` and the whole agrees."""
    length = min(PROBE, len(first), len(other))
    if not length:
        return np.empty(0, dtype=np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(first, length)
    places = {0, (len(other) - length) // 2, len(other) - length}
    found = [np.flatnonzero((windows == other[place : place + length]).all(axis=1)) - place for place in places]
    shifts = np.unique(np.concatenate(found))
    return np.array([shift for shift in shifts if _agreement(first, other, int(shift)) >= LEAST_AGREEMENT], dtype=np.int64)


def _overlap(first: int, other: int, shift: int) -> tuple[slice, slice]:
    """Return the rows of both sequences (of these lengths) that stand at one place."""
    begin, end = max(0, shift), min(first, other + shift)
    return slice(begin, end), slice(begin - shift, end - shift)


def _agreement(first: Ints, other: Ints, shift: int) -> float:
    mine, theirs = _overlap(len(first), len(other), shift)
    return float((first[mine] == other[theirs]).mean()) if mine.stop > mine.start else 0.0


def _differences(first: Ints, other: Ints, shift: int) -> Ints:
    mine, theirs = _overlap(len(first), len(other), shift)
    found = first[mine] - other[theirs]
    chosen: Ints = found[np.linspace(0, len(found) - 1, min(SAMPLES, len(found))).astype(np.int64)]
    return chosen


def _spread(differences: Ints) -> float:
    """Return how much the differences vary about a straight line (median deviation, ns)."""
    place = np.arange(len(differences)) - (len(differences) - 1) / 2
    values = (differences - differences[0]).astype(np.float64)
    half = len(values) // 2
    slope = (np.median(values[-half:]) - np.median(values[:half])) / max(len(values) - half, 1)
    rest = values - slope * place
    return float(np.median(np.abs(rest - np.median(rest))))
