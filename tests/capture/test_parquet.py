"""The encoder against polars' reader, an implementation of its own, and against ours, which reads nothing else."""

from __future__ import annotations

import io

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from gpudiag.capture.segments import decode_segment, encode_segment
from gpudiag.model import trace

_NUMBER = st.none() | st.integers(-(2**63), 2**63 - 1)
_REAL = st.none() | st.floats(allow_nan=False)
_TEXT = st.none() | st.text(st.characters(blacklist_categories=("Cs",)), max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(["host_marks", "step_records", "telemetry"]), st.integers(0, 40))
def test_what_was_written_is_read_back(data: st.DataObject, table: str, rows: int) -> None:
    schema = trace.build_table_schema(table)
    cells = {name: {pl.String(): _TEXT, pl.Int64(): _NUMBER, pl.Float64(): _REAL}[dtype] for name, dtype in schema.items()}
    columns = {name: data.draw(st.lists(cell, min_size=rows, max_size=rows)) for name, cell in cells.items()}
    written = encode_segment(table, columns)
    for found in (pl.read_parquet(io.BytesIO(written)), decode_segment(written)):
        assert found.schema == pl.Schema(schema)
        assert found.to_dict(as_series=False) == columns


def test_long_columns_survive() -> None:
    rows = 20_000
    schema = trace.build_table_schema("step_records")
    columns = {name: [None if row % 3 else row for row in range(rows)] for name, dtype in schema.items() if dtype == pl.Int64()}
    columns |= {name: ["plain" if row % 5 else None for row in range(rows)] for name, dtype in schema.items() if dtype == pl.String()}
    found = pl.read_parquet(io.BytesIO(encode_segment("step_records", columns)))
    assert found.to_dict(as_series=False) == columns
