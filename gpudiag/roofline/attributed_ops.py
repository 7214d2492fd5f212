"""Which op call carries the cost of each kernel (its attributed op), and what that call costs."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import polars as pl

from gpudiag.arrays import Bools, Ints
from gpudiag.attribution.autograd import find_repeated_forward, pair_forward_ops
from gpudiag.attribution.names import decode_column, match_any_of
from gpudiag.model.finding import Missing
from gpudiag.model.ops import Cost, Signature, parse_signature
from gpudiag.model.trace import Trace
from gpudiag.roofline import inferred_costs, op_roles
from gpudiag.roofline.costs import estimate_cost
from gpudiag.roofline.costs.registry import BACKWARD_FORMULAS, FORMULAS, split_names
from gpudiag.roofline.inferred_costs import estimate_sparse_costs, merge_recorded_costs
from gpudiag.roofline.op_roles import (
    COMPILED,
    FORMULA_WRAPPER,
    FRAMEWORK,
    OTHER,
    VIEW,
    WORK,
    WRAPPER,
    AttributedOps,
    OpTree,
    RecordedCosts,
    build_op_tree,
    climb,
)

_COPIES = frozenset(f"aten::{name}" for name in split_names("copy_ clone _to_copy fill_ zero_"))
"""Not compared: checkpointing itself copies the state of random numbers, and ends before or behind a copy that keeps a tensor."""


def inherit_signatures(ops: pl.DataFrame) -> tuple[pl.DataFrame, Bools]:
    """Return `ops` (stage 'link') with the signatures of the forward calls that calls without one repeat, and which calls those are."""
    bare = ops["recompute"] & ops["signature"].is_null()
    compared = match_any_of(ops["name"], FORMULAS.keys() - _COPIES) if bare.any() else bare
    if not (bare & compared).any() or ops["signature"].null_count() == ops.height:
        return ops, np.zeros(ops.height, dtype=bool)
    forward = find_repeated_forward(ops, pair_forward_ops(ops, BACKWARD_FORMULAS), compared.to_numpy())
    recorded = ops["signature"].gather(np.maximum(forward, 0))
    borrowed = bare & pl.Series(forward >= 0) & recorded.is_not_null()
    return ops.with_columns(signature=pl.when(borrowed).then(recorded).otherwise("signature")), borrowed.to_numpy()


def parse_signatures(trace: Trace) -> dict[int, Signature]:
    """Parse the signatures by id, each distinct text once."""
    rows = trace.signatures.select("id", "shapes", "dtypes", "strides", "args").iter_rows()
    return {row: parse_signature(shapes, dtypes, strides, args) for row, shapes, dtypes, strides, args in rows}


def find_attributed_ops(trace: Trace, *, on_cpu: bool, known: RecordedCosts | None = None) -> AttributedOps:
    """Return owners and costs of the kernels of `trace` (stage 'link').

    Collectives, copies, memsets and replays of graphs whose capture was not recorded have none. `known`: costs of ops that the
    recording itself tells; they come before the formulas.
    """
    kernels = trace.kernels
    lost = kernels["replay"] & ~kernels["mapped"]
    free = kernels["kind"].is_in(["kernel", "cpu"]).to_numpy() & ~(kernels["collective"] | lost).to_numpy()
    start = np.where(free, kernels["op"].fill_null(-1).to_numpy(), -1)
    ops, borrowed = inherit_signatures(trace.ops)
    calls = build_op_tree(ops, known)
    if not len(calls.parent):
        return AttributedOps(start, np.full(len(start), -1), (), ())
    recorded = trace.signatures.height > 0
    owner = np.full(len(start), -1, dtype=np.int64)
    if on_cpu and recorded:  # the start op itself where its self time can only be dispatch (views, wrappers, autograd nodes)
        dispatch = (start >= 0) & np.isin(calls.grade[start], (VIEW, WRAPPER, FORMULA_WRAPPER, FRAMEWORK))
        owner = np.where(dispatch, start, -1)
    open_rows = owner < 0
    owner[open_rows] = _find_attributed_rows(calls, start[open_rows], (WORK, COMPILED, VIEW) if on_cpu else (WORK, COMPILED))
    parsed = parse_signatures(trace)
    found = _estimate_costs(
        ops.with_columns(borrowed=borrowed),
        calls,
        owner,
        parsed,
        merge_recorded_costs(known, estimate_sparse_costs(ops, parsed)),
        on_cpu=on_cpu,
    )
    found.parsed = parsed
    inferred_costs.complete_costs(ops, kernels, found, start)
    return found


def _find_attributed_rows(calls: OpTree, start: Ints, working: tuple[int, ...]) -> Ints:
    """Find the innermost op with a formula around each start op; else the start op or its parent; else the innermost wrapper.

    Its parent: the innermost op has no shapes though the one around it has (compiled regions of old torch).
    """
    shaped, grade, parent = calls.shaped, calls.grade, calls.parent
    owner = climb(start, parent, shaped & np.isin(grade, working))
    owner = np.where(owner < 0, climb(start, parent, shaped & (grade == FORMULA_WRAPPER)), owner)
    other = shaped & (grade == OTHER)
    above = np.where(start >= 0, parent[start], -1)
    nearest = np.where((start >= 0) & other[start], start, np.where((above >= 0) & other[above], above, -1))
    owner = np.where(owner < 0, nearest, owner)
    return np.where(owner < 0, climb(start, parent, shaped & (grade == WRAPPER)), owner)


def _estimate_costs(
    ops: pl.DataFrame, calls: OpTree, owner: Ints, parsed: Mapping[int, Signature], known: RecordedCosts | None, *, on_cpu: bool
) -> AttributedOps:
    """Return `owner` with one cost for each distinct (name, signature, borrowed signature, told cost, delegates)."""
    used = np.zeros(len(calls.parent), dtype=bool)
    used[owner[owner >= 0]] = True
    rows = np.flatnonzero(used)
    told = known.of_op[rows] if known else np.full(len(rows), -1)
    keys = ["name", "signature", "borrowed", "told"]
    frame = ops[rows].select("id", decode_column("name"), "signature", "borrowed").with_columns(told=told)
    kinds = frame.select(keys).unique(maintain_order=True).with_row_index("kind")
    full: list[Cost | Missing] = []
    for name, row, borrowed, number in kinds.select(keys).iter_rows():
        if known and number >= 0:
            full.append(known.costs[number])
            continue
        cost = estimate_cost(name, parsed.get(row))
        exact = isinstance(cost, Cost) and cost.provenance == "exact"  # not where the signature is that of the call which it repeats
        full.append(msgspec.structs.replace(cost, provenance="derived") if borrowed and exact else cost)
    frame = frame.join(kinds, on=keys, how="left", maintain_order="left", nulls_equal=True)
    if not on_cpu:
        full = [op_roles.NOTHING_RECORDED if isinstance(cost, Cost) and cost.is_zero else cost for cost in full]
    of_row = [full[kind] for kind in frame["kind"].to_list()]
    passed = op_roles.find_delegating(calls, rows, of_row, on_cpu=on_cpu)
    frame = frame.with_columns(pl.Series("passed", passed, dtype=pl.Boolean))
    distinct = frame.select("kind", "name", "passed").unique(maintain_order=True).with_row_index("call")
    frame = frame.join(distinct, on=["kind", "passed"], how="left", maintain_order="left")
    call = np.full(len(calls.parent) + 1, -1, dtype=np.int64)
    call[rows] = frame["call"].to_numpy()
    costs = [
        (op_roles.DISPATCH_COST if on_cpu else op_roles.OUTSIDE_WRAPPED_WORK) if passes else full[kind]
        for kind, passes in distinct.select("kind", "passed").iter_rows()
    ]
    return AttributedOps(owner, call[owner], costs, distinct["name"].to_list())


MATRIX_KERNEL_CLASSES = ("gemm", "convolution", "attention", "rnn", "triton_template")


def drop_contradicted_costs(trace: Trace, owners: AttributedOps) -> None:
    """Put Missing in the place of the `generic` cost of calls whose kernels are mostly matrix products.

    A custom op holds its weights where no argument shows them (vllm::moe_forward): one FLOP an element and the bytes of the arguments
    would then be a fraction of a per mille of what it did.
    """
    generic = [call for call, cost in enumerate(owners.costs) if isinstance(cost, Cost) and cost.provenance == "generic"]
    frame = trace.kernels.select("busy_ns", pl.col("kernel_class").is_in(MATRIX_KERNEL_CLASSES).fill_null(False).alias("product"))
    frame = frame.with_columns(pl.Series("call", owners.call)).filter(pl.col("call").is_in(generic))
    times = frame.group_by("call").agg((pl.col("busy_ns") * pl.col("product")).sum().alias("product_ns"), pl.col("busy_ns").sum())
    for call in times.filter(pl.col("product_ns") * 2 > pl.col("busy_ns"))["call"].to_list():
        owners.costs[call] = Missing(
            f"{owners.names[call]} has no formula and ran matrix kernels: the sizes of its inputs do not tell their work"
        )
