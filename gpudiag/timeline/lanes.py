"""One row of a time line as at most a few pieces a pixel: what is drawn of a million events.

Events that are wide enough stand alone, the others are joined within one bin of two pixels. No pyramid is needed: the rows are sorted and
disjoint, so the bins are found by bisection and their sums by differences of running sums; at most the lengths of the events are read one
by one.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpudiag.attribution import intervals
from gpudiag.model.breakdown import IDLE_BUCKETS
from gpudiag.model.cost import BOUNDS

Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.uint8]

STYLES = (*BOUNDS, *IDLE_BUCKETS, "step", "step_left_out", "op", "call", "wait", "mark")
"""What an event is drawn as; a code is the place in this tuple. call: runtime call, wait: one that waits for the device."""

BIN_PIXELS = 2
"""Events narrower than this are joined: a bar of one pixel beside a gap of one pixel cannot be told from a grey area."""


class Row(NamedTuple):
    """Events that do not overlap, in order: one line of a lane."""

    start_ns: Ints
    end_ns: Ints
    code: Codes
    table: npt.NDArray[np.uint8]
    """Place in tracks.TABLES of the table that holds the event."""
    id: Ints
    """Row of that table."""
    kinds: tuple[int, ...]
    """Codes that occur."""
    sums_ns: Ints
    """Time of each kind before each event, and last that of all: shape (events + 1, kinds)."""
    longest_ns: int


class Pieces(NamedTuple):
    """What is drawn of a row: columns of equal length."""

    start_ns: Ints
    end_ns: Ints
    code: Codes
    """Of an event; of joined events the one that holds most of their time."""
    events: Ints
    """How many it stands for."""
    busy_ns: Ints
    first: Ints
    """Place of the first event in the row."""


def row(start_ns: Ints, end_ns: Ints, code: Codes, table: npt.NDArray[np.uint8], ids: Ints) -> Row:
    """Return the row of events that are sorted and do not overlap. Raises ValueError for others."""
    if (start_ns[1:] < end_ns[:-1]).any():
        raise ValueError("the events of a row overlap or are not in order")
    kinds = tuple(np.flatnonzero(np.bincount(code)).tolist())
    sums = np.zeros((len(start_ns) + 1, len(kinds)), dtype=np.int64)
    for place, kind in enumerate(kinds):
        np.cumsum(np.where(code == kind, end_ns - start_ns, 0), out=sums[1:, place])
    return Row(start_ns, end_ns, code, table, ids, kinds, sums, int((end_ns - start_ns).max(initial=0)))


def pieces(of: Row, from_ns: int, to_ns: int, pixels: int) -> Pieces:
    """Return what is drawn of the events that reach into [from_ns, to_ns) on `pixels` pixels, whole events also at the edges.

    The counts sum to the number of these events and busy_ns to their time. Joined events begin within one bin, so no gap of a bin's
    width is drawn over, and every event lies in a piece, so none is lost.
    """
    width = bin_ns(from_ns, to_ns, pixels)
    first, last = within(of, from_ns, to_ns)
    begins = _begins(of, first, last, width)
    ends = np.append(begins[1:], last)
    spent = of.sums_ns[ends] - of.sums_ns[begins] if len(begins) else np.zeros((0, max(1, len(of.kinds))), dtype=np.int64)
    count = ends[: len(begins)] - begins
    most = np.array(of.kinds or (0,), dtype=np.uint8)[spent.argmax(axis=1)]
    code = np.where(count == 1, of.code[begins], most)  # an event of no length has a code too
    return Pieces(of.start_ns[begins], of.end_ns[ends[: len(begins)] - 1], code, count, spent.sum(axis=1), begins)


def bin_ns(from_ns: int, to_ns: int, pixels: int) -> int:
    """Return the width of a bin in ns."""
    return max(1, BIN_PIXELS * (to_ns - from_ns) // max(1, pixels))


def within(of: Row, from_ns: int, to_ns: int) -> tuple[int, int]:
    """Return (first, last + 1) of the events that reach into [from_ns, to_ns)."""
    first = int(np.searchsorted(of.end_ns, from_ns, side="right"))
    return first, max(first, int(np.searchsorted(of.start_ns, to_ns, side="left")))


def _begins(of: Row, first: int, last: int, width: int) -> Ints:
    """Return the first event of each piece: wide events, what follows them, and the first in each bin.

    Bins lie at multiples of their width, not from the window's edge: nothing flickers while the window moves.
    """
    if first == last:
        return np.empty(0, dtype=np.int64)
    starts = of.start_ns[first:last]
    lengths = of.end_ns[first:last] - starts if of.longest_ns >= width else np.empty(0, dtype=np.int64)
    wide = np.flatnonzero(lengths >= width)
    low, high = int(starts[0]) // width, int(starts[-1]) // width
    edges = np.arange(low + 1, high + 1, dtype=np.int64) * width if high - low < last - first else None
    binned = np.searchsorted(starts, edges) if edges is not None else np.flatnonzero(np.diff(starts // width)) + 1
    found = intervals.distinct(np.concatenate(([0], wide, wide + 1, binned)).astype(np.int64))
    result: Ints = found[found < last - first] + first
    return result


def depths(start_ns: Ints, end_ns: Ints) -> Ints:
    """Return for each event (sorted by start, then the longest first) the first row that is free when it begins.

    Of events that nest it is the number of those around them. An event of no length takes a nanosecond here.
    """
    end_ns = np.maximum(end_ns, start_ns + 1)
    if not len(start_ns) or (start_ns[1:] >= np.maximum.accumulate(end_ns)[:-1]).all():
        return np.zeros(len(start_ns), dtype=np.int64)
    still_open = np.arange(len(start_ns)) - np.searchsorted(np.sort(end_ns), start_ns, side="right")
    order = np.argsort(still_open, kind="stable")
    same = still_open[order][1:] == still_open[order][:-1]
    nested = (start_ns[order][1:] >= end_ns[order][:-1])[same].all()
    return still_open if nested else _first_free(start_ns.tolist(), end_ns.tolist())


def _first_free(starts: list[int], ends: list[int]) -> Ints:
    """Return `depths` of events that overlap without nesting, one after the other."""
    found, taken, free, rows = [0] * len(starts), list[tuple[int, int]](), list[int](), 0
    for place, start in enumerate(starts):
        while taken and taken[0][0] <= start:
            heapq.heappush(free, heapq.heappop(taken)[1])
        if free:
            depth = heapq.heappop(free)
        else:
            depth, rows = rows, rows + 1
        found[place] = depth
        heapq.heappush(taken, (ends[place], depth))
    return np.array(found, dtype=np.int64)
