"""When each host thread works for the step, and when it only waits for another one (main in backward() while autograd's thread works)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.attribution.names import text
from gpudiag.model.graph import Ints
from gpudiag.model.trace import Trace
from gpudiag.trace.kernel_names import LOADER_MARK, OPTIMIZER_MARK, STEP_MARK

SILENT_NS = 20_000
"""A thread that shows nothing for less than this is between two ops, not waiting."""

FILLS = 0.5
"""Share of a silent stretch that another thread must fill with its work to be what was waited for: waking it takes tens of us."""

BURST_GAP_NS = 100_000
"""Events of an independent thread that are further apart than this are separate pieces of work."""


class Thread(NamedTuple):
    """What a thread shows: starts and ends of its events, each sorted, and both together."""

    starts: Ints
    ends: Ints
    edges: Ints

    def depth(self, t: Ints) -> Ints:
        """Return how many events are open at each moment."""
        found: Ints = np.searchsorted(self.starts, t, "right") - np.searchsorted(self.ends, t, "right")
        return found

    def inside(self, first: int, last: int) -> Ints:
        """Return the edges within (first, last)."""
        found: Ints = self.edges[np.searchsorted(self.edges, first, "right") : np.searchsorted(self.edges, last, "left")]
        return found


class Waits(NamedTuple):
    """The time that each thread works for the step, and who handed over to whom."""

    covered: dict[int, intervals.Spans]
    handoffs: list[tuple[int, int, int]]
    """(thread that goes on at the moment, thread that it took over from, moment in ns)."""


def activity(trace: Trace) -> dict[int, Thread]:
    """Return what each thread of `trace` shows in ops and runtime calls."""
    columns = ("thread", "start_ns", "end_ns")
    events = pl.concat([trace.ops.select(columns), trace.launches.select(columns)], rechunk=False)
    found = {}
    for thread in events["thread"].drop_nulls().unique().sort():
        rows = events.filter(pl.col("thread") == thread).drop_nulls()
        starts, ends = np.sort(rows["start_ns"].to_numpy()), np.sort(rows["end_ns"].to_numpy())
        found[int(thread)] = Thread(starts, ends, intervals.distinct(np.concatenate((starts, ends))))
    return found


def main_thread(trace: Trace, shown: dict[int, Thread], origin: int, end: int) -> int | None:
    """Return the thread that steps: that of the step's marks, else of optimizer or loader marks, else the one that is active longest.

    Of ops those of autograd's thread (with a forward thread of their own) do not speak for a thread. None: no thread shows anything.
    """
    inside = trace.marks.filter((pl.col("category") == "annotation") & (pl.col("start_ns") < end) & (pl.col("end_ns") > origin))
    inside = inside.drop_nulls("thread").with_columns(text("name"))
    for pattern in (STEP_MARK, OPTIMIZER_MARK, LOADER_MARK):
        found = inside.filter(pl.col("name").str.contains(pattern))
        if found.height:
            return int(found["thread"][0])
    backward = set(trace.ops.filter(pl.col("fwd_thread") > 0)["thread"].drop_nulls().unique().to_list())
    extents = []
    for thread, events in shown.items():
        edges = events.inside(origin - 1, end + 1)
        if len(edges):
            extents.append((thread not in backward, int(edges[-1] - edges[0]), len(edges), thread))
    return max(extents)[3] if extents else None


def find_waits(
    shown: dict[int, Thread], main: int, workers: set[int], window: tuple[int, int], collectives: dict[int, intervals.Spans] | None = None
) -> Waits:
    """Return who works when between the two moments: main throughout, but for silent stretches that other threads fill.

    A thread that took over may wait for others in turn. What `workers` do besides stands by itself, in bursts. `collectives`: those that
    host threads run (gloo); a stretch in which one goes on and ends was a wait for it.
    """
    running = collectives or {}
    covered = {main: np.array([window], dtype=np.int64)}
    handoffs: list[tuple[int, int, int]] = []
    free, queue = set(workers) - {main}, [main]
    while queue:
        thread = queue.pop(0)
        if thread not in shown:
            continue
        stretches = _stretches(shown[thread], covered[thread])
        holes = []
        for other in sorted(free & shown.keys()):
            bursts = _bursts(shown[other], stretches)
            if not len(bursts):
                continue
            covered[other] = intervals.union(bursts)
            holes.append(bursts)
            handoffs += [(other, thread, first) for first, _ in bursts.tolist()] + [(thread, other, last) for _, last in bursts.tolist()]
        for other, spans in running.items():
            waited = _waited_for(spans, stretches) if other != thread else intervals.NONE
            holes += [waited] if len(waited) else []
            handoffs += [(thread, other, last) for last in waited[:, 1].tolist()]
        if holes:
            covered[thread] = intervals.subtract(covered[thread], intervals.union(np.vstack(holes)))
        taken = {other for other in free if other in covered}
        queue += sorted(taken)
        free -= taken
    for other in sorted(set(workers) - {main}):
        spans = np.clip(running.get(other, intervals.NONE), *window)
        spans = spans[spans[:, 1] > spans[:, 0]]
        handoffs += [(other, main, first) for first in spans[:, 0].tolist() if first > window[0]]
        known = intervals.union(np.vstack((covered.get(other, intervals.NONE), spans)))
        covered[other] = _with_bursts(shown.get(other), known, window)
    return Waits(covered, handoffs)


def _stretches(events: Thread, covered: intervals.Spans) -> intervals.Spans:
    """Return the silent stretches of a thread within the time that it works for the step."""
    found = [intervals.NONE]
    for first, last in covered.tolist():
        edges = np.concatenate(([first], events.inside(first, last), [last]))
        long = np.flatnonzero(np.diff(edges) > SILENT_NS)
        found.append(np.stack((edges[long], edges[long + 1]), axis=1))
    return np.concatenate(found)


def _bursts(events: Thread, stretches: intervals.Spans) -> intervals.Spans:
    """Return the time in which a thread that shows nothing before a stretch fills it, for each stretch where it does.

    The thread may go on for a moment when the one that waited for it has been woken: its time within the stretch counts.
    """
    first, last = stretches[:, 0], stretches[:, 1]
    low, high = np.searchsorted(events.edges, first, "right"), np.searchsorted(events.edges, last, "left")
    some = np.flatnonzero(high - low >= 2)
    begin, end = events.edges[low[some]], events.edges[high[some] - 1]
    end = np.where(events.depth(last[some]) > 0, last[some], end)
    fills = (end - begin) >= FILLS * (last - first)[some]
    return np.stack((begin, end), axis=1)[fills & (events.depth(first[some]) <= 0)]


def _waited_for(spans: intervals.Spans, stretches: intervals.Spans) -> intervals.Spans:
    """Return the part of each stretch in which one of `spans` goes on that had begun before and ends within, most of it at least."""
    found = [intervals.NONE]
    for first, last in stretches.tolist():
        ends = spans[(spans[:, 0] <= first) & (spans[:, 1] > first) & (spans[:, 1] <= last), 1]
        if len(ends) and ends.max() - first >= FILLS * (last - first):
            found.append(np.array([[first, ends.max()]], dtype=np.int64))
    return np.concatenate(found)


def _with_bursts(events: Thread | None, covered: intervals.Spans, window: tuple[int, int]) -> intervals.Spans:
    """Return `covered` with the bursts of the thread that lie outside of it."""
    if events is None:
        return covered
    edges = events.inside(window[0] - 1, window[1] + 1)
    if len(covered):
        place = np.searchsorted(covered.reshape(-1), edges, "right")
        edges = edges[(place % 2 == 0) & ~np.isin(edges, covered)]
    if not len(edges):
        return covered
    far = np.diff(edges) > BURST_GAP_NS
    starts, ends = edges[np.concatenate(([True], far))], edges[np.concatenate((far, [True]))]
    bursts = np.stack((starts, np.maximum(ends, starts + 1)), axis=1)
    return intervals.union(np.vstack((covered, intervals.subtract(bursts, covered)))) if len(covered) else intervals.union(bursts)
