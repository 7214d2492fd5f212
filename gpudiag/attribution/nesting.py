"""Which op encloses which: nesting by time on each thread. Kineto's External id is not used (in a third of real files it is only the
correlation id again); enclosure in time agreed with sound ids in all of 50,000 launches that were compared."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.arrays import Bools, Ints, split_groups
from gpudiag.attribution import intervals
from gpudiag.attribution.intervals import Spans

Rows = npt.NDArray[np.integer[Any]]
"""Row numbers of any integer type, -1: none."""

FEW_ROWS = 64
"""A stack is faster than columns for fewer rows than this (measured)."""

MAX_LEVELS = 32
"""Levels up to which an op is looked for one at a time: few launches stand deeper than the op that is open at their end."""

BLOCK_ROWS = 16_384
"""Rows that are sorted at once where they share no op with others: their columns fit the second-level cache (measured)."""


class Nesting(NamedTuple):
    """The tree of the ops (rows sorted by thread, start, -end)."""

    parent: Rows
    """Row of the enclosing op, -1 at the top."""
    end_ns: Ints
    """End of each op, cut to its parent's: clock noise lets children end a little late."""
    thread: Ints
    start_ns: Ints


def nest(ops: pl.DataFrame) -> Nesting:
    """Return the nesting of `ops`, by thread: in columns where ops end within their parents (but for noise), else with a stack."""
    threads, starts = ops["thread"].fill_null(-1).to_numpy(), ops["start_ns"].to_numpy()
    known = ends = ops["end_ns"].to_numpy()  # copied only where an end is cut: of millions of frames few need that
    parents = np.full(len(starts), -1, dtype=np.int64)
    for begin, stop in _split_threads(threads):
        # parts of one thread that share no op: those that fit the processor's cache are sorted several times as fast, in little memory
        blocks: Iterable[tuple[int, int]] = [(begin, stop)]
        one_thread = threads[stop - 1] == threads[begin]
        if stop - begin > BLOCK_ROWS and one_thread and not (starts[begin + 1 : stop] < starts[begin : stop - 1]).any():
            alone = np.flatnonzero(starts[begin + 1 : stop] >= np.maximum.accumulate(known[begin : stop - 1])) + begin + 1
            blocks = _group_blocks(alone, begin, stop)
        for first, last in blocks:
            rows = slice(first, last)
            found = _nest_in_columns(starts[rows], known[rows]) if one_thread else None
            own, cut = found or _nest_with_stack(threads[rows].tolist(), starts[rows].tolist(), known[rows].tolist())
            if not np.array_equal(cut, known[rows]):
                ends = known.copy() if ends is known else ends
                ends[rows] = cut
            parents[rows] = np.where(own < 0, -1, own + first)
    return Nesting(parents, ends, threads, starts)


def _group_blocks(borders: Ints, first: int, last: int) -> Iterable[tuple[int, int]]:
    """Return [first, last) in parts that begin at some of `borders` (in order), of about BLOCK_ROWS rows where these allow it."""
    wanted = np.searchsorted(borders, np.arange(first + BLOCK_ROWS, last, BLOCK_ROWS))
    return itertools.pairwise([first, *borders[np.unique(wanted[wanted < len(borders)])].tolist(), last])


def _nest_in_columns(starts: Ints, ends: Ints) -> tuple[Ints, Ints] | None:
    """Return (parent of each row of one thread, -1: none; ends cut to the parent's); None where noise does not explain late ends, and for
    few rows.

    The depth of a row is the number of rows before it that are still open, its parent the last row before it that is one less deep. Up
    to the first row that ends too late both hold; where nothing begins between the parent's end and its own they hold beyond it too.
    """
    if len(starts) < FEW_ROWS or (starts[1:] < starts[:-1]).any():
        return None
    lasting = ends > starts  # nothing lies within an op that takes no time
    depth = np.cumsum(lasting) - lasting - np.searchsorted(np.sort(ends[lasting]), starts, side="right")
    rows = np.flatnonzero(lasting)
    rows = rows[np.argsort(depth[rows].astype(np.min_scalar_type(int(depth.max()))), kind="stable")]  # radix sort for small types
    inner = np.flatnonzero(depth > 0)
    stride = len(starts)
    keys = depth[rows] * stride + rows
    above = rows[np.searchsorted(keys, (depth[inner] - 1) * stride + inner) - 1] if len(inner) else inner
    parents = np.full(stride, -1, dtype=np.int64)
    parents[inner] = above
    if not (ends[inner] > ends[above]).any():
        return parents, ends
    # the least end of each row and all above it, by doubling the jumps (see find_nearest)
    top = len(parents)
    jump, least = np.append(np.where(parents < 0, top, parents), top), np.append(ends, np.iinfo(np.int64).max)
    while (jump != top).any():
        least, jump = np.minimum(least, least[jump]), jump[jump]
    cut = least[:-1]
    # it is noise where nothing begins in what was cut off the ends, and every row keeps some of its time: then each lies where it did
    late = np.flatnonzero(cut != ends)
    begun = np.searchsorted(starts, ends[late]) - np.searchsorted(starts, cut[late])
    return (parents, cut) if (cut[late] > starts[late]).all() and not begun.any() else None


def _nest_with_stack(threads: list[int], starts: list[int], ends: list[int]) -> tuple[Ints, Ints]:
    """Return (parents, ends cut to the parent's), in one pass with a stack of the open rows of the thread."""
    parents, stack, thread = [-1] * len(starts), list[int](), None
    for row, (own_thread, start) in enumerate(zip(threads, starts, strict=True)):
        if own_thread != thread:
            thread = own_thread
            stack.clear()
        while stack and ends[stack[-1]] <= start:
            stack.pop()
        if stack:
            parents[row] = stack[-1]
            ends[row] = min(ends[row], ends[stack[-1]])
        stack.append(row)
    return np.array(parents, dtype=np.int64), np.array(ends, dtype=np.int64)


def find_innermost(nesting: Nesting, threads: Ints, times: Ints) -> Ints:
    """Find for each (thread, time) the row of the innermost open op, -1 where none is.

    The end counts as inside: whole-microsecond schemas cut an op's end below the start of its last launch.
    """
    last_started = np.full(len(times), -1, dtype=np.int64)
    for thread, chosen in split_groups(threads):  # no pass over all times per thread
        first, last = np.searchsorted(nesting.thread, [thread, thread + 1])
        rows = first + np.searchsorted(nesting.start_ns[first:last], times[chosen], side="right") - 1
        last_started[chosen] = np.where(rows >= first, rows, -1)
    # For each of `rows` (-1: none) the first row at or above it that ends at its limit or later, -1 where there is none. By binary
    # lifting: ends never fall on the way up, so halving jumps find it. A file may nest ops as deep as it is long, and one level at a time
    # would then take its square
    found: Ints = last_started.copy()
    climbing = np.flatnonzero(last_started >= 0)
    for _ in range(MAX_LEVELS):  # the rows that still climb get few soon
        climbing = climbing[nesting.end_ns[found[climbing]] < times[climbing]]
        found[climbing] = nesting.parent[found[climbing]]
        climbing = climbing[found[climbing] >= 0]
    climbing = climbing[nesting.end_ns[found[climbing]] < times[climbing]]
    if len(climbing):  # far to go
        top, limits = len(nesting.parent), times[climbing]
        ends = np.append(nesting.end_ns, np.iinfo(np.int64).max)
        jumps = [np.append(np.where(nesting.parent < 0, top, nesting.parent), top)]
        while (jumps[-1] != top).any():
            jumps.append(jumps[-1][jumps[-1]])
        rows = found[climbing]
        for jump in reversed(jumps):
            further = jump[rows]
            rows = np.where(ends[further] < limits, further, rows)
        rows = jumps[0][rows]
        found[climbing] = np.where(rows == top, -1, rows)
    return found


def null_missing(rows: npt.NDArray[np.integer[Any]], name: str = "") -> pl.Series:
    """Return row numbers as a column called `name`, -1 (none) as null."""
    return pl.Series(name, rows, dtype=pl.Int64).set(pl.Series(rows < 0), None)


def mark_ancestors(parent: Rows, rows: Rows) -> Bools:
    """Return which rows are one of `rows` (-1: none) or lie around one of them. Each row is entered once."""
    reached, place = np.zeros(len(parent), dtype=np.bool_), np.empty(len(parent), dtype=np.int64)
    rows = rows[rows >= 0]
    while rows.size:
        number = np.arange(rows.size)
        place[rows] = number  # of equal rows one stays: a sort would take most of the time here
        rows = rows[place[rows] == number]
        reached[rows] = True
        rows = parent[rows]
        rows = rows[rows >= 0]
        rows = rows[~reached[rows]]
    return reached


def find_nearest(parent: Rows, wanted: Bools) -> Ints:
    """Find for each row the first `wanted` row at or above it, -1 where there is none.

    By doubling the jumps: a file may nest ops as deep as it is long, and one level at a time would then take its square.
    """
    found: Ints = find_nearest_narrow(parent, wanted).astype(np.int64)
    return found


def find_nearest_narrow(parent: Rows, wanted: Bools) -> Rows:
    """Return `find_nearest` in the type that takes least memory."""
    top = len(parent)
    narrow = np.dtype(np.int32 if top < np.iinfo(np.int32).max else np.int64)  # half the memory of millions of frames
    if not top:
        return np.empty(0, dtype=narrow)  # numpy 2.4 may crash where nothing is copied from an empty column of polars
    jump = np.full(top + 1, top, dtype=narrow)
    np.copyto(jump[:-1], parent, where=parent >= 0, casting="same_kind")
    np.copyto(jump[:-1], np.arange(top, dtype=narrow), where=wanted)
    while not np.array_equal(jump, further := jump[jump]):
        jump = further
    found: Rows = further[:-1]
    found[found == top] = -1
    return found


def measure_self_ns(nesting: Nesting) -> Ints:
    """Measure the time of each op outside its children, in ns."""
    length = nesting.end_ns - nesting.start_ns
    inner = np.zeros(len(length), dtype=np.int64)
    child = nesting.parent >= 0
    np.add.at(inner, nesting.parent[child], length[child])
    result: Ints = length - inner
    return result


def find_self_spans(nesting: Nesting, within: Spans | None = None) -> tuple[Ints, Ints]:
    """Return (rows, spans): the pieces of time in which each op was the innermost one of its thread; a row may occur several times.

    `within`: only the pieces that meet these spans.
    """
    found = [(np.empty(0, dtype=np.int64), np.empty((0, 2), dtype=np.int64))]
    for first, last in _split_threads(nesting.thread):
        starts = nesting.start_ns[first:last]
        blocks: Iterable[tuple[int, int]] = [(first, last)]
        one_thread = nesting.thread[first] == nesting.thread[last - 1]
        if last - first > BLOCK_ROWS and one_thread and not (starts[1:] < starts[:-1]).any():  # parts that share no op
            blocks = _group_blocks(np.flatnonzero(nesting.parent[first + 1 : last] < 0) + first + 1, first, last)
        for block in blocks:
            rows, spans = _cut_self_spans(nesting, *block)
            near = slice(None) if within is None else intervals.find_meeting(spans, within)
            found.append((rows[near], spans[near]))
    return np.concatenate([rows for rows, _ in found]), np.concatenate([spans for _, spans in found])


def _cut_self_spans(nesting: Nesting, first: int, last: int) -> tuple[Ints, Ints]:
    """Cut the spans of some rows that hold whole threads.

    From the last edge of a moment on that op is the innermost which begins there, else the parent of the outermost one that ends there;
    pieces without one are left out.
    """
    starts, ends, threads = nesting.start_ns[first:last], nesting.end_ns[first:last], nesting.thread[first:last]
    lasting = np.flatnonzero(ends > starts)
    edges = np.concatenate((ends[::-1], starts[lasting]))  # of ends at one moment the outermost stands last, then come the starts
    holder: Ints = np.concatenate((nesting.parent[first:last][::-1], first + lasting))
    several = bool((threads != threads[0]).any())
    threads = np.concatenate((threads[::-1], threads[lasting]))
    order = np.lexsort((edges, threads)) if several else np.argsort(edges, kind="stable")
    holder, edges = holder[order], edges[order]
    held = (edges[1:] > edges[:-1]) & (holder[:-1] >= 0)
    if several:
        held &= threads[order[1:]] == threads[order[:-1]]
    busy = np.flatnonzero(held)
    return holder[busy], np.stack((edges[busy], edges[busy + 1]), axis=1)


def _split_threads(threads: Ints) -> Iterable[tuple[int, int]]:
    """Return (first row, row after the last) of the rows of each thread; of all at once where threads have few rows or are mixed."""
    begins = np.flatnonzero(threads[1:] != threads[:-1]) + 1
    mixed = len(begins) * FEW_ROWS > len(threads) or bool((threads[1:] < threads[:-1]).any())
    return itertools.pairwise([0, *([] if mixed else begins.tolist()), len(threads)] if len(threads) else [])
