"""Sets of time as sorted, disjoint, half-open spans: int64 arrays of shape (n, 2) in ns.

And pieces of time against pieces of time: which layer holds each instant, which key holds most of a piece.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.arrays import Bools, Ints, sort_distinct

Spans = Ints

NO_SPANS: Spans = np.empty((0, 2), dtype=np.int64)


def build_spans(frame: pl.DataFrame) -> Spans:
    """Unite the rows' [start_ns, end_ns); empty and backward rows add nothing."""
    times = [frame["start_ns"], frame["end_ns"]]
    if any(column.null_count() for column in times):
        times = frame.select("start_ns", "end_ns").drop_nulls().get_columns()
    return merge_spans(np.stack([column.to_numpy() for column in times], axis=1).astype(np.int64, copy=False))


def merge_spans(pairs: npt.NDArray[Any]) -> Spans:
    """Return the union of `pairs` (start, end), sorted and disjoint; touching spans become one."""
    lasting = pairs[:, 1] > pairs[:, 0]
    if not lasting.all():
        pairs = pairs[lasting]
    if not len(pairs):
        return NO_SPANS
    if (pairs[1:, 0] < pairs[:-1, 0]).any():
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    reached = np.maximum.accumulate(pairs[:, 1])
    first = np.concatenate(([True], pairs[1:, 0] > reached[:-1]))
    last = np.concatenate((first[1:], [True]))
    spans: Spans = np.stack((pairs[first, 0], reached[last]), axis=1).astype(np.int64, copy=False)
    return spans


def measure_spans(spans: Spans) -> int:
    """Measure the length of `spans` in ns."""
    return int((spans[:, 1] - spans[:, 0]).sum())


def measure_covered(spans: Spans, starts: Ints, ends: Ints) -> Ints:
    """Return how many ns of each [start, end) lie within `spans`."""
    inside: Ints = np.maximum(_measure_before(spans, ends) - _measure_before(spans, starts), 0)
    return inside


def measure_overlap(a: Spans, b: Spans) -> int:
    """Measure the length of the intersection of `a` and `b` in ns."""
    return int(measure_covered(a, b[:, 0], b[:, 1]).sum())


def _measure_before(spans: Spans, t: Ints) -> Ints:
    if not len(spans):
        return np.zeros(len(t), dtype=np.int64)
    sums = np.concatenate(([0], np.cumsum(spans[:, 1] - spans[:, 0])))
    index = np.searchsorted(spans[:, 0], t, side="right")
    inside = np.where(index > 0, np.maximum(spans[np.maximum(index - 1, 0), 1] - t, 0), 0)
    result: Ints = sums[index] - inside
    return result


def find_inside(spans: Spans, t: Ints) -> Bools:
    """Find for each moment of `t` whether a span contains it (spans are disjoint and do not touch)."""
    result: Bools = np.searchsorted(spans.reshape(-1), t, side="right") % 2 == 1
    return result


def find_meeting(spans: Spans, bounds: Spans) -> Bools:
    """Find which of `spans` share time with one of `bounds` (sorted, disjoint)."""
    if not len(bounds):
        return np.zeros(len(spans), dtype=bool)
    after = np.searchsorted(bounds[:, 1], spans[:, 0], side="right")
    found: Bools = (after < len(bounds)) & (bounds[np.minimum(after, len(bounds) - 1), 0] < spans[:, 1])
    return found


def subtract_spans(a: Spans, b: Spans) -> Spans:
    """Return the time of `a` that `b` does not cover."""
    edges = sort_distinct(np.concatenate((a.reshape(-1), b.reshape(-1))))
    if len(edges) < 2:
        return NO_SPANS
    pieces = np.stack((edges[:-1], edges[1:]), axis=1)
    return merge_spans(pieces[find_inside(a, edges[:-1]) & ~find_inside(b, edges[:-1])])


def partition_window(window: Spans, layers: list[Spans]) -> list[int]:
    """Return the ns of `window` that each layer holds, an earlier layer taking precedence, and last what none holds.

    The results sum to total(window) exactly: every piece between two edges is counted once, in integers.
    """
    edges = sort_distinct(np.concatenate([window.reshape(-1), *(layer.reshape(-1) for layer in layers)]))
    if len(edges) < 2:
        return [0] * (len(layers) + 1)
    starts, lengths = edges[:-1], np.diff(edges)
    free = find_inside(window, starts)
    sums = []
    for layer in layers:
        held = free & find_inside(layer, starts)
        sums.append(int(lengths[held].sum()))
        free &= ~held
    return [*sums, int(lengths[free].sum())]


AT_ONCE = 16_384
"""Pieces that are asked about at a time: what is made on the way grows with all that they hold."""


class LayeredPieces(NamedTuple):
    """Pieces that fill the bounds they were cut from."""

    row: Ints
    """Row of the bounds."""
    start: Ints
    end: Ints
    layer: Ints
    """Index of the layer that holds the piece; the number of layers where none does."""


class FoldedTime:
    """Time with nothing but `kept` (a union) in it: what lies between its spans has no length."""

    def __init__(self, kept: Spans) -> None:
        self.kept = kept
        self._sums = np.concatenate(([0], np.cumsum(kept[:, 1] - kept[:, 0])))

    def fold(self, moments: Ints) -> Ints:
        """Return each moment in folded time: how much of `kept` lies before it."""
        return _measure_before(self.kept, moments)

    def unfold(self, folded: Ints) -> Ints:
        """Return the first moment at which each folded time is reached."""
        if not len(self.kept):
            return folded
        row = np.clip(np.searchsorted(self._sums, folded, side="left") - 1, 0, len(self.kept) - 1)
        found: Ints = self.kept[row, 0] + folded - self._sums[row]
        return found

    def fold_spans(self, spans: Spans, keys: Ints) -> tuple[Spans, Ints]:
        """Return `spans` (disjoint, sorted) in folded time with their keys, without those that have no length in it."""
        folded = np.stack((self.fold(spans[:, 0]), self.fold(spans[:, 1])), axis=1)
        lasting = folded[:, 1] > folded[:, 0]
        return folded[lasting], keys[lasting]


def cut_by_layer(bounds: Spans, layers: list[Spans]) -> LayeredPieces:
    """Return `bounds` (sorted, disjoint) cut into pieces by the first of `layers` (each a union) that holds each instant."""
    edges = sort_distinct(np.concatenate([bounds.reshape(-1), *(layer[find_meeting(layer, bounds)].reshape(-1) for layer in layers)]))
    starts, ends = edges[:-1], edges[1:]
    row = np.searchsorted(bounds[:, 0], starts, side="right") - 1
    inside = (row >= 0) & (starts < bounds[np.maximum(row, 0), 1]) if len(bounds) else np.zeros(len(starts), dtype=bool)
    row, starts, ends = row[inside], starts[inside], ends[inside]
    layer = np.full(len(starts), len(layers), dtype=np.int64)
    for index in range(len(layers) - 1, -1, -1):
        layer[find_inside(layers[index], starts)] = index
    if not len(row):
        return LayeredPieces(row, starts, ends, layer)
    apart = (row[1:] != row[:-1]) | (layer[1:] != layer[:-1]) | (starts[1:] != ends[:-1])
    first, last = np.concatenate(([True], apart)), np.concatenate((apart, [True]))
    return LayeredPieces(row[first], starts[first], ends[last], layer[first])


def find_outermost(start: Ints, end: Ints) -> tuple[Spans, Ints]:
    """Return (disjoint spans, row of each): of rows that overlap, the one that began first (then the longest) has the time."""
    order = np.lexsort((-end, start))
    first, last = start[order], end[order]
    reached = np.maximum.accumulate(np.concatenate(([np.iinfo(np.int64).min], last[:-1]))) if len(last) else last
    spans = np.stack((np.maximum(first, reached), last), axis=1)
    kept = spans[:, 1] > spans[:, 0]
    return spans[kept], order[kept]


def find_most_held(start: Ints, end: Ints, spans: Spans, keys: Ints) -> tuple[Ints, Ints]:
    """Return (key, ns): which of `keys` holds most of each [start, end), -1 and 0 where none does. `spans`: disjoint, sorted."""
    if len(start) > AT_ONCE:
        blocks = [slice(begin, begin + AT_ONCE) for begin in range(0, len(start), AT_ONCE)]
        parts = [find_most_held(start[block], end[block], spans, keys) for block in blocks]
        return np.concatenate([part for part, _ in parts]), np.concatenate([time for _, time in parts])
    key, held = np.full(len(start), -1, dtype=np.int64), np.zeros(len(start), dtype=np.int64)
    first = np.searchsorted(spans[:, 1], start, side="right")
    count = np.maximum(np.searchsorted(spans[:, 0], end, side="left") - first, 0)
    row = np.repeat(np.arange(len(start)), count)
    if not len(row):
        return key, held
    span = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    time = np.minimum(end[row], spans[span, 1]) - np.maximum(start[row], spans[span, 0])
    order = np.lexsort((keys[span], row))
    row, found, time = row[order], keys[span][order], time[order]
    begin = np.flatnonzero(np.concatenate(([True], (row[1:] != row[:-1]) | (found[1:] != found[:-1]))))
    sums = np.add.reduceat(time, begin)
    row, found = row[begin], found[begin]
    best = np.lexsort((sums, row))  # the last of each row is its largest
    chosen = best[np.flatnonzero(np.concatenate((row[best][1:] != row[best][:-1], [True])))]
    key[row[chosen]], held[row[chosen]] = found[chosen], sums[chosen]
    return key, held


def fill_pauses(spans: Spans, close: int) -> Spans:
    """Return `spans` (a union) with the pauses of at most `close` ns between them filled."""
    if len(spans) < 2:
        return spans
    pauses = np.stack((spans[:-1, 1], spans[1:, 0]), axis=1)
    return merge_spans(np.concatenate((spans, pauses[pauses[:, 1] - pauses[:, 0] <= close])))


def select_rows(frame: pl.DataFrame, rows: pl.Series) -> pl.DataFrame:
    """Return the rows of `frame` with these numbers; a null number gives a row of nulls."""
    return frame.select(pl.all().gather(rows))
