"""Which op call carries the cost of each kernel, and what that call costs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.model.cost import Cost
from gpudiag.model.finding import Missing
from gpudiag.model.signature import Signature, parse_signature
from gpudiag.model.trace import Trace
from gpudiag.roofline.costs import cost_of, is_modelled, kind_of

Rows = npt.NDArray[np.int64]


class Owners(NamedTuple):
    """The owner of each kernel and the cost of each distinct owning call."""

    owner: Rows
    """Row of ops per kernel, -1 where no op with shapes is around the launch."""
    call: Rows
    """Row of `costs` per kernel, -1 where there is no owner."""
    costs: tuple[Cost | Missing, ...]
    """One for each distinct (name, signature) that owns a kernel."""
    names: tuple[str, ...]
    """Op name of each row of `costs`."""


def signatures(trace: Trace) -> dict[int, Signature]:
    """Return the parsed signatures by id: each distinct text once."""
    rows = trace.signatures.select("id", "shapes", "dtypes", "strides", "args").iter_rows()
    return {row: parse_signature(shapes, dtypes, strides, args) for row, shapes, dtypes, strides, args in rows}


def find_owners(trace: Trace, *, on_cpu: bool) -> Owners:
    """Return owners and costs of the kernels of `trace` (stage 'link'); collectives, copies, memsets and graph replays have none."""
    kernels = trace.kernels
    free = kernels["kind"].is_in(["kernel", "cpu"]).to_numpy() & ~(kernels["collective"] | kernels["replay"]).to_numpy()
    start = np.where(free, kernels["op"].fill_null(-1).to_numpy(), -1)
    owner = _owner_rows(trace, start)
    return _costs(trace, owner, on_cpu=on_cpu)


def _owner_rows(trace: Trace, start: Rows) -> Rows:
    """Return the innermost op with a formula around each start op; else the innermost wrapper; else the start op or its parent.

    The last is for kernels whose innermost op has no shapes though its parent has (record_param_comms, compiled regions of old torch).
    """
    ops = trace.ops
    parent = ops["parent"].fill_null(-1).to_numpy()
    shaped = ops["signature"].is_not_null().to_numpy()
    names = ops["name"].to_physical().to_numpy()
    words = ops["name"].cast(pl.String)
    kinds = {code: _grade(word) for code, word in zip(*_distinct(names, words), strict=True)}
    grade = np.array([kinds[code] for code in names.tolist()], dtype=np.int8) if len(names) else np.empty(0, dtype=np.int8)
    owner = _climb(start, parent, shaped & (grade == _WORK))
    for wanted in (_WRAPPER,):
        open_rows = owner < 0
        owner[open_rows] = _climb(start[open_rows], parent, shaped & (grade == wanted))
    open_rows = owner < 0
    owner[open_rows] = _nearest(start[open_rows], parent, shaped & (grade == _OTHER))
    return owner


_WORK, _WRAPPER, _OTHER, _NEVER = 0, 1, 2, 3


def _grade(name: str) -> int:
    if is_modelled(name):
        return _WORK
    return {"wrapper": _WRAPPER, None: _OTHER}.get(kind_of(name), _NEVER)


def _distinct(codes: npt.NDArray[np.uint32], words: pl.Series) -> tuple[list[int], list[str]]:
    unique, first = np.unique(codes, return_index=True)
    return unique.tolist(), words.gather(first).to_list()


def _climb(start: Rows, parent: Rows, wanted: npt.NDArray[np.bool_]) -> Rows:
    """Return the first row at or above each start row that is `wanted`, -1 where there is none."""
    found: Rows = start.copy()
    while True:
        on = (found >= 0) & ~wanted[np.maximum(found, 0)] if len(wanted) else np.zeros(len(found), dtype=bool)
        if not on.any():
            return found
        found[on] = parent[found[on]]


def _nearest(start: Rows, parent: Rows, wanted: npt.NDArray[np.bool_]) -> Rows:
    """Return the start row or else its parent where `wanted`, else -1."""
    if not len(wanted):
        return np.full(len(start), -1, dtype=np.int64)
    own = (start >= 0) & wanted[np.maximum(start, 0)]
    above = np.where(start >= 0, parent[np.maximum(start, 0)], -1)
    over = (above >= 0) & wanted[np.maximum(above, 0)]
    return np.where(own, start, np.where(over, above, -1))


def _costs(trace: Trace, owner: Rows, *, on_cpu: bool) -> Owners:
    """Return `owner` with one cost for each distinct (name, signature, delegates)."""
    rows = np.unique(owner[owner >= 0])
    calls = trace.ops[rows].select("id", pl.col("name").cast(pl.String), "signature")
    calls = calls.with_columns(pl.Series("delegates", _delegates(trace, rows, owner, on_cpu=on_cpu)))
    kinds = calls.select("name", "signature", "delegates").unique(maintain_order=True).with_row_index("call")
    parsed = signatures(trace)
    costs = tuple(
        _cost(name, parsed.get(row), delegates) for name, row, delegates in kinds.select("name", "signature", "delegates").iter_rows()
    )
    of_row = calls.join(kinds, on=["name", "signature", "delegates"], how="left", maintain_order="left", nulls_equal=True)
    call = np.full(trace.ops.height + 1, -1, dtype=np.int64)
    call[rows] = of_row["call"].to_numpy()
    return Owners(owner, call[owner], costs, tuple(kinds["name"].to_list()))


def _cost(name: str, signature: Signature | None, delegates: bool) -> Cost | Missing:
    """Return the cost of a call; one whose children carry the cost neither computes nor moves anything by itself."""
    return Cost() if delegates else cost_of(name, signature)


def _delegates(trace: Trace, rows: Rows, owner: Rows, *, on_cpu: bool) -> npt.NDArray[np.bool_]:
    """Return which owning calls that are no modelled work have a modelled call inside them that owns kernels of its own.

    Their formula would count the children's work twice, so what is left to them is dispatch.
    """
    ops = trace.ops
    parent = ops["parent"].fill_null(-1).to_numpy()
    words = ops["name"].cast(pl.String)
    inside = np.zeros(ops.height, dtype=bool)
    working = [row for row in rows.tolist() if kind_of(words[row]) == "work"]
    above = parent[np.array(working, dtype=np.int64)]
    while len(above := np.unique(above[above >= 0])):
        above = above[~inside[above]]
        inside[above] = True
        above = parent[above]
    modelled = np.array([is_modelled(words[row]) for row in rows.tolist()], dtype=bool)
    result: npt.NDArray[np.bool_] = inside[rows] & ~modelled
    return result
