"""Pieces of time against pieces of time: which layer holds each instant, which key holds most of a piece."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution.intervals import Spans, find_meeting, merge_spans, sort_distinct

Ints = npt.NDArray[np.int64]

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

    def at(self, moments: Ints) -> Ints:
        """Return each moment in folded time: how much of `kept` lies before it."""
        row = np.searchsorted(self.kept[:, 0], moments, side="right")
        if not len(self.kept):
            return np.zeros(len(moments), dtype=np.int64)
        last = np.maximum(row - 1, 0)
        begun: Ints = np.minimum(moments, self.kept[last, 1]) - self.kept[last, 0]
        return np.where(row > 0, self._sums[last] + begun, 0)

    def moments(self, folded: Ints) -> Ints:
        """Return the first moment at which each folded time is reached."""
        if not len(self.kept):
            return folded
        row = np.clip(np.searchsorted(self._sums, folded, side="left") - 1, 0, len(self.kept) - 1)
        found: Ints = self.kept[row, 0] + folded - self._sums[row]
        return found

    def held(self, spans: Spans, keys: Ints) -> tuple[Spans, Ints]:
        """Return `spans` (disjoint, sorted) in folded time with their keys, without those that have no length in it."""
        folded = np.stack((self.at(spans[:, 0]), self.at(spans[:, 1])), axis=1)
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
        layer[np.searchsorted(layers[index].reshape(-1), starts, side="right") % 2 == 1] = index
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
