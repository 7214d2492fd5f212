"""The CPU as the device: self times as kernels, the time between ops as gaps."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl
import pytest
from handmade import Event, mark, op, steps, trace
from tracecheck import check_trace

from gpudiag.attribution.device import find_cpu_gaps, find_cpu_spans
from gpudiag.attribution.intervals import build_spans, measure_spans, merge_spans
from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.steps import find_steps
from gpudiag.timeline.idle import explain_idle

EVENTS = [
    *steps(0, 100),
    op("aten::linear", 10, 40), op("aten::addmm", 15, 35), op("aten::relu", 50, 60),
    op("gloo:all_reduce", 52, 90, tid=2), op("aten::copy_", 80, 95, tid=3), op("pin", 0, 100, tid=4),
]  # fmt: skip


def test_one_kernel_for_each_op_that_worked() -> None:
    made = trace(*EVENTS)
    made, nesting = link_kernels(made, find_steps(made).table, on_cpu=True)
    check_trace(made, "link")
    names = made.kernels["name"].cast(pl.String).to_list()
    # threads without one aten op are no device, a waiting helper would make it look busy; but the messages of a back end are its work
    assert dict(zip(names, made.kernels["busy_ns"].to_list(), strict=True)) == {
        "aten::linear": 10_000, "aten::addmm": 20_000, "aten::relu": 10_000, "aten::copy_": 15_000,
        "gloo:all_reduce": 38_000,
    }  # fmt: skip
    rows, spans = find_cpu_spans(made.ops, made.kernels, nesting)
    for kernel, busy in made.kernels.select("id", "busy_ns").iter_rows():
        assert measure_spans(merge_spans(spans[rows == kernel])) == busy


def test_gaps_are_the_time_outside_every_op() -> None:
    made = trace(*EVENTS)
    table = find_steps(made).table
    made, nesting = link_kernels(made, table, on_cpu=True)
    _, spans = find_cpu_spans(made.ops, made.kernels, nesting)
    idle = find_cpu_gaps(spans, build_spans(table))
    assert idle.select("start_ns", "end_ns").rows() == [(0, 10_000), (40_000, 50_000), (95_000, 100_000)]


def test_calls_of_torch_distributed_are_communication() -> None:
    ops = ["c10d::allreduce_", "record_param_comms", "_c10d_functional::all_reduce", "gloo:all_reduce", "aten::all", "aten::record_stream"]
    made = trace(*steps(0, 100), *(op(name, 10 * row, 10 * row + 5) for row, name in enumerate(ops)))
    made, _ = link_kernels(made, find_steps(made).table, on_cpu=True)
    assert made.kernels["collective"].to_list() == [True, True, True, True, False, False]


def _annotation(name: str, start: float, end: float) -> Event:
    return mark(name, start, end)


@pytest.mark.parametrize("recorded", [op, _annotation])
def test_compiling_is_no_work_of_the_device(recorded: Callable[[str, float, float], Event]) -> None:
    """Tracing and autotuning run aten ops under torch.compile's own records, which some versions write as ops, some as annotations."""
    events = [
        recorded("entire_frame_compile", 10, 60), recorded("build_guards (dynamo_timed)", 40, 60),
        op("aten::empty_strided", 20, 30), op("aten::mm", 70, 90), op("aten::mm", 15, 25, tid=2),
    ]  # fmt: skip
    made = trace(*steps(0, 100), *events)
    table = find_steps(made).table
    made, nesting = link_kernels(made, table, on_cpu=True)
    check_trace(made, "link")
    assert made.kernels.select(pl.col("name").cast(pl.String), "busy_ns").rows() == [("aten::mm", 10_000), ("aten::mm", 20_000)]
    _, spans = find_cpu_spans(made.ops, made.kernels, nesting)
    idle = find_cpu_gaps(spans, build_spans(table))
    assert idle.select("start_ns", "end_ns").rows() == [(0, 15_000), (25_000, 70_000), (90_000, 100_000)]
    told = explain_idle(made, idle, build_spans(table), table, on_cpu=True)
    compiled = told.filter(pl.col("cause") == "idle_compile")
    assert int((compiled["end_ns"] - compiled["start_ns"]).sum()) == 40_000  # 10 to 15 and 25 to 60


def test_running_compiled_code_is_work() -> None:
    names = ["Torch-Compiled Region: 0/0", "TorchDynamo Cache Lookup", "## Call CompiledFxGraph fx1 ##", "aten::addmm"]
    made = trace(*steps(0, 100), *(op(name, 10 * row, 10 * row + 5) for row, name in enumerate(names)))
    made, _ = link_kernels(made, find_steps(made).table, on_cpu=True)
    assert made.kernels["name"].cast(pl.String).to_list() == names
