"""The table schemas and their check."""

from __future__ import annotations

import polars as pl
import pytest
from tracecheck import check_table, check_trace

from gpudiag.model import trace
from gpudiag.model.trace import TRACE_TABLES, Trace, TraceMeta

TABLE_STAGES = [(name, stage) for name in trace.TABLES for stage in trace.STAGES]


@pytest.mark.parametrize(("name", "stage"), TABLE_STAGES)
def test_an_empty_table_fits_its_own_schema(name: str, stage: trace.Stage) -> None:
    check_table(name, trace.build_empty_table(name, stage), stage)


@pytest.mark.parametrize("name", list(trace.TABLES))
def test_a_missing_or_retyped_column_is_named(name: str) -> None:
    whole = trace.build_empty_table(name, "cost")
    for column in trace.list_columns(name):
        with pytest.raises(AssertionError, match=f"{name} lacks column {column.name}"):
            check_table(name, whole.drop(column.name), "cost")
        other = pl.Int8() if column.dtype != pl.Int8() else pl.Int16()
        with pytest.raises(AssertionError, match=f"{name}.{column.name} is Int8"):
            check_table(name, whole.with_columns(pl.lit(None).cast(other).alias(column.name)), "cost")


def test_later_stages_only_add_columns() -> None:
    for name in trace.TABLES:
        read, link, cost = (set(trace.build_table_schema(name, stage)) for stage in trace.STAGES)
        assert read <= link <= cost
    assert "op" not in trace.build_table_schema("kernels", "read")
    assert "op" in trace.build_table_schema("kernels", "link")
    assert "bound" not in trace.build_table_schema("kernels", "link")


def test_times_are_whole_nanoseconds_and_units_stand_in_the_names() -> None:
    for name, columns in trace.TABLES.items():
        assert len({column.name for column in columns}) == len(columns), f"{name} repeats a column"
        for column in columns:
            if column.name.endswith("_ns"):
                assert column.unit == "ns", f"{name}.{column.name}"
                assert column.dtype == (pl.Float64() if column.name == "t_roof_ns" else pl.Int64())
            if column.unit == "B":
                assert "bytes" in column.name or column.name.startswith("total_")
            assert column.doc


def _trace(**changed: pl.DataFrame) -> Trace:
    frames = {name: trace.build_empty_table(name) for name in TRACE_TABLES} | changed
    return Trace(meta=TraceMeta(source="hand", events=0, base_ns=0), **frames)


def test_a_trace_whose_ids_are_not_row_numbers_is_refused() -> None:
    rows = pl.DataFrame(
        {"id": [0, 2], "shapes": "[]", "dtypes": "[]", "strides": None, "args": None}, schema=trace.build_table_schema("signatures")
    )
    check_trace(_trace())
    check_trace(_trace(signatures=rows.with_columns(id=pl.int_range(2))))
    with pytest.raises(AssertionError, match=r"signatures\.id is not the row number"):
        check_trace(_trace(signatures=rows))
