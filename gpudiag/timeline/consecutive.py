"""The consecutive steps whose graph what-ifs are judged by: all that are analysed, or as many as can be replayed."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt
import polars as pl

Ints = npt.NDArray[np.int64]

MAX_RUN_NODES = 150_000
"""Nodes of all steps together: a report replays them some fifty times, at a tenth of a second each."""

LEAST_STEPS = 3
"""Fewer consecutive steps show nothing of how costs alternate: the representative ones are then the better sample."""


def pieces(trace_events: list[Ints], steps: pl.DataFrame) -> Ints:
    """Return for each step how many of the events (starts in ns, one array a kind) begin in it."""
    start, end = steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy()
    found = np.zeros(steps.height, dtype=np.int64)
    for times in trace_events:
        ordered = np.sort(times)
        found += np.searchsorted(ordered, end) - np.searchsorted(ordered, start)
    return found


def consecutive(steps: pl.DataFrame, count: Ints, most: int = MAX_RUN_NODES) -> tuple[int, int] | None:
    """Return the first and the last row of the steps to replay together; `count`: nodes of each. None: too few fit.

    The longest stretch of analysed steps that touch; where it has more nodes than `most`, that part of it with as many steps as fit whose
    mean length is nearest to that of all analysed steps.
    """
    first, last = _longest_stretch(steps)
    if last < first:
        return None
    length = (steps["end_ns"] - steps["start_ns"]).to_numpy()
    nodes, time = (np.concatenate(([0], np.cumsum(column[first : last + 1]))) for column in (count, length))
    many = bisect_right(range(1, len(nodes)), most, key=lambda many: int((nodes[many:] - nodes[:-many]).min()))  # more steps, more nodes
    if many < min(LEAST_STEPS, len(nodes) - 1):
        return None
    mean = length[steps["analysed"].to_numpy()].mean()
    off = np.abs((time[many:] - time[:-many]) / many - mean)
    off[nodes[many:] - nodes[:-many] > most] = np.inf
    place = first + int(np.argmin(off))
    return place, place + many - 1


def _longest_stretch(steps: pl.DataFrame) -> tuple[int, int]:
    """Return the rows that begin and end the longest stretch of analysed steps that touch; the last before the first: there is none."""
    start, end, analysed = (steps[name].to_numpy() for name in ("start_ns", "end_ns", "analysed"))
    rows = np.flatnonzero(analysed)
    if not len(rows):
        return 0, -1
    apart = np.flatnonzero((np.diff(rows) > 1) | (start[rows[1:]] != end[rows[:-1]]))
    firsts, lasts = rows[np.append(0, apart + 1)], rows[np.append(apart, len(rows) - 1)]
    longest = int(np.argmax(end[lasts] - start[firsts]))
    return int(firsts[longest]), int(lasts[longest])
