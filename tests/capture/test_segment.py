"""Segments of a bundle that may come from anyone: read as written, or refused; never the end of the process."""

from __future__ import annotations

import struct
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.capture.bundle import read_segment
from gpudiag.capture.segments import NotASegmentError, count_rows, decode_segment, encode_segment
from gpudiag.model import trace

SCHEMA = trace.build_table_schema("step_records")
COLUMNS = {
    name: [7, None] if dtype == pl.Int64() else ["a", None] if dtype == pl.String() else [0.5, None] for name, dtype in SCHEMA.items()
}
WRITTEN = encode_segment("step_records", COLUMNS)


@given(place=st.integers(0, len(WRITTEN) - 1), value=st.integers(0, 255))
def test_a_changed_byte_gives_a_table_or_one_error(place: int, value: int) -> None:
    try:
        found = decode_segment(WRITTEN[:place] + bytes([value]) + WRITTEN[place + 1 :])
    except NotASegmentError:
        return
    assert found.height == 2


@pytest.mark.parametrize("end", [0, 1, 7, 8, 12, len(WRITTEN) // 2, len(WRITTEN) - 1])
def test_what_is_cut_short_is_refused(tmp_path: Path, end: int) -> None:
    path = tmp_path / "000000.parquet"
    path.write_bytes(WRITTEN[:end])
    assert read_segment(path, SCHEMA) is None
    with pytest.raises(NotASegmentError):
        count_rows(path)


def test_rows_are_counted_from_the_end_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "000000.parquet"
    path.write_bytes(WRITTEN)
    assert count_rows(path) == 2


def test_a_list_that_is_only_claimed_takes_no_memory(tmp_path: Path) -> None:
    """The list of columns says that it has 2^40 entries: polars' reader made room for them, which ended the process."""
    footer = b"\x19\xfc" + b"\x80" * 5 + b"\x01"
    path = tmp_path / "000000.parquet"
    path.write_bytes(b"PAR1" + footer + struct.pack("<I", len(footer)) + b"PAR1")
    assert read_segment(path, SCHEMA) is None


def test_a_page_that_claims_more_values_than_rows_is_refused(tmp_path: Path) -> None:
    """Found by fuzzing: with this byte polars' reader asked for 2^61 bytes, and Rust's allocator ended the process."""
    path = tmp_path / "000000.parquet"
    for place in range(4, 40):
        path.write_bytes(WRITTEN[:place] + b"\xff" + WRITTEN[place + 1 :])
        found = read_segment(path, SCHEMA)
        assert found is None or found.height == 2


def test_a_file_of_another_program_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "000000.parquet"
    pl.DataFrame({"step": [1]}).write_parquet(path)
    assert read_segment(path, SCHEMA) is None
