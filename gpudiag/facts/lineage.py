"""Which call that the user wrote each kernel comes from, in the forward pass and through autograd in the backward pass."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution.names import contains
from gpudiag.attribution.pairing import pair
from gpudiag.facts.window import Window

Rows = npt.NDArray[np.int64]


class Lineage:
    """For the ops of one window: the outermost ATen op around each (its root), and the forward op of each autograd node."""

    def __init__(self, window: Window) -> None:
        ops = window.analysis.trace.ops
        self._ops = ops
        self.parent: Rows = ops["parent"].fill_null(-1).to_numpy().astype(np.int64)
        aten = contains(ops["name"], "^aten::").fill_null(False).to_numpy()
        self.root: Rows = _outermost(self.parent, aten)

    def root_of(self, calls: pl.Series) -> pl.Series:
        """Return the root of each op row of `calls` (null: none)."""
        rows = calls.fill_null(-1).to_numpy().astype(np.int64)
        found = np.where(rows >= 0, self.root[rows], -1) if self.root.size else np.full(rows.size, -1, dtype=np.int64)
        rooted: pl.Series = pl.Series("root", found, dtype=pl.Int64).replace(-1, None)
        return rooted

    def with_group(self, work: pl.DataFrame, group_of_op: Rows) -> pl.DataFrame:
        """Return `work` with column group: the group of its root, else of the forward op whose backward it is part of; null: neither.

        `group_of_op`: the group of each row of ops by its root, -1 for none.
        """
        if not self.root.size:
            return work.with_columns(group=pl.lit(None, dtype=pl.Int64))
        forward = pair(self._ops).forward
        of_node = np.where(forward >= 0, group_of_op[self.root[np.maximum(forward, 0)]], -1)
        node = _nearest(self.parent, forward >= 0)
        own = group_of_op[self.root]
        both = np.where(own >= 0, own, np.where(node >= 0, of_node[np.maximum(node, 0)], -1))
        rows = work["call"].fill_null(-1).to_numpy().astype(np.int64)
        group = np.where(rows >= 0, both[np.maximum(rows, 0)], -1)
        return work.with_columns(pl.Series("group", group, dtype=pl.Int64).replace(-1, None))


def _outermost(parent: Rows, aten: npt.NDArray[np.bool_]) -> Rows:
    """Return for each op the outermost op of an unbroken line of ATen ops around it (itself where its parent is none)."""
    above = np.where((parent >= 0) & aten[np.maximum(parent, 0)] & aten, parent, np.arange(parent.size))
    while True:
        higher = above[above]
        if np.array_equal(higher, above):
            return above
        above = higher


def _nearest(parent: Rows, wanted: npt.NDArray[np.bool_]) -> Rows:
    """Return for each op the nearest op around it (or itself) that is `wanted`, -1 where there is none."""
    found = np.where(wanted, np.arange(parent.size), -1)
    above = parent.copy()
    while True:
        open_rows = (found < 0) & (above >= 0)
        if not open_rows.any():
            return found
        here = above[open_rows]
        found[open_rows] = np.where(wanted[here], here, -1)
        above[open_rows] = parent[here]
