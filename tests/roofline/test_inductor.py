"""Costs from Inductor's own code: worked numbers, ambiguous names, and who owns the time of a compiled graph."""

from __future__ import annotations

from typing import Any

import msgspec
import polars as pl
import pytest
from handmade import call, kernel, linked, mark, op, steps
from inductor_text import CPP, TRITON

from gpudiag.capture.inductor import read_graph
from gpudiag.model.bundle import CompiledGraph, GeneratedKernel, InductorCode, KernelBuffer
from gpudiag.model.finding import Missing
from gpudiag.model.ops import Cost
from gpudiag.model.trace import Trace
from gpudiag.roofline.attributed_ops import find_attributed_ops
from gpudiag.roofline.fused_kernels import estimate_kernel_cost, find_compiled_costs

CPP_COST = Cost(vector_flops=10 * 512 * 64, special=512 * 64, bytes=4 * 512 * 64 + 8 * 512 + 2 * 512 * 64 + 4 * 100, provenance="derived")
"""gelu; the result written, the indices and the bf16 rows of 512 tokens read, a second result of 100 elements written."""

POI_COST = Cost(vector_flops=6 * 131072, special=131072, bytes=3 * 2 * 131072, provenance="derived")
"""silu and mul; one operand read, one read and written in place."""

POI, GRAPH = "triton_poi_fused_mul_silu_view_0", "## Call CompiledFxGraph fabc ##"


def code(*sources: str, keys: tuple[str, ...] = ("fabc", "fdef")) -> InductorCode:
    return InductorCode(graphs=tuple(CompiledGraph(key, read_graph(source)) for key, source in zip(keys, sources, strict=False)))


def owners(trace: Trace, found: InductorCode | None, *, on_cpu: bool) -> dict[str, tuple[str | None, Cost | Missing | None]]:
    """Return (owning op, cost of its call) by the name of each kernel."""
    result = find_attributed_ops(trace, on_cpu=on_cpu, known=find_compiled_costs(found, trace))
    names = trace.ops["name"].cast(pl.String).to_list()
    kernels = trace.kernels["name"].cast(pl.String).to_list()
    return {
        name: (names[owner] if owner >= 0 else None, result.costs[row] if row >= 0 else None)
        for name, owner, row in zip(kernels, result.owner.tolist(), result.call.tolist(), strict=True)
    }


def told(found: InductorCode, trace: Trace) -> dict[str, Cost]:
    """Return the cost that `found` tells of each op, by name."""
    known = find_compiled_costs(found, trace)
    names = trace.ops["name"].cast(pl.String).to_list()
    return {} if known is None else {name: known.costs[row] for name, row in zip(names, known.of_op.tolist(), strict=True) if row >= 0}


def test_each_buffer_counts_once_and_rows_not_tables() -> None:
    found = {item.name: estimate_kernel_cost(item) for item in read_graph(TRITON)}
    assert found == {
        "mm": None,
        POI: POI_COST,
        "triton_red_fused_embedding_mean_1": Cost(512 * 0, 512 * 768, 8 * 512 + 4 * 512 * 768 + 4 * 512, provenance="derived"),
    }
    assert [estimate_kernel_cost(item) for item in read_graph(CPP)] == [CPP_COST]


def test_a_generated_kernel_has_its_cost_without_recorded_shapes() -> None:
    events = [op(POI, 10, 20), call(12, 1), kernel(30, 40, 1, POI)]
    trace = linked(*steps(0, 100), *events)
    assert owners(trace, code(TRITON), on_cpu=False) == {POI: (POI, POI_COST)}
    assert owners(trace, None, on_cpu=False) == {POI: (None, None)}


def test_the_bundle_comes_before_names_and_shapes() -> None:
    events = [op(POI, 10, 20, [[131072], [131072], []]), call(12, 1), kernel(30, 40, 1, POI)]
    trace = linked(*steps(0, 100), *events)
    assert owners(trace, code(TRITON), on_cpu=False)[POI] == (POI, POI_COST)
    by_shapes = owners(trace, None, on_cpu=False)[POI][1]
    assert isinstance(by_shapes, Cost)
    assert by_shapes.provenance == "generic"


def test_a_name_that_means_two_kernels_is_left_to_the_recorded_shapes() -> None:
    trace = linked(*steps(0, 100), op(POI, 10, 20), call(12, 1), kernel(30, 40, 1, POI))
    assert told(code(TRITON, TRITON), trace) == {POI: POI_COST}
    assert told(code(TRITON, OTHER), trace) == {}


OTHER = TRITON.replace("131072", "65536").replace("1024", "512")
"""A second model in the same process: Inductor gives its kernels the same names."""


def test_the_call_of_a_graph_tells_models_of_one_process_apart() -> None:
    calls = [mark(f"## Call CompiledFxGraph {key} ##", 100 * row + 10, 100 * row + 90) for row, key in enumerate(("fabc", "fdef", "fgone"))]
    kernels = [op(POI, 100 * row + 20, 100 * row + 30) for row in range(4)]  # the last is in no recorded call
    launches = [
        event for row in range(4) for event in (call(100 * row + 25, row + 1), kernel(100 * row + 40, 100 * row + 50, row + 1, POI))
    ]
    trace = linked(*steps(0, 400), *calls, *kernels, *launches)
    found = find_attributed_ops(trace, on_cpu=False, known=find_compiled_costs(code(TRITON, OTHER), trace))
    half = Cost(vector_flops=6 * 65536, special=65536, bytes=3 * 2 * 65536, provenance="derived")
    assert [found.costs[row] if row >= 0 else None for row in found.call.tolist()] == [POI_COST, half, None, None]


def test_a_graph_that_the_cache_left_out_has_no_key_in_the_bundle_either() -> None:
    trace = linked(*steps(0, 100), mark("## Call CompiledFxGraph None ##", 5, 95), op(POI, 10, 20), call(12, 1), kernel(30, 40, 1, POI))
    assert told(code(TRITON, OTHER, keys=("", "fdef")), trace) == {POI: POI_COST}
    assert told(code(TRITON, OTHER, keys=("", "")), trace) == {}


def on_cpu(*inside: dict[str, Any]) -> Trace:
    """Return a step in which a compiled function calls graph fabc, with `inside` in the call."""
    outer = op("CompiledFunction", 10, 90), mark(GRAPH, 20, 80)
    return linked(*steps(0, 100), op("aten::mm", 1, 9, [[4, 4], [4, 4]]), *outer, *inside, on_cpu=True)


def test_on_a_cpu_the_own_time_of_a_graph_is_that_of_its_kernels() -> None:
    # the matrix product inside costs more than the fused kernels, but does none of their work
    trace = on_cpu(op("aten::addmm", 30, 60, [[5000], [500, 600], [600, 5000]]))
    found = owners(trace, code(CPP), on_cpu=True)
    assert found[GRAPH] == (GRAPH, CPP_COST)
    assert found["CompiledFunction"] == ("CompiledFunction", Cost())
    product = found["aten::addmm"][1]
    assert isinstance(product, Cost)
    assert product.matrix_flops == 2 * 500 * 600 * 5000


def test_on_a_device_a_graph_is_no_work() -> None:
    events = [op("CompiledFunction", 10, 90), mark(GRAPH, 20, 80), call(30, 1), kernel(40, 50, 1, "memory_efficient")]
    assert owners(linked(*steps(0, 100), *events), code(CPP), on_cpu=False)["memory_efficient"] == (None, None)


def test_without_its_code_the_time_of_a_graph_is_unknown_not_dispatch() -> None:
    assert owners(on_cpu(), None, on_cpu=True)[GRAPH] == (None, None)


def test_kernels_that_were_recorded_themselves_take_the_cost_from_the_graph() -> None:
    name = "graph_0_cpp_fused_embedding_gelu_0"  # config.cpp.enable_kernel_profile
    assert told(code(CPP), on_cpu(op(name, 30, 60))) == {name: CPP_COST}


def test_calls_multiply_and_unknown_kernels_make_the_sum_generic() -> None:
    (known,) = read_graph(CPP)
    unknown = GeneratedKernel("cpp_fused_add_1", "cpp", buffers=(KernelBuffer("in_ptr0", "fp32", "read"),))
    graph = InductorCode(graphs=(CompiledGraph("fabc", (msgspec.structs.replace(known, calls=3), unknown)),))
    expected = Cost(vector_flops=3 * CPP_COST.vector_flops, special=3 * CPP_COST.special, bytes=3 * CPP_COST.bytes, provenance="generic")
    assert told(graph, on_cpu()) == {GRAPH: expected}
    assert told(InductorCode(graphs=(CompiledGraph("fabc", (unknown,)),)), on_cpu()) == {}


def test_a_template_has_matrix_flop() -> None:
    shapes = (512, 256), (256, 128), (512, 128)
    names = "arg_A", "arg_B", "out_ptr0"
    buffers = tuple(
        KernelBuffer(name, "bf16", "write" if name == "out_ptr0" else "read", shape) for name, shape in zip(names, shapes, strict=True)
    )
    found = estimate_kernel_cost(GeneratedKernel("triton_tem_fused_mm_0", "tem", ops=("mm",), buffers=buffers))
    assert found == Cost(2 * 512 * 256 * 128, 0, 2 * (512 * 256 + 256 * 128 + 512 * 128), "bf16", "derived")


def cpp_template(weights: tuple[int, ...]) -> GeneratedKernel:
    buffers = (
        KernelBuffer("X", "bf16", "read", (64, 32), 7),
        KernelBuffer("W", "bf16", "read", weights),
        KernelBuffer("inp", "bf16", "read", (48,)),
        KernelBuffer("Y", "bf16", "write", (64, 48)),
    )
    return GeneratedKernel("cpp_fused_addmm_relu_0", "cpp", buffers=buffers, points=7)


def test_a_cpp_template_multiplies_by_packed_weights() -> None:
    found = estimate_kernel_cost(cpp_template((3, 32, 16)))  # 48 columns in three blocks of 16
    assert found == Cost(2 * 64 * 32 * 48, 0, 2 * (64 * 32 + 32 * 48 + 48 + 64 * 48), "bf16", "derived")
    assert estimate_kernel_cost(cpp_template((4, 32, 16))) is None  # padded: the columns are not in the sizes


@pytest.mark.parametrize("shape", [(-5, 3), (1 << 40, 1 << 40), (10**30,)])
@pytest.mark.parametrize("touched", [None, -7, 10**40])
def test_figures_that_no_recording_holds_give_no_cost(shape: tuple[int, ...], touched: int | None) -> None:
    buffer = KernelBuffer("in_ptr0", "fp32", "read", shape, touched)
    assert estimate_kernel_cost(GeneratedKernel("cpp_fused_add_0", "cpp", buffers=(buffer,), points=5)) is None
    small = KernelBuffer("in_ptr0", "fp32", "read", (4,), touched)
    found = estimate_kernel_cost(GeneratedKernel("cpp_fused_add_0", "cpp", calls=10**40, buffers=(small,), points=10**40))
    assert found is None
