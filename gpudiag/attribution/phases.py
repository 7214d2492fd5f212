"""The phase of each op where the recording tells it: data, optimizer, backward, forward; null elsewhere."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.attribution.nesting import Nesting, nearest
from gpudiag.attribution.recompute import autograd_nodes
from gpudiag.model.trace import Trace
from gpudiag.trace import kernel_names

Mask = npt.NDArray[np.bool_]


def phases(trace: Trace, nesting: Nesting) -> pl.Series:
    """Return the column `phase` for the ops.

    data and optimizer: inside such a mark on the same thread; backward: under an autograd node; forward: any other op with an
    autograd sequence number of its own, and what it encloses.
    """
    backward = _with_descendants(autograd_nodes(trace.ops), nesting)
    forward = _with_descendants(trace.ops["sequence"].is_not_null().to_numpy(), nesting) & ~backward
    optimizer = _inside(trace, kernel_names.OPTIMIZER_MARK, nesting)
    data = _inside(trace, kernel_names.LOADER_MARK, nesting)
    chosen = np.select([data, optimizer, backward, forward], [0, 1, 2, 3], -1)
    words = pl.Series(["data", "optimizer", "backward", "forward"], dtype=pl.String)
    return words.gather(pl.Series(chosen).replace(-1, None)).alias("phase")


def _with_descendants(seed: Mask, nesting: Nesting) -> Mask:
    """Return `seed` and every op below one of its rows."""
    below: Mask = nearest(nesting.parent, seed) >= 0
    return below


def _inside(trace: Trace, pattern: str, nesting: Nesting) -> Mask:
    """Return which ops begin inside a mark that matches `pattern` on their own thread."""
    marks = trace.marks.filter(pl.col("name").cast(pl.String).str.contains(pattern) & pl.col("thread").is_not_null())
    found = np.zeros(len(nesting.start_ns), dtype=bool)
    for (thread,), rows in marks.group_by("thread"):
        own = slice(*np.searchsorted(nesting.thread, [thread, thread + 1]))
        times = nesting.start_ns[own]
        found[own] = intervals.covered(intervals.of(rows), times, times + 1) > 0
    return found
