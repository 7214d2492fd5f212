"""What a program does with a report: findings, ops as a data frame, rows by SQL."""

from __future__ import annotations

from pathlib import Path

import handmade as h
import pytest

import gpudiag
from gpudiag.errors import InputError


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return h.write(tmp_path / "trace.json", *h.PRODUCTS)


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


def test_sql_asks_the_rank_that_the_report_is_about(tmp_path: Path) -> None:
    for rank, steps in ((0, (0, 100, 200, 300)), (1, (0, 100, 200, 300, 400))):
        h.write(tmp_path / f"rank{rank}.json", *h.steps(*steps), *h.PRODUCTS[4:], distributedInfo={"rank": rank, "world_size": 2})
    for rank, count in ((0, 3), (1, 4)):
        report = gpudiag.diagnose(tmp_path, rank=rank)
        assert report.sql("select count(*) as steps from steps").rows() == [(count,)]


def test_ops_become_a_pandas_frame(trace: Path) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    assert list(gpudiag.diagnose(trace).ops.to_pandas()["name"]) == ["aten::mm"]
