"""Gaps of a device: what ended each, over several streams."""

from __future__ import annotations

import polars as pl
from handmade import call, kernel, linked, mark, op, steps
from tracecheck import check_table

from gpudiag.attribution.device import find_cpu_gaps, find_gaps
from gpudiag.attribution.intervals import NO_SPANS, build_spans
from gpudiag.attribution.steps import find_steps


def found(*events: dict[str, object]) -> list[tuple[float, float, str, int | None]]:
    trace = linked(*events)
    idle = find_gaps(trace.kernels, trace.launches, build_spans(find_steps(trace).table.filter("analysed")))
    check_table("gaps", idle)
    return [
        (start / 1000, end / 1000, kind, kernel)
        for start, end, kind, kernel in idle.select("start_ns", "end_ns", "kind", "kernel").iter_rows()
    ]


def test_kinds_of_gaps() -> None:
    events = [
        call(5, 1), kernel(10, 20, 1),  # launched at 5, while idle since 0: host_wait
        call(22, 2), kernel(30, 40, 2),  # launched at 22, idle since 20: host_wait
        call(35, 3), kernel(50, 60, 3),  # launched at 35, before the device fell idle at 40: queued
        kernel(70, 80, 99),  # no launch record
    ]  # fmt: skip
    assert found(*steps(0, 100), *events) == [
        (0, 10, "host_wait", 0), (20, 30, "host_wait", 1), (40, 50, "queued", 2), (60, 70, "unlinked", 3), (80, 100, "edge", None),
    ]  # fmt: skip


def test_a_gap_is_idle_time_of_all_streams_and_copies_are_work() -> None:
    events = [call(0, 1), call(1, 2), kernel(10, 30, 1, stream=7), kernel(20, 50, 2, "Memcpy HtoD (Pinned -> Device)", stream=8)]
    assert [(start, end) for start, end, _, _ in found(*steps(0, 60), *events)] == [(0, 10), (50, 60)]


def test_a_launch_at_the_very_moment_the_device_falls_idle_was_no_wait() -> None:
    assert found(*steps(0, 50), call(0, 1), kernel(0, 20, 1), call(20, 2), kernel(30, 50, 2)) == [(20, 30, "queued", 1)]


def test_work_without_length_ends_no_gap() -> None:
    events = [call(5, 1), call(6, 2), kernel(10, 10, 9, "Memset (Device)"), kernel(10, 20, 1), kernel(15, 15, 2)]
    assert found(*steps(0, 20), *events) == [(0, 10, "host_wait", 1)]


def test_work_that_begins_when_the_window_ends_lies_outside() -> None:
    assert found(*steps(0, 20), call(0, 1), kernel(0, 10, 1), call(12, 2), kernel(20, 30, 2)) == [(10, 20, "edge", None)]


def test_the_op_behind_a_gap() -> None:
    trace = linked(*steps(0, 100), op("aten::relu", 15, 30), call(20, 1), kernel(40, 100, 1))
    idle = find_gaps(trace.kernels, trace.launches, build_spans(find_steps(trace).table))
    assert trace.ops["name"].cast(pl.String).gather(idle["op"]).to_list() == ["aten::relu"]


def test_no_window_no_gaps() -> None:
    trace = linked(mark("a", 0, 1), kernel(0, 10, 1))
    assert find_gaps(trace.kernels, trace.launches, NO_SPANS).is_empty()
    assert find_cpu_gaps(NO_SPANS, NO_SPANS).is_empty()
