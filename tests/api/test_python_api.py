"""What a program does with a report: findings, ops as a data frame, rows by SQL."""

from __future__ import annotations

from pathlib import Path

import handmade as h
import pytest

import gpudiag
from gpudiag.errors import InputError


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    events = [
        event
        for step, start in enumerate((0, 100, 200))
        for event in (
            h.op("aten::mm", start + 10, start + 30, [[64, 64], [64, 64]]),
            h.call(start + 15, step + 1),
            h.kernel(start + 25, start + 65, step + 1),
        )
    ]
    return h.write(tmp_path / "trace.json", *h.steps(0, 100, 200, 300), *events)


def test_a_report_gives_findings_ops_and_rows_by_sql(trace: Path) -> None:
    report = gpudiag.diagnose(trace)
    assert report.findings == report.data.findings
    ops = report.ops.to_polars()
    assert ops["name"].to_list() == [row.name for row in report.ops] == ["aten::mm"]
    assert ops["kernel_ns"].sum() == 3 * 40_000
    asked = report.sql("select count(*) as calls, sum(busy_ns) as ns from kernels")
    assert asked.rows() == [(3, 120_000)]
    with pytest.raises(InputError, match="did you mean"):
        report.sql("select * from kernel")


def test_ops_become_a_pandas_frame(trace: Path) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    assert list(gpudiag.diagnose(trace).ops.to_pandas()["name"]) == ["aten::mm"]
