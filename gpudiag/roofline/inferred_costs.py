"""Costs that a call's own record does not tell: from the other side of the autograd graph, the op that takes its result, or the calls
inside.

Which gradients of a convolution ran: the first convolution of a network needs no gradient of its input, a frozen one none of its weight.
cuDNN, MIOpen and Composable Kernel name the direction (dgrad, wgrad; bwd, wrw; bwd_data, bwd_weight), but for a part of their kernels: a
plain product or a Winograd kernel may be either. So one gradient is taken only where all kernels but helpers name the same one.

Each `derived`; what none of them tells keeps its reason:

* a forward convolution without arguments (torch before 1.12), from the gradient of its result that its node records, else from the op
  that takes its result;
* a convolution's weight gradient alone, from the forward's weight;
* kernels under an autograd node that no formula inside explains, from the forward's inputs (registry.BACKWARD_FORMULAS);
* attention with paged caches in inference servers: how many keys it reads stands in the annotation of the step, not in its arguments.

vLLM and SGLang, as AMD's TraceLens instruments them, annotate each step with sums over its requests, with new tokens sq and all keys sk:
'execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk55086sqsq32sqsk55086)'. A causal request has sq * sk - sq (sq - 1) / 2 pairs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import polars as pl

from gpudiag.arrays import Bools, Ints, split_groups
from gpudiag.attribution.autograd import ForwardPairs, pair_forward_ops
from gpudiag.attribution.names import decode_column, decode_names, match_any_of
from gpudiag.attribution.nesting import find_nearest
from gpudiag.model.finding import Missing
from gpudiag.model.ops import Cost, NotModelledError, Signature
from gpudiag.model.trace import Trace
from gpudiag.roofline.costs import convolution as relatives
from gpudiag.roofline.costs import gradients
from gpudiag.roofline.costs.attention import read_query_key_value
from gpudiag.roofline.costs.convolution import CONVOLUTION_LAYOUTS
from gpudiag.roofline.costs.convolution import GRADIENT_LAYOUTS as BACKWARD
from gpudiag.roofline.costs.copies import (
    ON_ROWS,
    HeldRows,
    count_rows_inside,
    estimate_index_by_view,
    estimate_sparse_cost,
    find_sparse_size,
)
from gpudiag.roofline.costs.gemm import PACKED_LINEAR, build_matrix_cost, estimate_packed_linear
from gpudiag.roofline.costs.gradients import MATRIX_PRODUCTS
from gpudiag.roofline.costs.registry import BACKWARD_FORMULAS, NAMED_BACKWARD, attempt, is_sparse, require, size_of
from gpudiag.roofline.op_roles import AttributedOps, RecordedCosts

_WEIGHT = r"(?i)wgrad|_wrw|wrw_|bwd_?weight|backward_?(weight|filter)|bwd_?filter"
"""cudnn::cnn::wgrad_alg0_engine, xmma_wgrad, winogradWgradData4x4; igemm_wrw_gtcx3, MIOpenConvBwdWrW; ck kernel_grouped_conv_bwd_weight."""

_INPUT = r"(?i)dgrad|bwd_?data|backward_?data|igemm_bwd_"
"""cudnn::detail::dgrad_engine, xmma_dgrad; igemm_bwd_gtcx3; ck kernel_grouped_conv_bwd_data."""

_HELPER = (
    r"(?i)transpose|SubTensorOp|scalePackedTensor|nchwToNhwc|nhwcToNchw|Offsets?Kernel|elementwise_kernel|reduce_kernel|splitk_?reduce"
    r"|Memset|Memcpy|generateWinogradTiles|FillFunctor|castTensor"
)
"""Layout changes, fills, sums of partial results and tables of addresses: nothing multiplied."""


def match_single_gradient(kernels: pl.DataFrame, node: Ints, height: int) -> Bools:
    """Find for each of `height` ops whether the kernels of that `node` (op per kernel, -1: none) form one gradient of a convolution."""
    rows = np.flatnonzero(node >= 0)
    name, node = kernels["name"][rows].cast(pl.String), node[rows]
    weight = name.str.contains(_WEIGHT).to_numpy()
    data = name.str.contains(_INPUT).to_numpy() & ~weight
    either = ~(name.str.contains(_HELPER).to_numpy() | weight | data)
    has_weight, has_data, open_to_both = (np.bincount(node[chosen], minlength=height) > 0 for chosen in (weight, data, either))
    found: Bools = (has_weight ^ has_data) & ~open_to_both
    return found


LOOK_AHEAD = 4
"""Ops that are looked at behind a call: nn.BatchNorm2d counts its batches (a 0-dimensional add_) before it normalises."""


def find_result_consumers(ops: pl.DataFrame, parent: Ints, parsed: Mapping[int, Signature], names: Sequence[str]) -> Ints:
    """Find for each call of one of `names` the signature of the op that takes its result, -1 where nothing tells.

    The next op on the thread after the outermost such call, whose first tensor has the dimensions of the call's own first. None where
    that op is one of `names` again: two convolutions in a row may both read the same input.
    """
    chosen = match_any_of(ops["name"], names).to_numpy()
    signature = ops["signature"].fill_null(-1).to_numpy()
    ranks = np.zeros(max(parsed, default=-1) + 2, dtype=np.int64)  # dimensions of the first tensor; 0 for none and, at the end, for row -1
    for row, call in parsed.items():
        first = call.tensor(0)
        ranks[row] = len(first.shape) if first is not None else 0
    rank = ranks[signature]
    rows = np.flatnonzero(chosen & (rank >= 3))
    top = find_nearest(parent, chosen & ~np.append(chosen, False)[parent])[rows]
    found, looking = np.full(ops.height, -1, dtype=np.int64), top
    for _ in range(LOOK_AHEAD):
        looking = find_next_rows(ops, looking)
        here = looking >= 0
        rows, looking = rows[here], looking[here]
        fits = rank[looking] == rank[rows]
        taken = fits & ~chosen[looking]
        found[rows[taken]] = signature[looking[taken]]
        rows, looking = rows[~fits], looking[~fits]
    return found


def find_next_rows(ops: pl.DataFrame, rows: Ints) -> Ints:
    """Find for each row the first op of its thread that starts at or after its end, -1 where there is none (ops: by thread, start)."""
    thread, start = ops["thread"].fill_null(-1).to_numpy(), ops["start_ns"].to_numpy()
    ends = ops["end_ns"].to_numpy()[rows]
    found = np.full(len(rows), -1, dtype=np.int64)
    for number, chosen in split_groups(thread[rows]):
        first, last = np.searchsorted(thread, [number, number + 1])
        place = first + np.searchsorted(start[first:last], ends[chosen], side="left")
        found[chosen] = np.where(place < last, place, -1)
    return found


def find_calls_inside(ops: pl.DataFrame, parent: Ints, names: Sequence[str], inner: Sequence[str], *, last: bool) -> Ints:
    """Find for each call of one of `names` the signature of the first (or last) call of `inner` directly inside it, -1: none."""
    name = decode_names(ops["name"])
    recorded = ops["signature"].fill_null(-1).to_numpy()
    rows = np.flatnonzero(name.is_in(list(inner)).to_numpy() & (parent >= 0) & (recorded >= 0))
    rows = rows if last else rows[::-1]  # of equal places the last assignment stays
    found = np.full(ops.height, -1, dtype=np.int64)
    found[parent[rows]] = recorded[rows]
    return np.where(name.is_in(list(names)).to_numpy(), found, -1)


_DEEPEST = 3
"""Calls of one name that lie around each other: aten::add_ around aten::add, aten::sparse_mask around two of aten::mul."""

_CASTS = ["aten::to"]
"""What each operand passes before it is used; it tells the rows also where they are as many as those of the table."""


def estimate_sparse_costs(ops: pl.DataFrame, parsed: Mapping[int, Signature]) -> RecordedCosts | None:
    """Estimate the costs of the calls of `ops` (stage 'link') on sparse tensors whose rows the calls inside tell; None: there are none."""
    sizes = {row: size for row, signature in parsed.items() if (size := find_sparse_size(signature)) is not None}
    if not sizes:
        return None
    wanted = (ops["signature"].is_in(list(sizes)) & match_any_of(ops["name"], ON_ROWS)).fill_null(False)
    frame = ops.select("id", "parent", "signature", decode_column("name")).with_columns(wanted.alias("wanted"))
    held = _find_held_rows(frame, parsed, sizes)
    found, of_op = list[Cost](), np.full(ops.height, -1, dtype=np.int64)
    rows = held.join(frame.select("id", "name", "signature"), on="id", how="inner", maintain_order="left")
    for (name, signature, *counts), members in rows.group_by("name", "signature", "first", "largest", "smallest", maintain_order=True):
        cost = attempt(estimate_sparse_cost, str(name), parsed[signature], HeldRows(*counts))
        if isinstance(cost, Cost):
            of_op[members["id"].to_numpy()] = len(found)
            found.append(cost)
    return RecordedCosts(tuple(found), of_op) if found else None


def merge_recorded_costs(first: RecordedCosts | None, second: RecordedCosts | None) -> RecordedCosts | None:
    """Return both together; where both tell a cost the first holds."""
    if first is None or second is None:
        return first or second
    later = np.where(second.of_op >= 0, second.of_op + len(first.costs), -1)
    of_op: Ints = np.where(first.of_op >= 0, first.of_op, later)
    return RecordedCosts((*first.costs, *second.costs), of_op)


def _find_held_rows(frame: pl.DataFrame, parsed: Mapping[int, Signature], sizes: Mapping[int, tuple[int, ...]]) -> pl.DataFrame:
    """Return (id, first, largest, smallest): the rows told inside each wanted call that is told any."""
    outer = frame.filter("wanted").select(pl.col("id").alias("call"), pl.col("signature").alias("own"))
    inner = frame.filter(pl.col("signature").is_not_null()).select("id", "parent", "signature", "name")
    inner = inner.join(outer, left_on="parent", right_on="call", how="inner").sort("id")
    pairs = inner.select("own", "signature", "name").unique(maintain_order=True)
    told = [count_rows_inside(sizes[own], name, parsed[row]) for own, row, name in pairs.iter_rows()]
    pairs = pairs.with_columns(
        pl.Series("rows", [rows for rows, _ in told], dtype=pl.Int64),
        pl.Series("whole", [sizes[own][0] if whole else None for own, (_, whole) in zip(pairs["own"], told, strict=True)], dtype=pl.Int64),
    )
    inner = inner.join(pairs, on=["own", "signature", "name"], how="left", maintain_order="left")
    counts = inner.group_by("parent", maintain_order=True).agg(
        pl.col("rows").drop_nulls(), pl.col("whole").filter(pl.col("name").is_in(_CASTS)).drop_nulls().head(1)
    )
    counts = counts.with_columns(pl.when(pl.col("rows").list.len() > 0).then("rows").otherwise("whole").alias("rows"))
    held = counts.select(
        pl.col("parent").alias("id"),
        pl.col("rows").list.first().alias("first"),
        pl.col("rows").list.max().alias("largest"),
        pl.col("rows").list.min().alias("smallest"),
    ).drop_nulls()
    # the wanted calls around them that are told nothing themselves: each passes its operands on
    outer = frame.filter("wanted").select(pl.col("id").alias("parent"))
    above = frame.select("id", "parent")
    for _ in range(_DEEPEST):
        more = held.join(above, on="id").join(outer, on="parent", how="semi").drop("id").rename({"parent": "id"})
        more = more.unique("id", keep="first", maintain_order=True).join(held, on="id", how="anti").select(held.columns)
        if not more.height:
            break
        held = pl.concat([held, more])
    return held


Formula = Callable[[str, Signature, Signature], Cost]

_INDEXING = ["aten::index", "aten::_unsafe_index"]
_ALLOCATIONS = ["aten::empty", "aten::_empty_affine_quantized"]
_SINGLE_PRODUCTS = ["aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::mv", "aten::addmv", "aten::dot", "aten::ger"]

ENGINE_CALL = "autograd::engine::evaluate_function"
"""The engine's call around a node: hooks and accumulation run in it too, so it carries no cost of a backward formula."""


def complete_costs(ops: pl.DataFrame, kernels: pl.DataFrame, found: AttributedOps, start: Ints) -> None:
    """Give kernels of `found` that are open a cost from the other side of the autograd graph. `start`: op of each free kernel, else -1."""
    pairs, parsed = pair_forward_ops(ops, BACKWARD_FORMULAS), found.parsed
    parent = ops["parent"].fill_null(-1).to_numpy()
    if (found.open() & (start >= 0)).any():
        # Find for each forward convolution the signature of its autograd node (-1: none), also for the calls inside the paired one
        convolution = _select_named(ops, list(CONVOLUTION_LAYOUTS))
        recorded = ops["signature"].fill_null(-1).to_numpy()
        nodes = np.flatnonzero(pairs.named & (recorded >= 0))
        of_forward = np.full(ops.height, -1, dtype=np.int64)
        of_forward[pairs.forward[nodes]] = recorded[nodes]
        around = find_nearest(parent, of_forward >= 0)
        usable = convolution & (around >= 0) & convolution[around]
        _cost_by_relative(ops, found, np.where(usable, of_forward[around], -1), relatives.estimate_forward_from_output)
        _cost_by_relative(ops, found, _find_results(ops, pairs), gradients.estimate_forward_from_gradient)
        # for each weight gradient the forward call of the node around it
        around = find_nearest(parent, pairs.forward >= 0)
        forwards = np.append(recorded, -1)[np.where(around >= 0, pairs.forward[around], -1)]
        forwards = np.where(_select_named(ops, list(relatives.WEIGHT_GRADIENTS)), forwards, -1)
        _cost_by_relative(ops, found, forwards, lambda _, own, forward: relatives.estimate_weight_gradient(own, forward))
        views = find_calls_inside(ops, parent, _INDEXING, ["aten::as_strided"], last=True)
        _cost_by_relative(ops, found, views, lambda _, own, view: estimate_index_by_view(own, view))
        results = find_calls_inside(ops, parent, list(PACKED_LINEAR), _ALLOCATIONS, last=False)
        _cost_by_relative(ops, found, results, estimate_packed_linear)
        consumers = find_result_consumers(ops, parent, parsed, list(CONVOLUTION_LAYOUTS))
        _cost_by_relative(ops, found, consumers, relatives.estimate_forward_from_output)
        _cost_nodes(ops, kernels, parent, found, pairs, start)
    # Halve the cost of convolution gradients whose mask was not recorded (both are taken then) where the kernels name one alone
    taken = [
        name in BACKWARD and isinstance(cost, Cost) and cost.provenance == "derived"
        for name, cost in zip(found.names, found.costs, strict=True)
    ]
    node = np.where(np.append(np.array(taken, dtype=bool), False)[found.call], found.owner, -1)
    one = (node >= 0) & match_single_gradient(kernels, node, ops.height)[node]
    for call in np.unique(found.call[one]).tolist():
        cost = found.costs[call]
        if isinstance(cost, Cost):
            found.call[one & (found.call == call)] = found.add(_halve_cost(cost), found.names[call])


def _estimate_node_cost(name: str, forward: Signature, node: Signature | None, products: int | None) -> Cost:
    """Estimate the cost of the backward of `name`; `products`: gradients that ran inside, of its two (None: both)."""
    if is_sparse(name, forward):
        raise NotModelledError("a sparse operand")
    cost = BACKWARD_FORMULAS[name](gradients.complete_backward_inputs(name, forward, node))
    return _halve_cost(cost) if products == 1 else cost


def _halve_cost(cost: Cost) -> Cost:
    """Return the cost of one of two gradients: each has the FLOPs of the forward and moves the same three tensors."""
    return msgspec.structs.replace(cost, matrix_flops=cost.matrix_flops // 2, bytes=cost.bytes // 2)


def _select_named(ops: pl.DataFrame, names: list[str]) -> Bools:
    found: Bools = match_any_of(ops["name"], names).to_numpy()
    return found


def _find_results(ops: pl.DataFrame, pairs: ForwardPairs) -> Ints:
    """Find for each call whose result a gradient tells the signature of its autograd node, -1 where there is none."""
    telling, look_up = _select_named(ops, list(gradients.TOLD_BY_GRADIENT)), _select_named(ops, list(gradients.TOTAL_D))
    recorded = ops["signature"].fill_null(-1).to_numpy()
    sure = pairs.named | np.append(look_up, False)[pairs.forward]  # extensions name their nodes otherwise
    nodes = np.flatnonzero(sure & (pairs.forward >= 0) & (recorded >= 0))
    found = np.full(ops.height, -1, dtype=np.int64)
    found[pairs.forward[nodes]] = recorded[nodes]
    return np.where(telling, found, -1)


def _cost_by_relative(ops: pl.DataFrame, found: AttributedOps, relative: Ints, formula: Formula) -> None:
    """Cost the open owners that have a `relative` (row of signatures, -1: none) by `formula`: once per distinct pair of signatures."""
    rows = np.unique(found.owner[found.open() & (found.owner >= 0)])
    rows = rows[relative[rows] >= 0]
    frame = ops[rows].select("id", decode_column("name"), "signature").with_columns(relative=relative[rows]).drop_nulls()
    call = np.full(ops.height + 1, -1, dtype=np.int64)
    for (name, own, other), members in frame.group_by("name", "signature", "relative", maintain_order=True):
        cost = attempt(formula, str(name), found.parsed[own], found.parsed[other])
        if isinstance(cost, Cost):
            call[members["id"].to_numpy()] = found.add(cost, str(name))
    found.call = np.where(call[found.owner] >= 0, call[found.owner], found.call)


def _cost_nodes(
    ops: pl.DataFrame,
    kernels: pl.DataFrame,
    parent: Ints,
    found: AttributedOps,
    pairs: ForwardPairs,
    start: Ints,
) -> None:
    """Give the open kernels under an autograd node the cost of its backward.

    Only where they are most of the node's kernel time: beside calls with costs of their own the node's cost would count them twice. Not
    for recomputed forward work, and not on a CPU for the node's own self time, which is dispatch.
    """
    name = decode_names(ops["name"])
    forward = np.where((pairs.forward >= 0) & ~name.str.starts_with(ENGINE_CALL).to_numpy(), pairs.forward, -1)
    costed = np.append(name.is_in(list(BACKWARD_FORMULAS)) & ops["signature"].is_not_null(), False)
    needs_name = np.append(name.is_in(list(NAMED_BACKWARD)), False)
    around = find_nearest(parent, costed[forward] & (pairs.named | ~needs_name[forward]))
    node = np.append(around, -1)[start]
    node = np.where(np.append(ops["recompute"].to_numpy(), False)[start], -1, node)
    wanted = (node >= 0) & found.open()
    time = kernels["busy_ns"].to_numpy()
    unexplained, whole = (np.bincount(node[chosen], time[chosen], minlength=ops.height) for chosen in (wanted, node >= 0))
    wanted &= np.append(2 * unexplained > whole, False)[node]
    rows = np.unique(node[wanted])
    call = np.full(ops.height + 1, -1, dtype=np.int64)
    frame = ops[forward[rows]].select(decode_column("name"), "signature")
    convolution = np.append(_select_named(ops, list(CONVOLUTION_LAYOUTS)), False)[forward]
    one = match_single_gradient(kernels, np.where(np.append(convolution, False)[node], node, -1), ops.height)[rows]
    product_node = around[_select_named(ops, _SINGLE_PRODUCTS)]
    products = np.bincount(product_node[product_node >= 0], minlength=ops.height)[rows]
    frame = frame.with_columns(ops["signature"][rows].alias("at"), node=rows, products=products, one=one)
    frame = frame.with_columns(
        at=pl.when(pl.col("name").is_in(list(gradients.TOTAL_D))).then("at"),
        products=pl.when(pl.col("name").is_in(list(MATRIX_PRODUCTS))).then("products").when("one").then(1),
    )
    for (key, signature, at, products), members in frame.group_by("name", "signature", "at", "products", maintain_order=True):
        cost = attempt(_estimate_node_cost, str(key), found.parsed[signature], found.parsed.get(at), products)
        if isinstance(cost, Cost):
            call[members["node"].to_numpy()] = found.add(cost, f"{key} backward")
    wanted &= call[node] >= 0
    found.owner, found.call = np.where(wanted, node, found.owner), np.where(wanted, call[node], found.call)


_STEP = r"^execute_\d+_context_\d+\(sq(\d+)sk(\d+)sqsq(\d+)sqsk(\d+)\)_generation_\d+\(sq(\d+)sk(\d+)sqsq(\d+)sqsk(\d+)\)$"

_OPS = {r"vllm::unified_attention(_with_output)?": 0, r"sglang_profiler::attention_paged_attention_ragged(_\d+)?": 2}
"""Pattern of an op's name -> position of its query; keys and values (new ones, or the caches) follow."""

_ALIKE = 1.5
"""Calls of one shape in one step do the same work, unless a sliding window, which no argument tells, cuts some of them: where their times
differ by more (noise and the order of requests stay below), their work is not known (heuristic)."""

SLIDING = Missing("calls of one shape take different times in one step: a sliding window, which is no argument, cuts some of them")


def estimate_paged_attention(trace: Trace, owners: AttributedOps) -> None:
    """Give the paged attention of annotated steps a `derived` cost, as if it had no sliding window."""
    first = {call: at for call, name in enumerate(owners.names) for pattern, at in _OPS.items() if re.fullmatch(pattern, name)}
    chosen = pl.Series("call", owners.call).is_in(list(first)) & trace.kernels["launch"].is_not_null()
    steps = trace.marks.select("start_ns", "end_ns", name=decode_names(trace.marks["name"])).filter(pl.col("name").str.contains(_STEP))
    if not chosen.any() or not steps.height:
        return
    rows = np.flatnonzero(chosen.to_numpy())
    launched = trace.launches["start_ns"].gather(trace.kernels["launch"].gather(rows))
    frame = pl.DataFrame({"row": rows, "owner": owners.owner[rows], "call": owners.call[rows], "launched": launched})
    frame = frame.with_columns(signature=trace.ops["signature"].gather(frame["owner"]), busy_ns=trace.kernels["busy_ns"].gather(rows))
    frame = frame.join_where(steps, pl.col("launched") >= pl.col("start_ns"), pl.col("launched") < pl.col("end_ns")).drop_nulls("signature")
    calls = frame.group_by("name", "call", "signature", "owner").agg(pl.col("busy_ns").sum())
    alike = calls.group_by("name", "call", "signature", maintain_order=True).agg(
        (pl.col("busy_ns").max() <= _ALIKE * pl.col("busy_ns").min()).alias("alike")
    )
    found = list[tuple[str, int, int, int]]()
    for name, call, signature, same in alike.sort("name", "call", "signature").iter_rows():
        cost = attempt(estimate_step, owners.parsed[signature], first[call], name) if same else SLIDING
        found.append((name, call, signature, owners.add(cost, owners.names[call])))
    table = pl.DataFrame(found, schema={"name": pl.String, "call": pl.Int64, "signature": pl.Int64, "told": pl.Int64}, orient="row")
    told = frame.join(table, on=["name", "call", "signature"], how="inner")
    owners.call = owners.call.copy()
    owners.call[told["row"].to_numpy()] = told["told"].to_numpy()


def estimate_step(signature: Signature, first: int, name: str) -> Cost:
    """Estimate the cost of one layer in the step `name`: the cache is taken to hold the type that is recorded of keys and values."""
    query, key, value = read_query_key_value(signature, first)
    sums = [int(number) for number in re.match(_STEP, name).groups()]  # type: ignore[union-attr]
    tokens, keys = sums[0] + sums[4], sums[1] + sums[5]
    pairs = sum(sums[at + 3] - (sums[at + 2] - sums[at]) // 2 for at in (0, 4))
    require(len(query.shape) == 3 and len(key.shape) >= 3 and len(value.shape) >= 3, "query, key and value have no heads")
    require(0 < tokens <= query.shape[0] and pairs > 0, "the step's annotation does not fit the query")
    heads, width, value_width = query.shape[1], query.shape[2], value.shape[-1]
    moved = size_of(tokens * heads * (width + value_width), query.dtype)
    moved += size_of(keys * key.shape[-2] * width, key.dtype) + size_of(keys * value.shape[-2] * value_width, value.dtype)
    return build_matrix_cost(heads * pairs * (width + value_width), query.dtype, moved, "derived")
