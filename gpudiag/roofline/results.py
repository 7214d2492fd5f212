"""Which op takes the result of a call: the next one on the same thread with a tensor of as many dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution.names import among, texts
from gpudiag.attribution.nesting import nearest
from gpudiag.model.signature import Signature

Rows = npt.NDArray[np.int64]

LOOK_AHEAD = 4
"""Ops that are looked at behind a call: nn.BatchNorm2d counts its batches (a 0-dimensional add_) before it normalises."""


def result_takers(ops: pl.DataFrame, parent: Rows, parsed: Mapping[int, Signature], names: Sequence[str]) -> Rows:
    """Return for each call of one of `names` the signature of the op that takes its result, -1 where nothing tells.

    The next op on the thread after the outermost such call, whose first tensor has the dimensions of the call's own first. None where
    that op is one of `names` again: two convolutions in a row may both read the same input.
    """
    chosen = among(ops["name"], names).to_numpy()
    signature = ops["signature"].fill_null(-1).to_numpy()
    rank = _ranks(parsed)[signature]
    rows = np.flatnonzero(chosen & (rank >= 3))
    top = nearest(parent, chosen & ~np.append(chosen, False)[parent])[rows]
    found, looking = np.full(ops.height, -1, dtype=np.int64), top
    for _ in range(LOOK_AHEAD):
        looking = next_rows(ops, looking)
        here = looking >= 0
        rows, looking = rows[here], looking[here]
        fits = rank[looking] == rank[rows]
        taken = fits & ~chosen[looking]
        found[rows[taken]] = signature[looking[taken]]
        rows, looking = rows[~fits], looking[~fits]
    return found


def _ranks(parsed: Mapping[int, Signature]) -> Rows:
    """Return the number of dimensions of each signature's first tensor; 0 for none (and, at the end, for row -1)."""
    ranks = np.zeros(max(parsed, default=-1) + 2, dtype=np.int64)
    for row, signature in parsed.items():
        first = signature.tensor(0)
        ranks[row] = len(first.shape) if first is not None else 0
    return ranks


def next_rows(ops: pl.DataFrame, rows: Rows) -> Rows:
    """Return for each row the first op of its thread that starts at or after its end, -1 where there is none (ops: by thread, start)."""
    thread, start = ops["thread"].fill_null(-1).to_numpy(), ops["start_ns"].to_numpy()
    ends = ops["end_ns"].to_numpy()[rows]
    found = np.full(len(rows), -1, dtype=np.int64)
    order = np.argsort(thread[rows], kind="stable")
    numbers, begins = np.unique(thread[rows][order], return_index=True)
    for number, chosen in zip(numbers, np.split(order, begins[1:]), strict=False):
        first, last = np.searchsorted(thread, [number, number + 1])
        place = first + np.searchsorted(start[first:last], ends[chosen], side="left")
        found[chosen] = np.where(place < last, place, -1)
    return found


def inside(ops: pl.DataFrame, parent: Rows, names: Sequence[str], inner: Sequence[str], *, last: bool) -> Rows:
    """Return for each call of one of `names` the signature of the first (or last) call of `inner` directly inside it, -1: none."""
    name = texts(ops["name"])
    recorded = ops["signature"].fill_null(-1).to_numpy()
    rows = np.flatnonzero(name.is_in(list(inner)).to_numpy() & (parent >= 0) & (recorded >= 0))
    rows = rows if last else rows[::-1]  # of equal places the last assignment stays
    found = np.full(ops.height, -1, dtype=np.int64)
    found[parent[rows]] = recorded[rows]
    return np.where(name.is_in(list(names)).to_numpy(), found, -1)
