"""From an analysis to the report: signatures as text, call sites, kernel, idle and collective rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
import simulator as s
from handmade import call, kernel, op, steps, write
from jobviews import partly
from noticewords import texts

from gpudiag import api
from gpudiag.analysis import analyse
from gpudiag.inputs import resolve_input
from gpudiag.model.ops import format_signature, parse_signature
from gpudiag.model.report import ReportData, Source, Tool, encode_report
from gpudiag.report_data import LONGEST_TEXT, build_report_data


def report(folder: Path, *events: dict[str, Any]) -> ReportData:
    return api.diagnose(str(write(folder / "t.json", *events))).data


def test_signatures_as_people_write_them() -> None:
    def text(shapes: str, dtypes: str) -> str:
        return format_signature(parse_signature(shapes, dtypes, None, None))

    assert text("[[141, 512], [512, 64], []]", '["c10::BFloat16", "c10::BFloat16", "Scalar"]') == "[141, 512] [512, 64] bf16"
    assert text("[[8], [8]]", '["float", "long int"]') == "[8] [8] fp32/int64"
    assert text("[[[2, 3], [4]], []]", '["TensorList", ""]') == "2 tensors"
    assert text("[]", "[]") == ""


def test_the_site_of_a_row_is_the_one_that_costs_most(tmp_path: Path) -> None:
    events = [op("aten::relu", start, start + 10, [[100]]) for start in (0, 20, 40)]
    launches = [call(start + 5, start + 1) for start in (0, 20, 40)]
    kernels = [kernel(100, 110, 1), kernel(110, 120, 21), kernel(120, 150, 41)]
    analysis = analyse(resolve_input(str(write(tmp_path / "t.json", *steps(0, 200), *events, *launches, *kernels)), None), lambda _: None)
    analysis = msgspec.structs.replace(analysis, sites=pl.Series(["a.py(1): f", "a.py(1): f", "b.py(2): g"]))
    found = build_report_data(analysis, (), (), tool=Tool("gpudiag", "0"), source=Source("t", "trace"))
    assert [(row.count, row.where) for row in found.ops] == [(3, "b.py(2): g")]


def test_rows_of_kernels_name_the_op_with_most_of_their_time(tmp_path: Path) -> None:
    events = [op("aten::add", 0, 10, [[9]]), op("aten::mul", 20, 30, [[9]]), call(5, 1), call(25, 2), call(26, 3)]
    found = report(tmp_path, *steps(0, 500), *events, kernel(100, 130, 1, "vec"), kernel(130, 150, 2, "vec"), kernel(150, 170, 3, "vec"))
    assert [(row.name, row.kind, row.count, row.kernel_ns, row.op) for row in found.kernels] == [("vec", "kernel", 3, 70_000, "aten::mul")]


def test_idle_rows_are_cut_to_the_steps_and_sum_to_the_idle_time(tmp_path: Path) -> None:
    bounds = [100 * row for row in range(8)]  # the first and the last of seven steps are not analysed
    events = [
        op("aten::add", 0, 10, [[9]]),
        call(5, 1),
        kernel(50, 250, 1),
        op("aten::mul", 260, 270, [[9]]),
        call(265, 2),
        kernel(450, 690, 2),
    ]
    found = report(tmp_path, *steps(*bounds), *events)
    assert found.steps.wall_ns == 500_000
    assert sum(row.idle_ns for row in found.idle) == found.breakdown.idle_ns == 200_000
    assert {row.op for row in found.idle} == {"aten::mul"}


def test_collectives_by_name_group_and_size_of_the_message(tmp_path: Path) -> None:
    fields = {
        "Collective name": "allreduce",
        "In msg nelems": 1000,
        "Out msg nelems": 1000,
        "Group size": 8,
        "dtype": "BFloat16",
        "Process Group Name": "dp",
    }
    kernels = [kernel(10 * n, 10 * n + 5, n, "ncclDevKernel_AllReduce", **fields) for n in (1, 2)]
    gather = kernel(
        50, 90, 3, "ncclDevKernel_AllGather", **fields | {"Collective name": "allgather", "In msg nelems": 100, "dtype": "Float8_e4m3fn"}
    )
    found = report(tmp_path, *steps(0, 100), *kernels, gather, kernel(92, 93, 4, "ncclDevKernel_SendRecv"))
    assert [(row.name, row.group, row.size, row.bytes, row.count, row.kernel_ns) for row in found.collectives] == [
        ("allgather", "dp", 8, 1000, 1, 40_000),
        ("allreduce", "dp", 8, 2000, 2, 10_000),
        ("ncclDevKernel_SendRecv", None, None, None, 1, 1000),
    ]  # fmt: skip


def test_quantiles_of_the_steps(tmp_path: Path) -> None:
    found = report(tmp_path, *steps(0, 100, 300, 600), op("aten::add", 0, 5, [[9]]))
    assert (found.steps.median_ns, found.steps.p95_ns, found.steps.recorded) == (200_000, 290_000, 3)


@pytest.mark.slow
def test_a_name_of_ten_megabytes_does_not_pass_through(tmp_path: Path) -> None:
    huge = "void kernel<" + "x" * 10_000_000
    made = report(tmp_path, op("aten::mm", 10, 20, [[64, 32], [32, 16]]), call(12, 1), kernel(13, 18, 1, huge), *steps(0, 50))
    assert [len(row.name) for row in made.kernels] == [LONGEST_TEXT]
    assert len(encode_report(made)) < 200_000


def test_idle_time_and_calls_that_wait_carry_their_lines(tmp_path: Path) -> None:
    layer = s.op("aten::mm", [s.python(40), s.launch("gemm_kernel", 20)])
    program = [s.step(), *[layer] * 6, s.frame("exp/train.py(41): log", [s.item()])] * 5
    run = s.simulate([*program, s.step()], recording=s.Recording(stacks=True))
    made = api.diagnose(str(run.write(tmp_path / "trace.json"))).data
    assert sum(row.idle_ns for row in made.idle) == made.breakdown.idle_ns
    assert [row.idle_ns for row in made.idle] == sorted((row.idle_ns for row in made.idle), reverse=True)
    assert all(row.evidence for row in made.idle if row.cause != "idle_unexplained")
    read = next(row for row in made.syncs if row.op == "aten::item")
    assert (read.file, read.line, read.count) == ("exp/train.py", 41, made.steps.count)
    assert 0 <= read.cost_ns <= read.wall_ns
    assert sum(row.cost_ns for row in made.syncs) == made.breakdown.buckets_ns.idle_sync


def test_a_job_is_put_into_the_report_with_its_ranks_and_warnings(tmp_path: Path) -> None:
    alone = analyse(resolve_input(str(write(tmp_path / "t.json", *steps(0, 200), op("aten::relu", 0, 10, [[100]]))), None), lambda _: None)
    one = msgspec.structs.replace(alone, notices=texts("its own", "rank 3 could not be read"), job=partly())
    found = build_report_data(one, (), (), tool=Tool("gpudiag", "0"), source=Source("t", "folder", tuple(range(8))))
    assert found.job == partly()
    assert found.ranks == partly().ranks
    assert found.trust.warnings[:2] == ("rank 3 could not be read", "its own")  # each once
    made = build_report_data(alone, (), (), tool=Tool("gpudiag", "0"), source=Source("t", "trace"))
    assert (made.job, made.ranks) == (None, None)
