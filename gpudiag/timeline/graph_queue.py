"""The launch queue of a recording: how far each launch call was ahead of the device, and the depth at which calls visibly block."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpudiag.model.graph import QUEUE_LIMIT, Ints

Bools = npt.NDArray[np.bool_]

ENOUGH = 16
"""So many calls must reach a depth, and wait there, to be held up by a queue of that depth."""

LEAST_DEPTH = 8
"""A queue is longer than this: calls that wait with less ahead of them wait for something else."""

PLATEAU_SHARE, PLATEAU = 0.03, 2
"""Calls within 3 % of the depth, or two launches, count as at it: the clocks of host and device differ by a few launches."""

BLOCKED_TIMES = 3
"""Calls at a full queue take at least this many times what calls take far from it."""

LAUNCH_CALL_NS = 5_000
"""What a launch call takes on current hosts (3 to 8 us at the median of recordings from V100 to MI300X)."""

FREED_NS = 10_000
"""A call that was held up returns within this time of the begin of some work, which freed its place."""


class Issued(NamedTuple):
    """The calls that start work, by row of `launches`, and what stood in the queue when each began."""

    row: Ints
    start: Ints
    end: Ints
    begun: Ints
    """When the first work of each began, at the earliest when the call was over."""
    ahead: Ints
    """Launches that had been issued and had not begun when the call began."""

    def near(self, limit: int) -> Bools:
        """Return which calls met a queue that was as good as full."""
        found: Bools = self.ahead >= limit - max(PLATEAU, int(PLATEAU_SHARE * limit))
        return found


def issued(launch: Ints, start: Ints, call_start: Ints, call_end: Ints) -> Issued:
    """Return the launches of the work (`launch`: row of launches or -1, `start`: of the work; both by work, the calls' times by row)."""
    linked = np.flatnonzero(launch >= 0)
    row, place = np.unique(launch[linked], return_inverse=True)
    first = np.full(len(row), np.iinfo(np.int64).max)
    np.minimum.at(first, place, start[linked])
    begin, end = call_start[row], call_end[row]
    begun = np.maximum(first, end)
    ahead = np.searchsorted(np.sort(end), begin, "right") - np.searchsorted(np.sort(begun), begin, "right")
    return Issued(row, begin, end, begun, ahead)


def queue_limit(calls: Issued, blocking: Ints) -> int:
    """Return how many launches can stand in the queue: the depth at which calls block, else QUEUE_LIMIT or what was seen beyond it.

    `blocking`: rows of launches that waited for the device for another reason (copies from pageable memory). A queue is short where
    enough calls reach its depth, none goes beyond, and most calls there take several times the usual and return as some work begins.
    Usual is what calls far from that depth take; where most calls stand at it, hardly any is far, or the queue was full before the
    recording began.
    """
    free = ~np.isin(calls.row, blocking)
    ahead, length = calls.ahead[free], (calls.end - calls.start)[free]
    if len(ahead) < 2 * ENOUGH:
        return QUEUE_LIMIT
    top = int(np.sort(ahead)[-ENOUGH])
    full = ahead >= top - max(PLATEAU, int(PLATEAU_SHARE * top))
    far = ahead < top / 2
    usual = float(np.median(length[far])) if far.sum() >= ENOUGH else np.inf
    usual = min(usual, LAUNCH_CALL_NS) if full.mean() > 0.5 else usual
    if top >= LEAST_DEPTH and np.median(length[full]) > BLOCKED_TIMES * usual:
        begun, end = np.sort(calls.begun), calls.end[free][full]
        since = end - np.append(begun, 0)[np.searchsorted(begun, end, "right") - 1]
        if np.mean((since >= 0) & (since <= FREED_NS)) > 0.5:
            return top
    return max(QUEUE_LIMIT, int(calls.ahead.max(initial=0)))
