"""The op table: one row a (name, phase, module, signature), sums over its calls."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from factories import A100, CPU
from handmade import call, costed, kernel, op, steps

from gpudiag.attribution.steps import find_steps
from gpudiag.model.trace import Trace
from gpudiag.roofline.op_table import BEFORE_WINDOW, build_op_table

MM = [[512, 512], [512, 512]]


def table(*events: dict[str, Any], on_cpu: bool = False) -> tuple[Trace, pl.DataFrame]:
    trace = costed(*events, device=CPU if on_cpu else A100, on_cpu=on_cpu)
    return trace, build_op_table(trace, find_steps(trace).table)


def mm(start: float, correlations: list[int]) -> list[dict[str, Any]]:
    """Return a matrix product with one kernel of 100 us for each correlation, long after the launch."""
    launches = [call(start + 1 + row, number) for row, number in enumerate(correlations)]
    return [op("aten::mm", start, start + 20, MM), *launches, *(kernel(1000 + 100 * n, 1100 + 100 * n, n) for n in correlations)]


def test_sums_over_calls_and_kernels() -> None:
    _, rows = table(*steps(0, 5000), *mm(0, [1, 2]), *mm(30, [3]))
    (row,) = rows.iter_rows(named=True)
    assert (row["name"], row["count"], row["kernel_ns"], row["flops"], row["bytes"]) == (
        "aten::mm",
        2,
        300_000,
        2 * 2 * 512**3,
        2 * 3 * 512 * 512 * 4,
    )
    assert row["flops"] / row["count"] == 2 * 512**3
    assert row["efficiency"] == pytest.approx(row["t_roof_ns"] / row["kernel_ns"])
    assert row["bound"] == "compute"


def test_work_of_other_steps_is_left_out_and_unlinked_work_stands_apart() -> None:
    bounds = [500 * row for row in range(8)]  # seven steps, of which the first and the last are not analysed
    _, rows = table(*steps(*bounds), *mm(10, [1]), *mm(600, [2]), *mm(3100, [3]), kernel(20, 40, 99, "early"), kernel(40, 60, 98, "early"))
    found = {(name, phase): (count, time) for name, phase, count, time in rows.select("name", "phase", "count", "kernel_ns").iter_rows()}
    assert found == {("aten::mm", "forward"): (1, 100_000), ("early", BEFORE_WINDOW): (2, 40_000)}


def test_a_memset_of_an_op_stands_in_its_row_and_hides_nothing() -> None:
    # ROCm does not record how much a memset sets
    events = [*mm(0, [1]), call(15, 2), kernel(2000, 2010, 2, "Memset (Device)")]
    _, rows = table(*steps(0, 5000), *events)
    (row,) = rows.iter_rows(named=True)
    assert (row["count"], row["kernel_ns"], row["flops"], row["provenance"]) == (1, 110_000, 2 * 512**3, "exact")
    assert row["compute_ns"] == 100_000
    assert row["memory_ns"] == 10_000


def test_what_is_not_known_for_every_kernel_is_not_known() -> None:
    _, rows = table(*steps(0, 5000), op("my::op", 0, 10, []), call(5, 1), kernel(100, 200, 1))
    assert rows.select("flops", "bytes", "t_roof_ns", "efficiency", "bound", "provenance").rows() == [
        (None, None, None, None, "unknown", "none")
    ]


def test_kernels_without_an_op_stand_under_their_own_name_each_a_call() -> None:
    _, rows = table(*steps(0, 5000), call(1, 1), call(2, 2), kernel(10, 20, 1, "raw"), kernel(20, 40, 2, "raw"))
    assert rows.select("name", "phase", "count", "kernel_ns").rows() == [("raw", None, 2, 30_000)]


def test_work_without_length_has_no_efficiency() -> None:
    _, rows = table(*steps(0, 5000), op("aten::relu", 0, 10, [[1000]]), call(5, 1), kernel(100, 100, 1))
    assert rows.select("kernel_ns", "efficiency").rows() == [(0, None)]


def test_on_a_cpu_the_rows_hold_the_self_times_of_the_steps() -> None:
    events = [
        op("aten::linear", 0, 50, [[64, 32], [16, 32], []]),
        op("aten::mm", 10, 40, [[64, 32], [32, 16]]),
        op("aten::relu", 60, 90, [[64, 16]]),
    ]
    trace, rows = table(*steps(0, 100), *events, op("aten::relu", 110, 120, [[64, 16]]), on_cpu=True)
    assert rows["kernel_ns"].sum() == 80_000  # the last op lies outside every step
    assert trace.kernels["busy_ns"].sum() == 90_000
    assert dict(rows.select("name", "bound").iter_rows())["aten::linear"] == "overhead"
