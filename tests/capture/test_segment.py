"""Segments of a bundle that may come from anyone: read as written, or refused; never the end of the process."""

from __future__ import annotations

import struct
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpudiag.bundle.reader import open_bundle, read_segment
from gpudiag.bundle.segments import REQUIRED, NotASegmentError, count_rows, decode_segment, encode_segment
from gpudiag.capture.steps import StepRow
from gpudiag.model import trace

FIRST_EDITION = Path(__file__).parent / "first_edition"
"""A bundle that the first edition recorded: its segments are Parquet."""

SCHEMA = trace.build_table_schema("step_records")
COLUMNS = {
    name: [7, None] if dtype == pl.Int64() else ["a", None] if dtype == pl.String() else [0.5, None] for name, dtype in SCHEMA.items()
}
WRITTEN = encode_segment("step_records", COLUMNS)
OLD = (FIRST_EDITION / "steps" / "rank0" / "000000.parquet").read_bytes()

_NUMBER = st.none() | st.integers(-(2**63), 2**63 - 1)
_REAL = st.none() | st.floats(allow_nan=False, allow_infinity=False)
_TEXT = st.none() | st.text(st.characters(blacklist_categories=("Cs",)), max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(["host_marks", "step_records", "telemetry"]), st.integers(1, 40))
def test_what_was_written_is_read_back(data: st.DataObject, table: str, rows: int) -> None:
    schema = trace.build_table_schema(table)
    cells = {name: {pl.String(): _TEXT, pl.Int64(): _NUMBER, pl.Float64(): _REAL}[dtype] for name, dtype in schema.items()}
    columns = {name: data.draw(st.lists(cell, min_size=rows, max_size=rows)) for name, cell in cells.items()}
    known = {name: values for name, values in columns.items() if name in REQUIRED or any(value is not None for value in values)}
    found = decode_segment(encode_segment(table, columns))
    assert found.schema == pl.Schema({name: schema[name] for name in known})
    assert found.to_dict(as_series=False) == known


def test_the_fields_of_a_row_are_the_columns_of_the_table() -> None:
    assert StepRow.__struct_fields__ == (*SCHEMA, "ready")


def test_marks_of_no_step_are_read_back(tmp_path: Path) -> None:
    schema = trace.build_table_schema("host_marks")
    row = {"kind": "gc", "name": "gen 0", "start_unix_ns": 1, "duration_ns": 1, "site": None, "step": None}
    (tmp_path / "000000.json").write_bytes(encode_segment("host_marks", {name: [value] for name, value in row.items()}))
    found = read_segment(tmp_path / "000000.json", schema)
    assert found is not None
    assert found.row(0, named=True) == row


def test_a_name_that_is_no_text_is_kept_as_well_as_it_can() -> None:
    marks = {name: ["caf\udce9.pt"] if dtype == pl.String() else [1] for name, dtype in trace.build_table_schema("host_marks").items()}
    assert decode_segment(encode_segment("host_marks", marks))["name"].to_list() == ["caf?.pt"]


def test_a_bundle_of_the_first_edition_is_read() -> None:
    bundle = open_bundle(FIRST_EDITION)
    assert bundle.notices == ()
    assert bundle.step_records.schema == pl.Schema(SCHEMA)
    assert bundle.step_records["step"].to_list() == list(range(bundle.manifest.steps))
    assert set(bundle.step_records["window"]) == {"plain", "warm", "timing", "sites", "export"}
    assert bundle.step_records["backward_ns"].min() > 0  # type: ignore[operator]
    assert bundle.telemetry.height > 2
    assert bundle.telemetry["power_w"].null_count() == bundle.telemetry.height
    assert bundle.telemetry["rss_bytes"].max() > 10**7  # type: ignore[operator]
    assert (bundle.host_marks["kind"] == "save").sum() == 1
    assert count_rows(FIRST_EDITION / "steps" / "rank0" / "000000.parquet") == bundle.manifest.steps


@pytest.mark.parametrize("written", [WRITTEN, OLD])
def test_a_changed_byte_gives_a_table_or_one_error(written: bytes) -> None:
    rows = decode_segment(written).height

    @given(place=st.integers(0, len(written) - 1), value=st.integers(0, 255))
    def check(place: int, value: int) -> None:
        try:
            found = decode_segment(written[:place] + bytes([value]) + written[place + 1 :])
        except NotASegmentError:
            return
        assert found.height == rows

    check()


@pytest.mark.parametrize("written", [WRITTEN, OLD])
@pytest.mark.parametrize("end", [0, 1, 7, 8, 12, 100, -1])
def test_what_is_cut_short_is_refused(tmp_path: Path, written: bytes, end: int) -> None:
    path = tmp_path / "000000.json"
    path.write_bytes(written[:end])
    assert read_segment(path, SCHEMA) is None
    with pytest.raises(NotASegmentError):
        decode_segment(written[:end])


def test_rows_are_counted_without_reading_them(tmp_path: Path) -> None:
    path = tmp_path / "000000.json"
    path.write_bytes(WRITTEN)
    assert count_rows(path) == 2
    path.write_bytes(WRITTEN.replace(b'"rows":2', b'"rows":999999999'))
    with pytest.raises(NotASegmentError):
        count_rows(path)
    path.write_bytes(b"PAR1 cut off")
    with pytest.raises(NotASegmentError):
        count_rows(path)


@pytest.mark.parametrize(
    "columns",
    [
        b'{"step":["a"]}',
        b'{"step":[1.5]}',
        b'{"step":[9223372036854775808]}',
        b'{"step":[1e400]}',
        b'{"step":[1,2]}',
        b'{"stop":[1]}',
        b"{}",
    ],
)
def test_columns_of_another_form_are_refused(columns: bytes) -> None:
    with pytest.raises(NotASegmentError):
        decode_segment(b'{"table":"step_records","rows":1,"columns":' + columns + b"}")


def test_a_list_that_is_only_claimed_takes_no_memory(tmp_path: Path) -> None:
    """The list of columns says that it has 2^40 entries: polars' reader made room for them, which ended the process."""
    footer = b"\x19\xfc" + b"\x80" * 5 + b"\x01"
    path = tmp_path / "000000.parquet"
    path.write_bytes(b"PAR1" + footer + struct.pack("<I", len(footer)) + b"PAR1")
    assert read_segment(path, SCHEMA) is None


def test_a_page_that_claims_more_values_than_rows_is_refused(tmp_path: Path) -> None:
    """Found by fuzzing: with this byte polars' reader asked for 2^61 bytes, and Rust's allocator ended the process."""
    rows = decode_segment(OLD).height
    for place in range(4, 40):
        try:
            assert decode_segment(OLD[:place] + b"\xff" + OLD[place + 1 :]).height == rows
        except NotASegmentError:
            continue


def test_a_file_of_another_program_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "000000.parquet"
    pl.DataFrame({"step": [1]}).write_parquet(path)
    assert read_segment(path, SCHEMA) is None
