"""Costs of the kernels that torch.compile generated, from what the bundle says of their code.

On a device each generated kernel is an op of the trace. On a CPU the kernels of a graph are plain C++ calls inside the op
'## Call CompiledFxGraph <key> ##': its self time is theirs, so that it has the sum of their costs; matrix products and other library calls
inside are ops of their own. `derived`: exact buffers, operators by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import polars as pl

from gpudiag.model.cost import Cost
from gpudiag.model.inductor import CompiledGraph, GeneratedKernel, InductorCode
from gpudiag.model.trace import Trace
from gpudiag.roofline.costs.fused import Operand, fused_cost, parse_name
from gpudiag.roofline.costs.templates import template_cost

_GRAPH_CALL = re.compile(r"## Call CompiledFxGraph (\w+) ##")
_CPP_CALL = re.compile(r"(?:graph_\w+?_)?(cpp_\w+)")  # config.cpp.enable_kernel_profile

_CPP_TEMPLATE = re.compile(r"[XW]\d*|query|key")
"""Operands of the templates in torch/_inductor/codegen/cpp_*_template.py."""

LARGEST = 1 << 60
"""No kernel moves more bytes or does more FLOP than this in one call: larger figures are no figures of a recording."""


def known_costs(code: InductorCode | None, trace: Trace) -> dict[str, Cost]:
    """Return costs by op name for the ops of `trace` that `code` tells about.

    A name that two graphs use for kernels of different cost is left out: the recorded shapes of the call decide.
    """
    if code is None:
        return {}
    names = trace.ops["name"].unique().cast(pl.String).to_list()
    kernels = _by_name(kernel for graph in code.graphs for kernel in graph.kernels)
    on_device = (trace.kernels["kind"] == "kernel").any()  # there a graph's own time is no work
    graphs = {} if on_device else _distinct((graph.key, _sum_of(graph)) for graph in code.graphs if graph.key)
    known = {}
    in_cpp = {name: match.group(1) for name in names if (match := _CPP_CALL.fullmatch(name)) and match.group(1) in kernels}
    for name in names:
        graph = _GRAPH_CALL.fullmatch(name)
        if graph and in_cpp:
            continue  # the kernels inside were recorded themselves
        cost = graphs.get(graph.group(1)) if graph else kernels.get(in_cpp.get(name, name))
        if cost is not None:
            known[name] = cost
    return known


def kernel_cost(kernel: GeneratedKernel) -> Cost | None:
    """Return the cost of one call of a generated kernel; None where its code does not say enough."""
    operands = [
        Operand(buffer.shape, buffer.dtype, 2 if buffer.access == "both" else 1, buffer.touched)
        for buffer in kernel.buffers
        if buffer.shape is not None and buffer.dtype
    ]
    if kernel.category in ("extern", "user") or not operands or len(operands) < len(kernel.buffers):
        return None
    if any(size < 0 for item in operands for size in item.shape) or any(item.numel > LARGEST for item in operands):
        return None
    _, named = parse_name(kernel.name) or ("", ())
    ops = kernel.ops if kernel.ops is not None else named
    if kernel.category == "tem":
        cost = template_cost(ops, operands)
        return _plausible(cost) if isinstance(cost, Cost) else None
    if kernel.category == "cpp" and any(_CPP_TEMPLATE.fullmatch(buffer.name) for buffer in kernel.buffers):
        return _cpp_product(kernel, operands)
    points = kernel.points if kernel.points is not None else max(item.numel for item in operands)
    return _plausible(fused_cost(ops, operands, points, "derived"))


def _cpp_product(kernel: GeneratedKernel, operands: list[Operand]) -> Cost | None:
    """Return the cost of a matrix product from a C++ template: x[b, m, k] times b k n packed weights, with a result of b m n elements."""
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
    return _plausible(Cost(matrix_flops=2 * rows * depth * columns, bytes=moved, dtype=x.dtype, provenance="derived"))


def _plausible(cost: Cost) -> Cost | None:
    return cost if 0 <= cost.bytes <= LARGEST and 0 <= cost.flops <= LARGEST else None


def _by_name(kernels: Iterable[GeneratedKernel]) -> dict[str, Cost]:
    return _distinct((kernel.name, kernel_cost(kernel)) for kernel in kernels if kernel.category != "extern")


def _distinct(pairs: Iterable[tuple[str, Cost | None]]) -> dict[str, Cost]:
    """Return the cost of each name whose costs are all known and equal."""
    found: dict[str, set[Cost | None]] = {}
    for name, cost in pairs:
        found.setdefault(name, set()).add(cost)
    return {name: cost for name, costs in found.items() if len(costs) == 1 and (cost := next(iter(costs))) is not None}


def _sum_of(graph: CompiledGraph) -> Cost | None:
    """Return the cost of the C++ kernels of one call of `graph`; `generic` where some are not known, None where none is."""
    own = [(kernel, kernel_cost(kernel)) for kernel in graph.kernels if kernel.category == "cpp"]
    known = [(kernel.calls, cost) for kernel, cost in own if cost is not None]
    if not known:
        return None
    matrix = sum(calls * cost.matrix_flops for calls, cost in known)
    return _plausible(
        Cost(
            matrix_flops=matrix,
            vector_flops=sum(calls * cost.vector_flops for calls, cost in known),
            bytes=sum(calls * cost.bytes for calls, cost in known),
            dtype=next((cost.dtype for _, cost in known if cost.dtype), ""),
            provenance="derived" if len(known) == len(own) else "generic",
        )
    )
