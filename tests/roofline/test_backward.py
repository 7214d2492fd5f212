"""Costs from the other side of the autograd graph: what they equal, and where nothing is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kept
import msgspec
import polars as pl
import pytest
from handmade import call, kernel, linked, op, steps

from gpudiag.attribution.autograd import find_autograd_nodes
from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.nesting import find_nearest
from gpudiag.attribution.steps import find_steps
from gpudiag.model.finding import Missing
from gpudiag.model.ops import Cost
from gpudiag.model.trace import Trace
from gpudiag.roofline.attributed_ops import find_attributed_ops
from gpudiag.roofline.op_roles import AttributedOps

Event = dict[str, Any]
X, WEIGHT, OUT = [2, 8, 14, 14], [16, 8, 3, 3], [2, 16, 7, 7]
CONVOLUTION = 2 * 2 * 16 * 7 * 7 * 8 * 3 * 3
"""Stride 2: neither the input nor the weight tells that."""


def node(name: str, start: float, end: float, seq: int, shapes: list[Any] | None = None) -> Event:
    made = op(name, start, end, shapes, seq=seq)
    made["args"]["Fwd thread id"] = 1
    return made


def owned(*events: Event) -> dict[str, tuple[str | None, Cost | Missing | None]]:
    """Return kernel -> (owner, cost of the call)."""
    trace = linked(*steps(0, 10_000), *events)
    found, names = find_attributed_ops(trace, on_cpu=False), trace.ops["name"].cast(pl.String).to_list()
    rows = zip(trace.kernels["name"].cast(pl.String).to_list(), found.owner.tolist(), found.call.tolist(), strict=True)
    return {name: (names[owner] if owner >= 0 else None, found.costs[row] if row >= 0 else None) for name, owner, row in rows}


def work(name: str, start: float, number: int, length: float = 100) -> list[Event]:
    """Return a launch at `start` of kernel `name`."""
    return [call(start, number), kernel(1000 * number, 1000 * number + length, number, name)]


def flop(found: dict[str, tuple[str | None, Cost | Missing | None]], name: str) -> int:
    cost = found[name][1]
    assert isinstance(cost, Cost), cost
    assert cost.provenance == "derived"
    return cost.matrix_flops


FORWARD = [
    op("aten::conv2d", 0, 50, [X, WEIGHT, [16], [], []], seq=5),
    op("aten::cudnn_convolution", 5, 45, [X, WEIGHT, [], []], seq=5),
    *work("fprop", 10, 1),
]


def test_a_convolution_without_arguments_takes_its_result_from_the_gradient() -> None:
    found = owned(*FORWARD, node("CudnnConvolutionBackward", 500, 600, 5, [OUT]))
    assert flop(found, "fprop") == CONVOLUTION


def test_the_calls_inside_the_paired_convolution_take_it_too() -> None:
    found = owned(
        op("aten::conv2d", 0, 50, [X, WEIGHT, [16], [], []], seq=5),
        op("aten::convolution", 2, 48, [X, WEIGHT, [16], [], []], seq=5),
        op("aten::cudnn_convolution", 5, 45, [X, WEIGHT, [], []]),
        *work("fprop", 10, 1),
        op("autograd::engine::evaluate_function: ConvolutionBackward0", 490, 610, seq=5),
        node("ConvolutionBackward0", 500, 600, 5, [OUT]),
    )
    assert found["fprop"][0] == "aten::cudnn_convolution"
    assert flop(found, "fprop") == CONVOLUTION


def test_a_convolution_without_arguments_or_backward_takes_it_from_the_next_op() -> None:
    counter, norm = op("aten::add_", 60, 65, [[], []]), op("aten::batch_norm", 70, 90, [OUT, [16], [16]])
    assert flop(owned(*FORWARD, counter, norm), "fprop") == CONVOLUTION


@pytest.mark.parametrize(
    "after",
    [
        [],
        [op("aten::conv2d", 60, 70, [OUT, [16, 16, 1, 1]])],  # may read the same input
        [op("aten::relu", 60, 70, [[2, 15, 7, 7]])],  # other channels
        [op("aten::relu", 60, 70, [OUT], tid=2)],  # another thread
        [op("aten::add_", 60 + 5 * n, 63 + 5 * n, [[], []]) for n in range(4)] + [op("aten::relu", 90, 95, [OUT])],  # too far
    ],
)
def test_an_op_that_may_not_take_the_result_tells_nothing(after: list[Event]) -> None:
    owner, cost = owned(*FORWARD, *after)["fprop"]
    assert owner == "aten::cudnn_convolution"
    assert isinstance(cost, Missing)


def test_a_gradient_that_cannot_be_of_the_result_is_not_used() -> None:
    assert isinstance(owned(*FORWARD, node("CudnnConvolutionBackward", 500, 600, 5, [[3, 16, 7, 7]]))["fprop"][1], Missing)


def test_a_weight_gradient_alone_takes_the_weight_from_the_forward() -> None:
    found = owned(
        *FORWARD,
        node("CudnnConvolutionBackward", 500, 600, 5, [OUT]),
        op("aten::cudnn_convolution_backward", 510, 590, [X, OUT, WEIGHT]),
        op("aten::cudnn_convolution_backward_weight", 520, 580, [[], OUT, X]),
        *work("wgrad", 530, 2),
    )
    assert flop(found, "wgrad") == CONVOLUTION


def test_kernels_under_a_node_without_shapes_cost_two_products() -> None:
    found = owned(
        op("aten::addmm", 0, 50, [[16], [64, 32], [32, 16]], seq=5),
        node("AddmmBackward0", 500, 600, 5),
        op("aten::mm", 510, 520),
        *work("dgrad", 511, 1),
        op("aten::mm", 530, 540),
        *work("wgrad", 531, 2),
    )
    assert found["dgrad"][0] == found["wgrad"][0] == "AddmmBackward0"
    assert flop(found, "dgrad") == 2 * 2 * 64 * 32 * 16


def test_a_node_whose_calls_carry_their_own_cost_adds_none() -> None:
    found = owned(
        op("aten::addmm", 0, 50, [[16], [64, 32], [32, 16]], seq=5),
        node("AddmmBackward0", 500, 600, 5, [[64, 16]]),
        op("aten::mm", 510, 520, [[64, 16], [16, 32]]),
        *work("dgrad", 511, 1, length=100),
        *work("odd", 550, 2, length=10),
    )
    assert found["dgrad"][0] == "aten::mm"
    assert not isinstance(found["odd"][1], Cost)


def test_work_of_the_engine_around_a_node_and_recomputed_work_are_not_the_nodes() -> None:
    found = owned(
        op("aten::addmm", 0, 50, [[16], [64, 32], [32, 16]], seq=5),
        op("autograd::engine::evaluate_function: AddmmBackward0", 490, 700, seq=5),
        node("AddmmBackward0", 500, 600, 5),
        op("mine::again", 505, 508, seq=9),
        *work("again", 506, 3),
        op("aten::mm", 510, 520),
        *work("dgrad", 511, 1),
        *work("hook", 650, 2),
    )
    assert found["dgrad"][0] == "AddmmBackward0"
    assert not isinstance(found["again"][1], Cost)
    assert not isinstance(found["hook"][1], Cost)


def matrix_flop(trace: Trace) -> dict[str, int]:
    """Return the matrix FLOP by phase over the distinct owners of kernels, recomputed ones apart."""
    found: AttributedOps = find_attributed_ops(trace, on_cpu=False)
    calls = dict(zip(found.owner.tolist(), found.call.tolist(), strict=True))
    phases, again = trace.ops["phase"].to_list(), trace.ops["recompute"].to_list()
    sums: dict[str, int] = {}
    for owner, row in calls.items():
        cost = found.costs[row] if owner >= 0 else None
        if isinstance(cost, Cost):
            word = "again" if again[owner] else str(phases[owner])
            sums[word] = sums.get(word, 0) + cost.matrix_flops
    return sums


def real(path: Path) -> Trace:
    trace = kept.tables(path)
    return link_kernels(trace, find_steps(trace).table, on_cpu=False)[0]


def test_a_real_backward_costs_the_same_without_its_shapes(traces: Path) -> None:
    """Also of the first layer, whose input needs no gradient: no kernel names one."""
    trace = real(traces / "mi300x_resnet18_ddp8_actckpt_train_rank0.json.gz")
    parent = trace.ops["parent"].fill_null(-1).to_numpy()
    backward = pl.Series(find_nearest(parent, find_autograd_nodes(trace.ops)) >= 0) & ~trace.ops["recompute"]
    blind = trace.ops.with_columns(signature=pl.when(backward).then(None).otherwise("signature"))
    full, stripped = matrix_flop(trace), matrix_flop(msgspec.structs.replace(trace, ops=blind))
    assert stripped["backward"] == full["backward"]
    assert (stripped["forward"], stripped["again"]) == (full["forward"], full["again"])


def test_a_real_forward_without_arguments_costs_the_same_by_gradient_and_by_next_op(traces: Path) -> None:
    trace = real(traces / "v100_resnet50_train_2021_memory_callstack.json.gz")
    alone = msgspec.structs.replace(trace, ops=trace.ops.with_columns(sequence=pl.lit(None, dtype=pl.Int64)))
    images = 6 * 32
    convolutions = 4_089_184_256 - 2048 * 1000
    assert matrix_flop(trace)["forward"] == pytest.approx(2 * images * (convolutions + 2048 * 1000), rel=1e-3)
    assert matrix_flop(alone)["forward"] == matrix_flop(trace)["forward"]


def vector(found: dict[str, tuple[str | None, Cost | Missing | None]], name: str) -> Cost:
    cost = found[name][1]
    assert isinstance(cost, Cost), cost
    assert cost.provenance == "derived"
    return cost


@pytest.mark.parametrize("products", [1, 2])
def test_a_layer_has_as_many_gradients_as_products_run_in_its_node(products: int) -> None:
    """The first layer's input needs none: one product in place of two."""
    inner = [event for n in range(products) for event in (op("aten::mm", 510 + 20 * n, 525 + 20 * n), *work(f"mm{n}", 512 + 20 * n, 2 + n))]
    forward = op("aten::addmm", 0, 50, [[16], [64, 32], [32, 16], [], []], seq=5)
    found = owned(forward, *work("forward", 10, 1), node("AddmmBackward0", 500, 600, 5), *inner)
    assert flop(found, "mm0") == products * 2 * 64 * 32 * 16


X4 = 4 * 64 * 128
"""Bytes of one fp32 tensor of the cases below."""


@pytest.mark.parametrize(
    ("forward", "shapes", "concrete", "name", "moved"),
    [
        ("aten::gelu", [[64, 128], []], None, "GeluBackward0", 3 * X4),
        ("aten::relu_", [[64, 128]], None, "ReluBackward0", 3 * X4),
        ("aten::mul", [[64, 128], [64, 128]], None, "MulBackward0", 5 * X4),
        ("aten::mul", [[64, 128], []], None, "MulBackward0", 3 * X4),
        ("aten::add", [[64, 128], [128], []], None, "AddBackward0", 2 * X4 + 4 * 128),
        ("aten::_softmax", [[64, 128], [], []], ["", "1", "False"], "SoftmaxBackward0", 3 * X4),
        ("aten::native_layer_norm", [[64, 128], [], [128], [128], []], None, "NativeLayerNormBackward0", 3 * X4 + 3 * 512 + 2 * 4 * 64),
        ("aten::mse_loss", [[64, 128], [64, 128], []], ["", "", "1"], "MseLossBackward0", 3 * X4 + 4),
        ("aten::mean", [[64, 128], []], ["", ""], "MeanBackward0", X4 + 4),
        ("aten::native_dropout", [[64, 128], [], []], None, "NativeDropoutBackward0", 2 * X4 + 64 * 128),
    ],
)
def test_nodes_without_shapes_cost_what_their_forward_tells(
    forward: str, shapes: list[Any], concrete: list[str] | None, name: str, moved: int
) -> None:
    inner = [op("aten::anything", 510, 560), *work("backward", 520, 2)]
    call = op(forward, 0, 50, shapes, seq=5, concrete=concrete)
    assert vector(owned(call, *work("forward", 10, 1), node(name, 500, 600, 5), *inner), "backward").bytes == moved


def test_a_custom_function_is_not_the_last_op_of_its_forward() -> None:
    inner = [op("aten::anything", 510, 560), *work("backward", 520, 2)]
    found = owned(
        op("aten::mul", 0, 50, [[64, 128], [64, 128]], seq=5), *work("forward", 10, 1), node("MyBlockBackward", 500, 600, 5), *inner
    )
    assert not isinstance(found["backward"][1], Cost)
