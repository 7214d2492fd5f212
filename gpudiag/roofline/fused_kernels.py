"""Kernels that torch.compile generated and what they cost, and chains of element-wise kernels that one fused kernel could replace.

On a device each generated kernel is an op of the trace. On a CPU the kernels of a graph are plain C++ calls inside the op
'## Call CompiledFxGraph <key> ##': its self time is theirs, so that it has the sum of their costs; matrix products and other library calls
inside are ops of their own. `derived`: exact buffers, operators by name.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from typing import TypeVar

import polars as pl

from gpudiag.attribution.names import decode_names
from gpudiag.attribution.nesting import find_nearest, null_missing
from gpudiag.model.bundle import CompiledGraph, GeneratedKernel, InductorCode
from gpudiag.model.ops import Cost
from gpudiag.model.trace import Trace
from gpudiag.roofline.costs.inductor import Operand, estimate_fused_cost, estimate_template_cost, parse_kernel_name
from gpudiag.roofline.costs.registry import LARGEST
from gpudiag.roofline.op_roles import RecordedCosts

_GRAPH_CALL = re.compile(r"^## Call CompiledFxGraph (\w+) ##$")
_CPP_CALL = re.compile(r"(?:graph_\w+?_)?(cpp_\w+)")  # config.cpp.enable_kernel_profile

_CPP_TEMPLATE = re.compile(r"[XW]\d*|query|key")
"""Operands of the templates in torch/_inductor/codegen/cpp_*_template.py."""

_KEYLESS = "None"
"""Key in the trace of a graph that torch's cache left out."""

_Key = TypeVar("_Key", bound=Hashable)


def find_compiled_costs(code: InductorCode | None, trace: Trace) -> RecordedCosts | None:
    """Find the costs of the ops of `trace` that `code` tells about; None where it tells nothing.

    Every compiled graph numbers its kernels from 0, so that models of one process share names: the call of the graph around an op says
    which it is. Without such a call (older torch, a recording that began inside) a name must mean one cost in all graphs.
    """
    if code is None or not code.graphs:
        return None
    name = decode_names(trace.ops["name"])
    key = name.str.extract(_GRAPH_CALL.pattern, 1)
    # the innermost compiled graph whose call encloses the op; the op itself for the call of a graph
    row = find_nearest(trace.ops["parent"].fill_null(-1).to_numpy(), key.is_not_null().to_numpy())
    around = pl.DataFrame({"name": name, "graph": key.gather(null_missing(row))})
    own = [(graph.key or _KEYLESS, item) for graph in code.graphs for item in graph.kernels if item.category != "extern"]
    told = [(key, item.name, estimate_kernel_cost(item)) for key, item in own]
    inside = _keep_unambiguous(((key, name), cost) for key, name, cost in told)
    anywhere = _keep_unambiguous((name, cost) for _, name, cost in told)
    on_device = bool((trace.kernels["kind"] == "kernel").any())  # there a graph's own time is no work
    sums = _keep_unambiguous(() if on_device else ((graph.key or _KEYLESS, _sum_graph_costs(graph)) for graph in code.graphs))
    distinct = around.select("name", "graph").unique(maintain_order=True)
    generated = {item.name for _, item in own}
    calls = {
        name: match.group(1) for name in distinct["name"].unique() if (match := _CPP_CALL.fullmatch(name)) and match.group(1) in generated
    }
    found: list[Cost | None] = []
    for name, graph in distinct.iter_rows():
        if _GRAPH_CALL.fullmatch(name):
            found.append(None if calls else sums.get(graph or _KEYLESS))  # else the kernels inside were recorded themselves
        elif graph is None:
            found.append(anywhere.get(calls.get(name, name)))
        else:
            found.append(inside.get((graph, calls.get(name, name))))
    costs = tuple(cost for cost in dict.fromkeys(found) if cost is not None)
    number = {cost: row for row, cost in enumerate(costs)}
    distinct = distinct.with_columns(told=pl.Series([-1 if cost is None else number[cost] for cost in found], dtype=pl.Int64))
    of_op = around.join(distinct, on=["name", "graph"], how="left", maintain_order="left", nulls_equal=True)["told"]
    return RecordedCosts(costs, of_op.to_numpy()) if costs else None


def estimate_kernel_cost(kernel: GeneratedKernel) -> Cost | None:
    """Estimate the cost of one call of a generated kernel; None where its code does not say enough."""
    operands = [
        Operand(buffer.shape, buffer.dtype, 2 if buffer.access == "both" else 1, buffer.touched)
        for buffer in kernel.buffers
        if buffer.shape is not None and buffer.dtype
    ]
    if kernel.category in ("extern", "user") or not operands or len(operands) < len(kernel.buffers):
        return None
    if any(size < 0 for item in operands for size in item.shape) or any(item.numel > LARGEST for item in operands):
        return None
    _, named = parse_kernel_name(kernel.name) or ("", ())
    ops = kernel.ops if kernel.ops is not None else named
    if kernel.category == "tem":
        cost = estimate_template_cost(ops, operands)
        return _drop_implausible(cost) if isinstance(cost, Cost) else None
    if kernel.category == "cpp" and any(_CPP_TEMPLATE.fullmatch(buffer.name) for buffer in kernel.buffers):
        return _estimate_cpp_product(kernel, operands)
    points = kernel.points if kernel.points is not None else max(item.numel for item in operands)
    return _drop_implausible(estimate_fused_cost(ops, operands, points, "derived"))


def _estimate_cpp_product(kernel: GeneratedKernel, operands: list[Operand]) -> Cost | None:
    """Estimate the cost of a matrix product from a C++ template: x[b, m, k] times b k n packed weights, with a result of b m n elements."""
    by_name = dict(zip((buffer.name for buffer in kernel.buffers), operands, strict=True))
    x, weights = by_name.get("X"), by_name.get("W")
    if x is None or weights is None or len(x.shape) not in (2, 3) or not x.numel:
        return None
    rows, depth = x.numel // x.shape[-1], x.shape[-1]
    columns = weights.numel // (x.shape[0] * depth if len(x.shape) == 3 else depth)
    results = (operand for buffer, operand in zip(kernel.buffers, operands, strict=True) if buffer.access != "read")
    if not any(item.numel == rows * columns for item in results):
        return None  # weights padded to whole blocks
    moved = sum(item._replace(touched=None).bytes for item in operands)
    return _drop_implausible(Cost(matrix_flops=2 * rows * depth * columns, bytes=moved, dtype=x.dtype, provenance="derived"))


def _drop_implausible(cost: Cost) -> Cost | None:
    return cost if 0 <= cost.bytes <= LARGEST and 0 <= cost.flops <= LARGEST else None


def _keep_unambiguous(pairs: Iterable[tuple[_Key, Cost | None]]) -> dict[_Key, Cost]:
    found: dict[_Key, set[Cost | None]] = {}
    for key, cost in pairs:
        found.setdefault(key, set()).add(cost)
    return {key: cost for key, costs in found.items() if len(costs) == 1 and (cost := next(iter(costs))) is not None}


def _sum_graph_costs(graph: CompiledGraph) -> Cost | None:
    """Return the cost of the C++ kernels of one call of `graph`; `generic` where some are not known, None where none is."""
    own = [(kernel, estimate_kernel_cost(kernel)) for kernel in graph.kernels if kernel.category == "cpp"]
    known = [(kernel.calls, cost) for kernel, cost in own if cost is not None]
    if not known:
        return None
    matrix = sum(calls * cost.matrix_flops for calls, cost in known)
    return _drop_implausible(
        Cost(
            matrix_flops=matrix,
            vector_flops=sum(calls * cost.vector_flops for calls, cost in known),
            special=sum(calls * cost.special for calls, cost in known),
            bytes=sum(calls * cost.bytes for calls, cost in known),
            dtype=next((cost.dtype for _, cost in known if cost.dtype), ""),
            provenance="derived" if len(known) == len(own) else "generic",
        )
    )


MEMORY_SHARE_OF_PEAK = 0.85
"""Share of the bandwidth that a fused kernel reaches (rules.md MEM-01)."""

GENERATED_KERNEL = r"^triton_|^fused_"
"""Kernels of Inductor: fused already."""


def find_elementwise_chains(work: pl.DataFrame, *, on_cpu: bool) -> pl.DataFrame:
    """Find the chains of unfused element-wise kernels: ids, phase, count, time_ns, bytes, between_bytes, least_bytes, ops, shapes.

    `work`: kernels with `name` as text, time_ns, op_name, phase, thread and the columns of calls.SCHEMA.
    A chain: two or more element-wise kernels or casts that follow each other on one stream (CPU: thread) within one step and phase and
    handle the same number of elements; the last may be a reduction of them, which a compiler fuses with what makes its input. That each
    feeds the next is not recorded: a kernel goes on where it reads a tensor of the size and type that the one before made. The optimizer,
    whose kernels belong to MEM-05, and generated (already fused) kernels do not count.
    between_bytes: what is written by one kernel and read by the next, and would stay in registers in a fused one.
    least_bytes: what the first reads and the last writes, which a fused kernel moves even where all else that the chain reads is made or
    read within it.
    """
    reduces = (pl.col("family") == "reduction").fill_null(False)
    fusable = (pl.col("family") == "elementwise") | (pl.col("copy_kind") == "cast") | reduces
    link = (
        fusable
        & pl.col("numel").is_not_null()
        & pl.col("bytes_moved").is_not_null()
        & pl.col("phase").ne_missing("optimizer")
        & ~pl.col("name").str.contains(GENERATED_KERNEL)
    )
    # what ends a chain: any kernel of a GPU; on a CPU only an op that does work (wrappers have self time too, and a Python number that
    # stands in an expression is converted by a copy of its own)
    number = ((pl.col("family") == "copy") & (pl.col("numel") <= 1)).fill_null(False)
    works = ((pl.col("bytes_moved").fill_null(0) > 0) & ~number) if on_cpu else pl.lit(True)
    lane = pl.col("thread") if on_cpu else pl.col("stream")
    # what ends a chain is told by a few columns; the wide ones are taken of the rows of chains alone
    columns = ("id", "start_ns", "numel", "step", "phase")
    asked = work.select(*columns, link=link.fill_null(False), reduces=reduces, lane=lane, works=works, row=pl.int_range(pl.len()))
    ordered = asked.filter("works").sort("lane", "start_ns", "id")
    same = ("lane", "link", "numel", "step", "phase")
    begins = pl.any_horizontal(pl.col(name).ne_missing(pl.col(name).shift()) for name in same)  # rle_id of a struct encodes all rows
    begins |= pl.col("reduces").shift(fill_value=False)
    linked = ordered.select("id", "numel", "phase", "reduces", "link", "row", begins=begins).filter("link")
    wide = work.select("time_ns", "bytes_moved", "item_bytes", "op_name", "operands", "result", "shapes")
    linked = linked.hstack(wide[linked["row"]])
    feeds = pl.col("operands").str.contains(pl.col("result").shift(), literal=True).fill_null(True)
    linked = linked.with_columns(run=(pl.col("begins") | ~feeds).cum_sum())
    runs = linked.filter(pl.len().over("run") >= 2).group_by("run", maintain_order=True)
    results = pl.col("numel") * pl.col("item_bytes")
    between = 2 * results.slice(0, pl.len() - 1).sum()
    written = pl.when(pl.col("reduces").last()).then(0).otherwise(results.last())
    least = (pl.col("bytes_moved").first() - results.first()).clip(lower_bound=0) + written
    return runs.agg(
        ids=pl.col("id"),
        phase=pl.col("phase").first(),
        count=pl.len(),
        time_ns=pl.col("time_ns").sum(),
        bytes=pl.col("bytes_moved").sum(),
        between_bytes=between.cast(pl.Float64),
        least_bytes=least.cast(pl.Float64),
        ops=pl.col("op_name").unique(maintain_order=True).str.join(", "),
        shapes=pl.col("shapes").first(),
    )


def estimate_fused_ns(bandwidth_byte_per_s: float) -> pl.Expr:
    """Estimate the time in ns of one fused kernel for each chain, at 85 % of the bandwidth."""
    fused_bytes = (pl.col("bytes") - pl.col("between_bytes")).clip(lower_bound=0)
    return fused_bytes / (MEMORY_SHARE_OF_PEAK * bandwidth_byte_per_s) * 1e9
