"""What belongs to an event of the time line: the call that launched a kernel, the backward op of a forward one."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import polars as pl

from gpudiag.arrays import Ints
from gpudiag.model.analysis import Analysis

MOST_LINKS = 24
"""Of one kind for one event: more arrows than these cannot be told apart."""

Event = tuple[str, int]
"""Table and row."""


class EventLink(NamedTuple):
    """One event that leads to another."""

    kind: Literal["launch", "backward"]
    source: Event
    target: Event


def find_links(analysis: Analysis, forward: Ints, table: str, row: int) -> tuple[EventLink, ...]:
    """Return what leads to or from a row of `table`: call -> kernel, forward op -> backward op.

    `forward`: for each op the forward op that it belongs to, -1: none (attribution.autograd).
    """
    found = _find_launches(analysis, table, row)
    op = _find_op(analysis, table, row)
    return (*found, *([] if op is None else _find_backward(analysis, forward, op)))


def _find_launches(analysis: Analysis, table: str, row: int) -> list[EventLink]:
    kernels = analysis.trace.kernels
    column = {"kernels": "id", "launches": "launch", "ops": "op"}.get(table)
    if column is None:
        return []
    chosen = kernels.select(((pl.col(column) == row) & pl.col("launch").is_not_null()).fill_null(False)).to_series()
    work = kernels.select("id", "launch").filter(chosen).head(MOST_LINKS)
    pairs = zip(work["launch"].to_list(), work["id"].to_list(), strict=True)
    return [EventLink("launch", ("launches", launch), ("kernels", kernel)) for launch, kernel in pairs]


def _find_op(analysis: Analysis, table: str, row: int) -> int | None:
    """Return the op that an event is, or is of."""
    if table == "ops":
        return row
    columns = {"kernels": ("owner", "op"), "launches": ("op",)}.get(table, ())
    values = (getattr(analysis.trace, table)[column][row] for column in columns)
    return next((int(value) for value in values if value is not None), None)


def _find_backward(analysis: Analysis, forward: Ints, op: int) -> list[EventLink]:
    """Return forward op -> backward op: of the nearest node around `op`, else of the forward ops around and in it."""
    ops = analysis.trace.ops
    around = _list_enclosing(ops, op)
    node = next((one for one in around if forward[one] >= 0), None)
    if node is not None:
        return [EventLink("backward", ("ops", int(forward[node])), ("ops", node))]
    start, end, thread = (ops[name][op] for name in ("start_ns", "end_ns", "thread"))
    nodes = np.flatnonzero(forward >= 0)
    origins = ops.select("start_ns", "end_ns", "thread")[forward[nodes]]
    within = (pl.col("start_ns") >= start) & (pl.col("end_ns") <= end) & (pl.col("thread") == thread)
    inside = origins.select(within.fill_null(False)).to_series().to_numpy()
    chosen = nodes[inside | np.isin(forward[nodes], around)]
    chosen = chosen[~np.isin(ops["parent"].fill_null(-1).to_numpy()[chosen], chosen)]  # a node is recorded with the engine's call around it
    return [EventLink("backward", ("ops", int(forward[one])), ("ops", int(one))) for one in chosen[:MOST_LINKS]]


def _list_enclosing(ops: pl.DataFrame, op: int) -> list[int]:
    """Return `op` and the ops around it, the innermost first."""
    found, parent = [], ops["parent"]
    row: int | None = op
    while row is not None and row not in found:
        found.append(row)
        row = parent[row]
    return found
