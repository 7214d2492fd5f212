"""The CPU as the device: self times as kernels, the time between ops as gaps."""

from __future__ import annotations

import polars as pl
from handmade import op, steps, trace

from gpudiag.attribution.cpu import cpu_spans
from gpudiag.attribution.gaps import cpu_gaps
from gpudiag.attribution.intervals import of, total, union
from gpudiag.attribution.links import link
from gpudiag.attribution.steps import find_steps
from gpudiag.model import trace as model

EVENTS = [
    *steps(0, 100),
    op("aten::linear", 10, 40), op("aten::addmm", 15, 35), op("aten::relu", 50, 60),
    op("gloo:all_reduce", 52, 90, tid=2), op("aten::copy_", 80, 95, tid=3), op("pin", 0, 100, tid=4),
]  # fmt: skip


def test_one_kernel_for_each_op_that_worked() -> None:
    made = trace(*EVENTS)
    made, nesting = link(made, find_steps(made).table, on_cpu=True)
    model.check(made, "link")
    names = made.kernels["name"].cast(pl.String).to_list()
    # threads without one aten op are no device, a waiting helper would make it look busy; but the messages of a back end are its work
    assert dict(zip(names, made.kernels["busy_ns"].to_list(), strict=True)) == {
        "aten::linear": 10_000, "aten::addmm": 20_000, "aten::relu": 10_000, "aten::copy_": 15_000,
        "gloo:all_reduce": 38_000,
    }  # fmt: skip
    rows, spans = cpu_spans(made.ops, made.kernels, nesting)
    for kernel, busy in made.kernels.select("id", "busy_ns").iter_rows():
        assert total(union(spans[rows == kernel])) == busy


def test_gaps_are_the_time_outside_every_op() -> None:
    made = trace(*EVENTS)
    table = find_steps(made).table
    made, nesting = link(made, table, on_cpu=True)
    _, spans = cpu_spans(made.ops, made.kernels, nesting)
    idle = cpu_gaps(spans, of(table))
    assert idle.select("start_ns", "end_ns").rows() == [(0, 10_000), (40_000, 50_000), (95_000, 100_000)]


def test_calls_of_torch_distributed_are_communication() -> None:
    ops = ["c10d::allreduce_", "record_param_comms", "_c10d_functional::all_reduce", "gloo:all_reduce", "aten::all", "aten::record_stream"]
    made = trace(*steps(0, 100), *(op(name, 10 * row, 10 * row + 5) for row, name in enumerate(ops)))
    made, _ = link(made, find_steps(made).table, on_cpu=True)
    assert made.kernels["collective"].to_list() == [True, True, True, True, False, False]
