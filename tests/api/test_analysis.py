"""One window through the layers: devices, silent recordings, the profiler's slow-down, the parts that must agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import polars as pl
import pytest
from factories import table
from handmade import A100_PROPERTIES, call, kernel, op, steps, write
from tracecheck import check_table, check_trace

from gpudiag import api
from gpudiag.analysis import analyse, estimate_profiler_slowdown
from gpudiag.inputs import resolve_input
from gpudiag.model.analysis import Analysis
from gpudiag.model.report import ReportData, decode_report
from gpudiag.model.trace import TRACE_TABLES

MM = [[2048, 2048], [2048, 2048]]


def analysed(path: Path) -> Analysis:
    return analyse(resolve_input(str(path), None), lambda _: None)


def report(path: Path, *events: dict[str, Any], **header: Any) -> ReportData:
    made = api.diagnose(str(write(path / "t.json", *events, **header)))
    document = json.loads(made.json())
    jsonschema.validate(document, msgspec.json.schema(ReportData), cls=jsonschema.Draft202012Validator)
    assert decode_report(made.json()).breakdown == made.data.breakdown
    made.data.breakdown.validate()
    return made.data


GPU = [
    *steps(0, 10_000, 20_000), op("aten::mm", 100, 200, MM), call(150, 1), kernel(300, 3300, 1, "ampere_sgemm_128x64_nn"),
    op("aten::relu", 5000, 5100, [[2048, 2048]]), call(5050, 2), kernel(6000, 6100, 2, "relu"),
    op("aten::copy_", 10_100, 10_200, [[100], [100]]), call(10_150, 3),
    kernel(11_000, 12_000, 3, "Memcpy HtoD (Pageable -> Device)", bytes=10_000_000),
]  # fmt: skip


@pytest.mark.slow
def test_a_gpu_run(tmp_path: Path) -> None:
    found = report(tmp_path, *GPU, deviceProperties=[A100_PROPERTIES])
    assert found.device is not None
    assert found.device.kind == "gpu"
    assert "A100" in found.device.name
    assert (found.steps.count, found.steps.wall_ns) == (2, 20_000_000)
    parts = found.breakdown.buckets_ns
    assert (parts.compute, parts.exposed_copy, parts.memory + parts.overhead) == (3_000_000, 1_000_000, 100_000)
    assert sum(row.idle_ns for row in found.idle) == found.breakdown.idle_ns == 15_900_000


@pytest.mark.slow
def test_of_several_devices_the_busiest_is_analysed_and_the_others_are_named(tmp_path: Path) -> None:
    fields = {"Collective name": "allreduce", "In msg nelems": 100, "Out msg nelems": 100, "Group size": 2, "dtype": "Float"}
    events = [
        *steps(0, 1000), op("aten::mm", 0, 50, MM), call(10, 1), call(20, 2), call(30, 3),
        kernel(100, 200, 1, "small", device=0), kernel(100, 900, 2, "large", device=1),
        kernel(900, 950, 3, "ncclDevKernel_AllReduce", device=1, **fields),
    ]  # fmt: skip
    found = report(tmp_path, *events)
    assert "device 1 only; not analysed: device 0" in found.trust.warnings
    assert [row.name for row in found.kernels] == ["large", "ncclDevKernel_AllReduce"]
    assert found.device_time is not None
    assert found.device_time.busy_ns == 850_000
    assert [(row.name, row.size, row.bytes) for row in found.collectives] == [("allreduce", 2, 400)]
    made = analysed(tmp_path / "t.json")
    assert made.device_index == 1
    check_trace(made.trace, "cost")
    assert made.trace.collectives["kernel"].to_list() == [1]  # renumbered with the kernels
    assert made.idle["kernel"].unique(maintain_order=True).to_list() == [0, None]


def test_a_gpu_run_without_device_events_is_unknown_and_not_idle(tmp_path: Path) -> None:
    found = report(tmp_path, *steps(0, 1000), op("aten::mm", 0, 50, MM), call(10, 1))
    assert found.breakdown.buckets_ns.unknown == found.breakdown.wall_ns == 1_000_000
    assert (found.device_time, found.idle, found.ops) == (None, (), ())
    assert [text for text in found.trust.warnings if text.startswith("no device events were recorded")]


def test_a_cpu_run(tmp_path: Path) -> None:
    found = report(
        tmp_path, *steps(0, 1000), op("aten::linear", 100, 600, [[64, 32], [16, 32], []]), op("aten::mm", 200, 500, [[64, 32], [32, 16]])
    )
    assert found.device is not None
    assert found.device.kind == "cpu"
    assert found.breakdown.idle_ns == 500_000
    # without peaks only dispatch can be named; the work itself is unknown, and it is said how to know more
    assert (found.breakdown.buckets_ns.overhead, found.breakdown.buckets_ns.unknown) == (200_000, 300_000)
    assert [text for text in found.trust.warnings if "gpudiag.profile" in text and "peak" in text]
    assert found.kernels == ()


@pytest.mark.slow
def test_device_activity_alone_and_ops_without_shapes_say_what_to_record(tmp_path: Path) -> None:
    warnings = report(tmp_path, call(10, 1), kernel(20, 50, 1)).trust.warnings
    assert [text for text in warnings if "no ops were recorded" in text]
    warnings = report(tmp_path, op("aten::mm", 0, 15), call(10, 1), kernel(20, 50, 1)).trust.warnings
    assert [text for text in warnings if "record_shapes=True" in text]


def test_the_idle_table_and_the_op_rows_agree_with_the_breakdown_and_the_kernels(tmp_path: Path) -> None:
    found = analysed(write(tmp_path / "t.json", *GPU, kernel(50, 60, 88, "early"), deviceProperties=[A100_PROPERTIES]))
    for name in TRACE_TABLES:
        check_table(name, getattr(found.trace, name), "cost")
    assert (found.idle["end_ns"] - found.idle["start_ns"]).sum() == found.breakdown.idle_ns
    assert found.op_rows["kernel_ns"].sum() == found.trace.kernels["busy_ns"].sum()


def records(**windows: list[int]) -> pl.DataFrame:
    rows = [{"window": kind, "wall_ns": wall} for kind, walls in windows.items() for wall in walls]
    return table("step_records", [row | {"step": number} for number, row in enumerate(rows)])


def test_slowdown_is_the_ratio_of_the_medians() -> None:
    assert estimate_profiler_slowdown(records(plain=[900, 900, 100, 100, 110], timing=[150, 150, 200])) == pytest.approx(
        1.5
    )  # the first two steps settle


def test_slowdown_needs_three_steps_of_each_kind() -> None:
    assert estimate_profiler_slowdown(records(plain=[1, 1, 100, 100], timing=[150, 150, 200])) is None
    assert estimate_profiler_slowdown(records(plain=[1, 1, 100, 100, 100], timing=[150, 150])) is None
    assert estimate_profiler_slowdown(records(plain=[1, 1, 100, 100, 100], sites=[900, 900, 900])) is None
    assert estimate_profiler_slowdown(records(plain=[0] * 6, timing=[5, 5, 5])) is None
