"""Which forward op each op of a repeated forward (activation checkpointing) repeats: for threads that recorded no shapes.

Autograd runs a repeated forward within the node that needs it. That node is paired with its forward op: the custom function whose region
is repeated (re-entrant checkpointing), or the last op of the region that keeps a tensor, with which the repetition ends
(torch/utils/checkpoint.py, _StopRecomputationError). So the place in the forward is known, and the ops must have the same names in the
same order there; else nothing is said.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution.names import contains
from gpudiag.attribution.nesting import nearest
from gpudiag.attribution.pairing import Pairs
from gpudiag.attribution.recompute import WITHOUT_INPUT, autograd_nodes

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_LATER = 8
"""Ops that a repetition may hold behind the op of its node: those that ran before the last tensor was kept."""


def forward_of_repeated(ops: pl.DataFrame, pairs: Pairs, compared: Mask) -> Rows:
    """Return for each repeated op of `ops` the row of the forward op that it repeats, -1 where that is not known.

    `compared`: the ops whose names must agree, and which are answered for (those that do work in either grad mode).
    """
    found = np.full(ops.height, -1, dtype=np.int64)
    parent, again = ops["parent"].fill_null(-1).to_numpy(), ops["recompute"].to_numpy()
    around = nearest(parent, autograd_nodes(ops))
    compared = compared & ~contains(ops["name"], WITHOUT_INPUT).to_numpy()  # these are not known to be repeated
    rows = np.flatnonzero(again & compared & (around >= 0))
    forward = np.flatnonzero(~again & compared & (around < 0))
    if not len(rows) or not len(forward):
        return found
    names, threads = ops["name"].to_physical().to_numpy(), ops["thread"].fill_null(-1).to_numpy()
    rows = rows[np.argsort(around[rows], kind="stable")]
    nodes, begins = np.unique(around[rows], return_index=True)
    for node, block in zip(nodes.tolist(), np.split(rows, begins[1:]), strict=True):
        origin = int(pairs.forward[node])
        if origin >= 0:
            window = _window(_of_thread(forward, threads, origin), names, names[block], origin, _after(ops, threads, origin))
            found[block] = window if len(window) else -1
    return found


def _of_thread(rows: Rows, threads: Rows, row: int) -> Rows:
    first, last = np.searchsorted(threads[rows], [threads[row], threads[row] + 1])
    return rows[first:last]


def _after(ops: pl.DataFrame, threads: Rows, row: int) -> int:
    """Return the first row behind all ops inside op `row`: rows stand by thread and start."""
    first, last = np.searchsorted(threads, [threads[row], threads[row] + 1])
    return max(int(first + np.searchsorted(ops["start_ns"].to_numpy()[first:last], ops["end_ns"][row], side="left")), row + 1)


def _window(forward: Rows, names: Rows, wanted: Rows, origin: int, after: int) -> Rows:
    """Return the rows of `forward` that the names `wanted` repeat: all from `origin` to before `after`, or those that end with it.

    Empty where the names differ.
    """
    begin, end = np.searchsorted(forward, [origin, after])
    if end - begin >= len(wanted):
        ends = [end] if end - begin == len(wanted) else []
    else:
        ends = [end + later for later in range(_LATER) if end + later <= len(forward)]
    for stop in ends:
        window = forward[max(stop - len(wanted), 0) : stop]
        if len(window) == len(wanted) and np.array_equal(names[window], wanted):
            return window
    return forward[:0]
