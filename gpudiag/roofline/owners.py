"""Which op call carries the cost of each kernel, and what that call costs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution.names import text
from gpudiag.model.cost import Cost
from gpudiag.model.finding import Missing
from gpudiag.model.signature import Signature, parse_signature
from gpudiag.model.trace import Trace
from gpudiag.roofline import backward, delegation
from gpudiag.roofline.borrowed import with_borrowed
from gpudiag.roofline.costs import cost_of
from gpudiag.roofline.grades import COMPILED, FORMULA_WRAPPER, FRAMEWORK, OTHER, VIEW, WORK, WRAPPER, Calls, Known, Rows, climb, grade_calls
from gpudiag.roofline.sparse import merged, sparse_costs


class Owners(NamedTuple):
    """The owner of each kernel and the cost of each distinct owning call."""

    owner: Rows
    """Row of ops per kernel, -1 where no op with shapes is around the launch."""
    call: Rows
    """Row of `costs` per kernel, -1 where there is no owner."""
    costs: tuple[Cost | Missing, ...]
    """One for each distinct (name, signature, delegates) that owns a kernel."""
    names: tuple[str, ...]
    """Op name of each row of `costs`."""
    parsed: Mapping[int, Signature] = MappingProxyType({})
    """The signatures of the trace by id; empty where no op was recorded."""


def signatures(trace: Trace) -> dict[int, Signature]:
    """Return the parsed signatures by id: each distinct text once."""
    rows = trace.signatures.select("id", "shapes", "dtypes", "strides", "args").iter_rows()
    return {row: parse_signature(shapes, dtypes, strides, args) for row, shapes, dtypes, strides, args in rows}


def find_owners(trace: Trace, *, on_cpu: bool, known: Known | None = None) -> Owners:
    """Return owners and costs of the kernels of `trace` (stage 'link').

    Collectives, copies, memsets and replays of graphs whose capture was not recorded have none. `known`: costs of ops that the
    recording itself tells; they come before the formulas.
    """
    kernels = trace.kernels
    lost = kernels["replay"] & ~kernels["mapped"]
    free = kernels["kind"].is_in(["kernel", "cpu"]).to_numpy() & ~(kernels["collective"] | lost).to_numpy()
    start = np.where(free, kernels["op"].fill_null(-1).to_numpy(), -1)
    ops, borrowed = with_borrowed(trace.ops)
    calls = grade_calls(ops, known)
    if not len(calls.parent):
        return Owners(start, np.full(len(start), -1, dtype=np.int64), (), ())
    recorded = trace.signatures.height > 0
    owner = _own_rows(calls, start) if on_cpu and recorded else np.full(len(start), -1, dtype=np.int64)
    open_rows = owner < 0
    owner[open_rows] = _owner_rows(calls, start[open_rows], (WORK, COMPILED, VIEW) if on_cpu else (WORK, COMPILED))
    parsed = signatures(trace)
    found = _costs(ops.with_columns(borrowed=borrowed), calls, owner, parsed, merged(known, sparse_costs(ops, parsed)), on_cpu=on_cpu)
    backward.complete(ops, kernels, parsed, found, start)
    return Owners(found.owner, found.call, tuple(found.costs), tuple(found.names), parsed)


def _own_rows(calls: Calls, start: Rows) -> Rows:
    """Return the start op itself where its self time on a CPU can only be dispatch (views, wrappers, autograd nodes), else -1."""
    own = (start >= 0) & np.isin(calls.grade[start], (VIEW, WRAPPER, FORMULA_WRAPPER, FRAMEWORK))
    return np.where(own, start, -1)


def _owner_rows(calls: Calls, start: Rows, working: tuple[int, ...]) -> Rows:
    """Return the innermost op with a formula around each start op; else the start op or its parent; else the innermost wrapper.

    Its parent: the innermost op has no shapes though the one around it has (compiled regions of old torch).
    """
    shaped, grade = calls.shaped, calls.grade
    owner = climb(start, calls.parent, shaped & np.isin(grade, working))
    for seek, wanted in ((climb, FORMULA_WRAPPER), (_nearest, OTHER), (climb, WRAPPER)):
        open_rows = owner < 0
        owner[open_rows] = seek(start[open_rows], calls.parent, shaped & (grade == wanted))
    return owner


def _nearest(start: Rows, parent: Rows, wanted: npt.NDArray[np.bool_]) -> Rows:
    """Return the start row or else its parent where `wanted`, else -1."""
    own = (start >= 0) & wanted[start]
    above = np.where(start >= 0, parent[start], -1)
    over = (above >= 0) & wanted[above]
    return np.where(own, start, np.where(over, above, -1))


def _cost(name: str, signature: Signature | None, borrowed: bool) -> Cost | Missing:
    """Return the cost of a call; `derived` where its signature is that of the call which it repeats."""
    cost = cost_of(name, signature)
    exact = isinstance(cost, Cost) and cost.provenance == "exact"
    return msgspec.structs.replace(cost, provenance="derived") if borrowed and exact else cost


def _costs(
    ops: pl.DataFrame, calls: Calls, owner: Rows, parsed: Mapping[int, Signature], known: Known | None, *, on_cpu: bool
) -> backward.Costs:
    """Return `owner` with one cost for each distinct (name, signature, borrowed signature, told cost, delegates)."""
    rows = np.unique(owner[owner >= 0])
    told = known.of_op[rows] if known else np.full(len(rows), -1)
    keys = ["name", "signature", "borrowed", "told"]
    frame = ops[rows].select("id", text("name"), "signature", "borrowed").with_columns(told=told)
    kinds = frame.select(keys).unique(maintain_order=True).with_row_index("kind")
    full = [
        known.costs[number] if known and number >= 0 else _cost(name, parsed.get(row), borrowed)
        for name, row, borrowed, number in kinds.select(keys).iter_rows()
    ]
    frame = frame.join(kinds, on=keys, how="left", maintain_order="left", nulls_equal=True)
    if not on_cpu:
        full = [delegation.NOTHING if isinstance(cost, Cost) and cost.is_zero else cost for cost in full]
    of_row = [full[kind] for kind in frame["kind"].to_list()]
    passed = delegation.on_cpu(calls, rows, of_row) if on_cpu else delegation.on_device(calls, rows, of_row)
    frame = frame.with_columns(pl.Series("passed", passed, dtype=pl.Boolean))
    distinct = frame.select("kind", "name", "passed").unique(maintain_order=True).with_row_index("call")
    frame = frame.join(distinct, on=["kind", "passed"], how="left", maintain_order="left")
    call = np.full(len(calls.parent) + 1, -1, dtype=np.int64)
    call[rows] = frame["call"].to_numpy()
    costs = tuple(
        (delegation.DISPATCH if on_cpu else delegation.OUTSIDE) if passes else full[kind]
        for kind, passes in distinct.select("kind", "passed").iter_rows()
    )
    return backward.Costs(owner, call[owner], costs, tuple(distinct["name"].to_list()))
