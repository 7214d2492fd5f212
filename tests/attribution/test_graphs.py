"""Replayed graphs find the ops of their capture pass, and only theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kept
import msgspec
import numpy as np
import polars as pl
import pytest
from handmade import Event, call, kernel, linked, op
from noticewords import format_notices
from realtraces import reference
from tracecheck import check_trace

from gpudiag.attribution.cuda_graphs import map_replays
from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.steps import find_steps
from gpudiag.model.notices import format_notice
from gpudiag.model.ops import Cost
from gpudiag.model.trace import Trace
from gpudiag.roofline.attributed_ops import find_attributed_ops

GEMM, ADD, NORM = (
    "ampere_sgemm_128x64_nn",
    "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>",
    "vectorized_layer_norm_kernel",
)


def captured(
    start: float, size: int, first: int, *, names: tuple[str, ...] = ("aten::mm", "aten::add", "aten::native_layer_norm")
) -> list[Event]:
    """Return a capture pass from `start` on: three ops on [size, size] whose launches (correlation from `first`) start no kernel."""
    shapes = [[size, size], [size, size]]
    events = [call(start, first, api="cudaStreamBeginCapture")]
    for row, name in enumerate(names):
        begin = start + 10 * (row + 1)
        events += [op(name, begin, begin + 8, shapes), call(begin + 2, first + 1 + row)]
    return [*events, call(start + 90, first + 9, api="cudaStreamEndCapture")]


def replayed(start: float, correlation: int, *names: str, **args: Any) -> list[Event]:
    """Return a graph launch and its kernels, one after the other."""
    kernels = [kernel(start + 20 + 10 * row, start + 28 + 10 * row, correlation, name, **args) for row, name in enumerate(names)]
    return [call(start, correlation, api="cudaGraphLaunch"), *kernels]


def ops_of_kernels(trace: Trace) -> list[str | None]:
    """Return the op name behind each replayed kernel."""
    names = trace.ops["name"].cast(pl.String)
    return names.gather(trace.kernels.filter("replay")["op"]).to_list()


def test_each_replay_counts_its_work() -> None:
    trace = linked(*captured(0, 64, 100), *replayed(1000, 1, GEMM, ADD, NORM), *replayed(2000, 2, GEMM, ADD, NORM))
    mapped, notes = map_replays(trace)
    check_trace(mapped, "link")
    assert notes == ()
    assert mapped.kernels["mapped"].all()
    assert ops_of_kernels(mapped) == ["aten::mm", "aten::add", "aten::native_layer_norm"] * 2
    owners = find_attributed_ops(mapped, on_cpu=False)
    products = [owners.costs[row] for row in owners.call if owners.names[row] == "aten::mm"]
    assert [cost.matrix_flops for cost in products if isinstance(cost, Cost)] == [2 * 64**3] * 2
    assert len(set(owners.owner.tolist())) == 6  # a call for each replay: their kernels do not share one cost
    copies = mapped.ops.filter(pl.col("id") >= trace.ops.height)
    assert copies["step"].null_count() == copies.height == 6
    assert mapped.ops.head(trace.ops.height).equals(trace.ops)


def test_kernels_of_another_model_stay_unmapped() -> None:
    softmax = "void softmax_warp_forward<float>"
    mapped, (note,) = map_replays(linked(*captured(0, 64, 100), *replayed(1000, 1, softmax, softmax, GEMM)))
    assert not mapped.kernels["mapped"].any()
    assert "1 of 1 graph launches fit none of the 1 captured graph" in format_notice(note)


def test_an_op_that_no_name_decides_is_no_evidence() -> None:
    unknown = ("my::first", "my::second", "my::third", "my::fourth", "aten::add")
    mapped, _ = map_replays(linked(*captured(0, 64, 100, names=unknown), *replayed(1000, 1, GEMM, NORM, GEMM, NORM, ADD)))
    assert not mapped.kernels["mapped"].any()


def test_two_sizes_with_the_same_kernels_are_told_apart_by_grids_or_not_at_all() -> None:
    row = "void softmax_warp_forward<float>"
    names = ("aten::softmax", "aten::softmax", "aten::softmax")
    events = [*captured(0, 64, 100, names=names), *captured(200, 32, 200, names=names)]
    by_grid, notes = map_replays(linked(*events, *replayed(1000, 1, row, row, row, grid=[32, 1, 1])))
    assert by_grid.kernels["mapped"].all()
    assert notes == ()
    shapes = by_grid.signatures["shapes"].gather(by_grid.ops["signature"].gather(by_grid.kernels["op"])).to_list()
    assert shapes == ["[[32, 32], [32, 32]]"] * 3
    open_grid, (note,) = map_replays(linked(*events, *replayed(1000, 1, row, row, row, grid=[7, 1, 1])))
    assert not open_grid.kernels["mapped"].any()
    assert "equally well" in format_notice(note)


def test_the_same_sizes_captured_twice_say_the_same() -> None:
    mapped, notes = map_replays(linked(*captured(0, 64, 100), *captured(200, 64, 200), *replayed(1000, 1, GEMM, ADD, NORM)))
    assert mapped.kernels["mapped"].all()
    assert notes == ()


def test_node_ids_give_the_order_of_parallel_branches() -> None:
    launch = call(1000, 1, api="cudaGraphLaunch")
    late = [kernel(1060, 1068, 1, GEMM, stream=7, **{"graph node id": 1})]
    early = [kernel(1020, 1028, 1, ADD, stream=8, **{"graph node id": 2}), kernel(1030, 1038, 1, NORM, stream=8, **{"graph node id": 3})]
    mapped, _ = map_replays(linked(*captured(0, 64, 100), launch, *late, *early))
    names = dict(zip(mapped.kernels["name"].cast(pl.String), ops_of_kernels(mapped), strict=True))
    assert names == {GEMM: "aten::mm", ADD: "aten::add", NORM: "aten::native_layer_norm"}


def test_launches_of_autograd_threads_belong_to_the_capture() -> None:
    backward = [op("aten::mm", 50, 58, [[64, 64], [64, 64]], tid=2), call(52, 150, tid=2)]
    mapped, _ = map_replays(linked(*captured(0, 64, 100), *backward, *replayed(1000, 1, GEMM, ADD, NORM, GEMM)))
    assert ops_of_kernels(mapped) == ["aten::mm", "aten::add", "aten::native_layer_norm", "aten::mm"]


def test_a_memset_that_was_not_recorded_does_not_shift_the_rest() -> None:
    memset = [op("aten::zero_", 45, 48, [[8]]), call(46, 150, api="cudaMemsetAsync")]
    mapped, _ = map_replays(linked(*captured(0, 64, 100), *memset, *replayed(1000, 1, GEMM, ADD, NORM)))
    assert ops_of_kernels(mapped) == ["aten::mm", "aten::add", "aten::native_layer_norm"]


def test_one_kernel_more_than_was_issued_is_left_out() -> None:
    names = ("aten::mm", "aten::add", "aten::native_layer_norm") * 8
    kernels = [GEMM, ADD, NORM] * 8
    begin, *body, end = [*captured(0, 64, 100, names=names[:3]), call(900, 999, api="cudaStreamEndCapture")]
    del body[-1]
    for row, name in enumerate(names[3:]):
        body += [op(name, 100 + 10 * row, 108 + 10 * row, [[64, 64], [64, 64]]), call(102 + 10 * row, 300 + row)]
    extra = [*kernels[:10], "void softmax_warp_forward<float>", *kernels[10:]]
    mapped, (note,) = map_replays(linked(begin, *body, end, *replayed(1000, 1, *extra)))
    assert ops_of_kernels(mapped) == [*names[:10], None, *names[10:]]
    assert "96.0 %" in format_notice(note)


@pytest.mark.parametrize("api", ["cudaStreamBeginCapture", "cudaStreamEndCapture"])
def test_half_a_capture_is_none(api: str) -> None:
    trace = linked(call(0, 100, api=api), op("aten::mm", 10, 18, [[8, 8], [8, 8]]), call(12, 101), *replayed(1000, 1, GEMM))
    assert map_replays(trace) == (trace, ())


def _linked(path: Path) -> Trace:
    trace = kept.tables(path)
    return link_kernels(trace, find_steps(trace).table, on_cpu=False)[0]


@pytest.fixture(scope="module")
def served(traces: Path) -> tuple[Trace, Trace]:
    """A decoding step that replays one graph, and the recording of that graph's capture."""
    name = "mi300x_vllm_gptoss_decode_fullgraph"
    return _linked(traces / f"{name}.json.gz"), _linked(traces / f"{name}_capture.json.gz")


def test_a_served_model_maps_whole_and_its_products_equal_the_reference(served: tuple[Trace, Trace], traces: Path) -> None:
    mapped, notes = map_replays(served[0], (served[1],))
    check_trace(mapped, "link")
    assert notes == ()
    assert (mapped.kernels["mapped"].sum(), mapped.kernels["replay"].sum()) == (421, 421)
    owners = find_attributed_ops(mapped, on_cpu=False)
    found: dict[tuple[int, int], int] = {}
    for row in owners.call[owners.owner >= 0]:
        cost = owners.costs[row]
        if owners.names[row] in ("aten::mm", "aten::addmm") and isinstance(cost, Cost):
            found[cost.matrix_flops, cost.bytes] = found.get((cost.matrix_flops, cost.bytes), 0) + 1
    rows = [row for row in reference(traces, "mi300x_vllm_gptoss_decode_fullgraph")["tracelens"]["GEMM"] if row["op"].startswith("aten::")]
    expected = {}
    for row in rows:  # the reference adds one FLOP an element for the bias
        m, n, k = (row["param"][name] for name in "MNK")
        assert row["flops_per_call"] == 2 * m * n * k + m * n * bool(row["param"]["bias"])
        expected[2 * m * n * k, row["bytes_per_call"]] = row["count"]
    assert found == expected


def test_without_kernel_names_at_the_launches_the_classes_decide(served: tuple[Trace, Trace]) -> None:
    """As on CUDA, where a launch does not say what it launches."""
    launches = served[1].launches.with_columns(pl.lit(None, dtype=pl.Categorical()).alias("kernel"))
    blind = msgspec.structs.replace(served[1], launches=launches)
    told, guessed = (map_replays(served[0], (capture,))[0] for capture in (served[1], blind))
    both = told.kernels["mapped"] & guessed.kernels["mapped"]
    assert both.sum() >= 0.95 * 421
    first, second = (np.array(trace.ops["name"].cast(pl.String).gather(trace.kernels["op"].filter(both))) for trace in (told, guessed))
    assert (first == second).all()


def test_a_capture_in_another_order_is_refused(served: tuple[Trace, Trace]) -> None:
    capture = served[1]
    shuffled = capture.launches.with_columns(pl.col("op").shuffle(seed=1), pl.lit(None, dtype=pl.Categorical()).alias("kernel"))
    mapped, notes = map_replays(served[0], (msgspec.structs.replace(capture, launches=shuffled),))
    assert not mapped.kernels["mapped"].any()
    assert "fit none" in format_notices(notes)[0]


def test_a_backward_pass_that_was_captured_finds_its_forward() -> None:
    """A fused autograd node without shapes: its copy keeps the number by which the forward op is found, the forward's copy does not."""
    forward = [op("aten::mm", 20, 28, [[64, 64], [64, 64]], seq=5), call(22, 11)]
    node = op("MmBackward0", 40, 48, seq=5, tid=2)
    node["args"]["Fwd thread id"] = 1
    events = [call(0, 10, api="cudaStreamBeginCapture"), *forward, node, call(42, 12, tid=2), call(90, 19, api="cudaStreamEndCapture")]
    mapped, _ = map_replays(linked(*events, *replayed(1000, 1, GEMM, GEMM), *replayed(2000, 2, GEMM, GEMM)))
    assert ops_of_kernels(mapped) == ["aten::mm", "MmBackward0"] * 2
    owners = find_attributed_ops(mapped, on_cpu=False)
    costs = [owners.costs[row] for row in owners.call]
    assert [cost.matrix_flops for cost in costs if isinstance(cost, Cost)] == [2 * 64**3, 4 * 64**3] * 2


@pytest.mark.slow
def test_whatever_order_events_come_in_the_tables_stay_sound() -> None:
    """Captures that overlap, nest or never end, calls without an op or a correlation, kernels of many graphs under one number."""
    random = np.random.default_rng(3)
    apis = ("cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaLaunchKernel", "cudaMemsetAsync", "cudaGraphLaunch", "cuLaunchKernelEx")
    for _ in range(15):
        events: list[Event] = []
        for _ in range(30):
            start, length, number = (int(value) for value in random.integers(0, [200, 30, 12]))
            tid, pick = int(random.integers(1, 3)), int(random.integers(0, 8))
            if pick < len(apis):
                events.append(call(start, number or None, api=apis[pick], end=start + length, tid=tid))
            elif pick == 6:
                events.append(op(("aten::mm", "aten::add", "my::op")[number % 3], start, start + length, [[8, 8], [8, 8]], tid=tid))
            events.append(kernel(300 + start, 300 + start + length, number, (GEMM, ADD, "Memset (Device)")[number % 3]))
        trace = linked(*events)
        mapped, _ = map_replays(trace, (trace,) if random.integers(0, 2) else ())
        check_trace(mapped, "link")
        assert mapped.kernels.drop("op", "mapped").equals(trace.kernels.drop("op", "mapped"))
        assert mapped.kernels.filter("mapped")["op"].null_count() == 0
        assert mapped.ops["parent"].drop_nulls().is_between(0, mapped.ops.height - 1).all()
        find_attributed_ops(mapped, on_cpu=False)
