"""Which call carries the cost of a kernel: on a device, where kernels are work, and on a CPU, where self time may be dispatch."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from handmade import call, kernel, linked, op, steps

from gpudiag.model.finding import Missing
from gpudiag.model.ops import Cost
from gpudiag.model.trace import Trace
from gpudiag.roofline.attributed_ops import find_attributed_ops
from gpudiag.roofline.op_roles import AttributedOps

MM = [[64, 32], [32, 16]]
MM_FLOP = 2 * 64 * 32 * 16
LINEAR = [[64, 32], [16, 32], []]
VECTOR = [[1000], [1000]]


def owned(trace: Trace, found: AttributedOps) -> list[tuple[str, str | None, Cost | Missing | None]]:
    """Return (kernel, owning op, cost of the call) of each kernel."""
    names = trace.ops["name"].cast(pl.String).to_list()
    return [
        (name, names[owner] if owner >= 0 else None, found.costs[row] if row >= 0 else None)
        for name, owner, row in zip(trace.kernels["name"].cast(pl.String).to_list(), found.owner.tolist(), found.call.tolist(), strict=True)
    ]


def on_gpu(*events: dict[str, Any]) -> list[tuple[str, str | None, Cost | Missing | None]]:
    trace = linked(*steps(0, 1000), *events)
    return owned(trace, find_attributed_ops(trace, on_cpu=False))


def on_cpu(*events: dict[str, Any]) -> dict[str, tuple[str | None, Cost | Missing | None]]:
    trace = linked(*steps(0, 1000), *events, on_cpu=True)
    return {name: (owner, cost) for name, owner, cost in owned(trace, find_attributed_ops(trace, on_cpu=True))}


def flop(cost: Cost | Missing | None) -> int:
    assert isinstance(cost, Cost)
    return cost.matrix_flops


def test_the_innermost_op_with_a_formula_owns_the_kernel() -> None:
    events = [
        op("aten::linear", 0, 50, LINEAR),
        op("aten::matmul", 2, 48, MM),
        op("aten::mm", 5, 40, MM),
        op("aten::empty", 6, 9, [[64, 16]]),
    ]
    ((_, owner, cost),) = on_gpu(*events, call(20, 1), kernel(100, 200, 1))
    assert owner == "aten::mm"
    assert flop(cost) == MM_FLOP


def test_a_wrapper_without_recorded_work_inside_is_judged_by_its_own_formula() -> None:
    ((_, owner, cost),) = on_gpu(op("aten::linear", 0, 50, LINEAR), call(20, 1), kernel(100, 200, 1))
    assert owner == "aten::linear"
    assert flop(cost) == MM_FLOP


def test_a_kernel_beside_the_work_of_a_wrapper_is_not_known_and_never_free() -> None:
    events = [
        op("aten::linear", 0, 90, LINEAR),
        op("aten::mm", 5, 40, MM),
        call(20, 1),
        call(60, 2),
        kernel(100, 200, 1),
        kernel(200, 300, 2, "odd"),
    ]
    (_, owner, cost), (_, wrapper, rest) = on_gpu(*events)
    assert (owner, flop(cost)) == ("aten::mm", MM_FLOP)
    assert wrapper == "aten::linear"
    assert isinstance(rest, Missing)


def test_a_custom_op_with_a_modelled_helper_inside_keeps_its_generic_cost() -> None:
    # fused kernels of extensions (fbgemm, flash attention) fill their outputs with aten::zeros first
    events = [op("my::fused", 0, 90, VECTOR), op("aten::zeros", 4, 30, []), op("aten::zero_", 5, 20, [[1000]]), call(10, 1), call(60, 2)]
    (_, filler, _), (_, owner, cost) = on_gpu(*events, kernel(100, 110, 1, "fill"), kernel(110, 200, 2, "fused"))
    assert (filler, owner) == ("aten::zero_", "my::fused")
    assert isinstance(cost, Cost)
    assert cost.provenance == "generic"
    assert cost.bytes == 3 * 4000


def test_a_convolution_on_a_gpu() -> None:
    shapes = [[8, 3, 32, 32], [16, 3, 3, 3], [], [], [], [], [], []]
    events = [op("aten::conv2d", 0, 90, shapes), op("aten::convolution", 2, 88, shapes), op("aten::_convolution", 4, 86, shapes)]
    args = {"Concrete Inputs": ["", "", "[1, 1]", "[1, 1]", "[1, 1]", "1", "False", "True"]}
    inner = op("aten::cudnn_convolution", 6, 80, [[8, 3, 32, 32], [16, 3, 3, 3], [], [], [], [], [], [], []])
    inner["args"] |= {"Concrete Inputs": ["", "", "[1, 1]", "[1, 1]", "[1, 1]", "1", "False", "False", "True"]}
    for event in events:
        event["args"] |= args
    found = on_gpu(*events, inner, call(20, 1), call(30, 2), kernel(100, 150, 1, "im2col"), kernel(150, 200, 2, "implicit_gemm"))
    assert [owner for _, owner, _ in found] == ["aten::cudnn_convolution"] * 2  # two kernels, one call, one cost
    assert [flop(cost) for _, _, cost in found] == [2 * 8 * 16 * 32 * 32 * 3 * 3 * 3] * 2


def test_no_owner_for_collectives_copies_replays_framework_nodes_and_views_on_a_gpu() -> None:
    events = [
        op("aten::mm", 0, 50, MM), call(1, 1), call(2, 2), call(3, 3, api="cudaGraphLaunch"),
        op("AddmmBackward0", 60, 90, MM), call(70, 4), op("record_param_comms", 91, 95, [[5]]), call(92, 5),
        op("aten::empty", 96, 99, [[5]]), call(97, 6),
    ]  # fmt: skip
    names = ["ncclDevKernel_AllReduce", "Memcpy HtoD (Pageable -> Device)", "replayed", "of the node", "by record", "of the view"]
    found = on_gpu(*events, *(kernel(100 + n, 101 + n, n + 1, name) for n, name in enumerate(names)))
    assert [(name, owner) for name, owner, _ in found] == [(name, None) for name in names]


def test_a_kernel_that_ran_was_not_free() -> None:
    # aten::arange.out records its result before it is resized
    ((_, owner, cost),) = on_gpu(op("aten::arange", 0, 50, [[], [], [], [0]], dtype="long int"), call(20, 1), kernel(100, 200, 1))
    assert owner == "aten::arange"
    assert isinstance(cost, Missing)


def test_an_op_without_shapes_owns_nothing_but_the_one_around_it_may() -> None:
    ((_, owner, cost),) = on_gpu(op("my::outer", 0, 50, VECTOR), op("my::inner", 2, 40), call(20, 1), kernel(100, 200, 1))
    assert owner == "my::outer"
    assert isinstance(cost, Cost)
    ((_, owner, cost),) = on_gpu(op("aten::mm", 0, 50), call(20, 1), kernel(100, 200, 1))
    assert (owner, cost) == (None, None)


# --- CPU -----------------------------------------------------------------------------------------------------------------------------


def test_on_a_cpu_wrappers_views_and_autograd_nodes_are_dispatch() -> None:
    found = on_cpu(
        op("autograd::engine::evaluate_function: AddmmBackward0", 0, 90), op("AddmmBackward0", 5, 85), op("aten::linear", 10, 80, LINEAR),
        op("aten::t", 12, 16, [[16, 32]]), op("aten::mm", 20, 70, MM),
        op("aten::reshape", 92, 96, [[100]]), op("aten::view", 93, 95, [[100]]),
    )  # fmt: skip
    assert {name: owner for name, (owner, _) in found.items()} == {name: name for name in found}
    assert {name for name, (_, cost) in found.items() if not (isinstance(cost, Cost) and cost.is_zero)} == {"aten::mm"}
    assert flop(found["aten::mm"][1]) == MM_FLOP


@pytest.mark.parametrize(
    ("outer", "inner", "shapes"),
    [("aten::clone", "aten::copy_", VECTOR), ("aten::mean", "aten::sum", [[1000]]), ("aten::relu", "aten::clamp_min", [[1000]])],
)
def test_on_a_cpu_work_that_delegates_all_of_it_counts_once(outer: str, inner: str, shapes: list[Any]) -> None:
    found = on_cpu(op(outer, 0, 50, shapes), op(inner, 10, 40, shapes))
    _, cost = found[outer]
    assert isinstance(cost, Cost)
    assert cost.is_zero
    assert not found[inner][1].is_zero  # type: ignore[union-attr]


def test_on_a_cpu_work_with_a_helper_inside_keeps_its_cost() -> None:
    # addmm copies its bias into the result first, sum fills its result with zero
    found = on_cpu(op("aten::addmm", 0, 50, [[16], *MM]), op("aten::copy_", 5, 10, [[64, 16], [64, 16]]))
    assert flop(found["aten::addmm"][1]) == MM_FLOP
    found = on_cpu(op("aten::sum", 0, 50, [[1000]]), op("aten::fill_", 5, 10, [[]]))
    assert found["aten::sum"][1].bytes >= 4000  # type: ignore[union-attr]


def test_on_a_cpu_a_custom_op_below_a_wrapper_without_formula_is_no_dispatch() -> None:
    # aten::einsum -> mylib::contract does all of the work; the small ops beside it must not make it look free
    found = on_cpu(op("aten::einsum", 0, 900, VECTOR), op("mylib::contract", 10, 800, [[16, 4, 32]]), op("aten::add", 20, 25, [[4], [4]]))
    owner, cost = found["mylib::contract"]
    assert owner == "mylib::contract"
    assert isinstance(cost, Cost)
    assert (cost.provenance, cost.is_zero) == ("generic", False)
    assert found["aten::einsum"][1].is_zero  # type: ignore[union-attr]


def test_on_a_cpu_without_any_shapes_nothing_is_owned() -> None:
    found = on_cpu(op("aten::linear", 0, 50), op("aten::mm", 10, 40))
    assert set(found.values()) == {(None, None)}


def test_no_ops() -> None:
    assert on_gpu(kernel(1, 2, 5)) == [("gemm", None, None)]


CONVOLUTION = [[8, 4, 10, 10], [6, 4, 3, 3], [6], [], [], [], [], [], []]
CONVOLUTION_ARGS = ["", "", "", "[1, 1]", "[0, 0]", "[1, 1]", "False", "[0, 0]", "1"]
CONVOLUTION_FLOP = 2 * 8 * 6 * 8 * 8 * 4 * 3 * 3


def test_a_convolution_without_a_backend_op_beside_a_copy_keeps_its_cost_on_both_sides() -> None:
    """Back ends of extensions, and transposed convolutions on a CPU, compute in aten::_convolution itself."""
    outer = op("aten::convolution", 0, 95, CONVOLUTION, concrete=CONVOLUTION_ARGS)
    inner = op("aten::_convolution", 1, 90, CONVOLUTION, concrete=CONVOLUTION_ARGS)
    copy = op("aten::copy_", 40, 60, [[6], [6], []])
    launches = [call(10, 1), call(45, 2), kernel(100, 700, 1, "conv"), kernel(700, 703, 2, "copy")]
    (_, owner, cost), (_, copied, moved) = on_gpu(outer, inner, copy, *launches)
    assert (owner, flop(cost), copied, flop(moved)) == ("aten::_convolution", CONVOLUTION_FLOP, "aten::copy_", 0)
    found = on_cpu(outer, inner, copy)
    assert {name: flop(cost) for name, (_, cost) in found.items()} == {
        "aten::convolution": 0, "aten::_convolution": CONVOLUTION_FLOP, "aten::copy_": 0,
    }  # fmt: skip


def test_a_wrapper_of_arithmetic_keeps_its_cost_beside_a_copy_on_a_cpu() -> None:
    args = ["", "[2]", "[2]", "[0]", "[1]", "False"]
    pool = op("aten::max_pool1d", 0, 90, [[8, 4, 100], [], [], [], [], []], concrete=args)
    found = on_cpu(pool, op("aten::copy_", 10, 30, [[8, 4, 100], [8, 4, 100], []]))
    cost = found["aten::max_pool1d"][1]
    assert isinstance(cost, Cost)
    assert cost.vector_flops == 2 * 8 * 4 * 50
