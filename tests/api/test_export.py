"""Exports: an exported trace is read like the original, and every table comes back from its file."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path

import handmade as h
import polars as pl
import pytest
from noticewords import format_notices

from gpudiag.errors import InputError
from gpudiag.model import trace
from gpudiag.model.trace import TRACE_TABLES, Trace
from gpudiag.queries import export_perfetto, export_tables
from gpudiag.report.exports import name_exported_column
from gpudiag.trace import read_trace


def _silent(_: str) -> None:
    return None


def _same(one: Trace, other: Trace) -> None:
    for name in TRACE_TABLES:
        before, after = getattr(one, name), getattr(other, name)
        categorical = [column for column, dtype in before.schema.items() if dtype == pl.Categorical]
        assert before.with_columns(pl.col(categorical).cast(pl.String)).equals(after.with_columns(pl.col(categorical).cast(pl.String))), (
            name
        )
    assert (one.meta.base_ns, one.meta.threads, one.meta.devices) == (other.meta.base_ns, other.meta.threads, other.meta.devices)
    assert (one.meta.dropped, format_notices(one.meta.notices)) == (other.meta.dropped, format_notices(other.meta.notices))


def _export(source: Path, target: Path, **options: bool) -> Path:
    export_perfetto(str(source), target, progress=_silent, **options)
    return target


def test_an_exported_trace_is_read_like_the_original(tmp_path: Path) -> None:
    source = h.write(tmp_path / "trace.json", *h.PRODUCTS)
    target = _export(source, tmp_path / "out.json")
    _same(read_trace(source), read_trace(target))
    names = {event["name"] for event in json.loads(target.read_text())["traceEvents"] if event.get("cat") == "gpudiag"}
    assert {"ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#3"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h100_bert-small", "mi210_gpu_only_no_ops", "v100_resnet50_train_2021_memory_callstack"])
def test_real_traces_of_all_ages_are_read_like_the_original(traces: Path, tmp_path: Path, name: str) -> None:
    """2021 (absolute times), 2024 and ROCm: times far from zero keep every nanosecond."""
    source = traces / f"{name}.json.gz"
    target = _export(source, tmp_path / "out.json.gz")
    assert target.read_bytes()[:2] == b"\x1f\x8b"
    _same(read_trace(source), read_trace(target))


def test_exporting_an_export_gives_the_same_overlay_again(tmp_path: Path) -> None:
    first = _export(h.write(tmp_path / "trace.json", *h.PRODUCTS), tmp_path / "first.json", overlay_only=True)
    second = _export(_export(tmp_path / "trace.json", tmp_path / "whole.json"), tmp_path / "second.json", overlay_only=True)
    assert first.read_bytes() == second.read_bytes()
    assert all(event.get("cat", "gpudiag") == "gpudiag" for event in json.loads(first.read_text())["traceEvents"])


def test_the_idle_pieces_of_the_overlay_are_those_of_the_device(tmp_path: Path) -> None:
    target = _export(h.write(tmp_path / "trace.json", *h.PRODUCTS), tmp_path / "out.json.gz", overlay_only=True)
    events = json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]
    idle = sum(event["dur"] for event in events if event["ph"] == "X" and event["tid"] == 2)
    assert idle == pytest.approx(300 - 3 * 40)


def test_every_table_comes_back_from_its_parquet_file(tmp_path: Path) -> None:
    source = h.write(tmp_path / "trace.json", *h.PRODUCTS)
    written = export_tables(str(source), tmp_path / "new" / "folder", "parquet", progress=_silent)
    assert {path.stem for path in written} >= {"ops", "launches", "kernels", "marks", "steps", "gaps", "idle"}
    kernels = pl.read_parquet(tmp_path / "new" / "folder" / "kernels.parquet")
    assert kernels["busy_ns"].to_list() == [40_000] * 3
    assert kernels["bound"].null_count() == 0


def test_csv_has_one_line_a_row(tmp_path: Path) -> None:
    written = export_tables(str(h.write(tmp_path / "trace.json", *h.PRODUCTS)), tmp_path, "csv", progress=_silent)
    kernels = pl.read_csv(next(path for path in written if path.stem == "kernels"))
    assert kernels.height == 3


def test_every_column_tells_its_unit_and_is_explained(tmp_path: Path) -> None:
    written = export_tables(str(h.write(tmp_path / "trace.json", *h.PRODUCTS)), tmp_path / "t", "parquet", progress=_silent)
    explained = pl.read_csv(tmp_path / "t" / "columns.csv")
    there = {(path.stem, column) for path in written if path.suffix == ".parquet" for column in pl.read_parquet(path).columns}
    assert there == set(explained.select("table", "column").iter_rows())
    assert explained["meaning"].null_count() == 0
    renamed = {row["sql_column"]: row["column"] for row in explained.filter(pl.col("column") != pl.col("sql_column")).iter_rows(named=True)}
    assert renamed == {"efficiency": "efficiency_share", "occupancy": "occupancy_share", "grid": "grid_blocks", "block": "block_threads"}


@pytest.mark.parametrize("table", sorted(trace.TABLES))
def test_no_two_columns_of_a_table_get_one_name_and_all_units_are_told(table: str) -> None:
    columns = trace.TABLES[table]
    names = [name_exported_column(column) for column in columns]
    assert len(set(names)) == len(names)
    words = {"B": "bytes", "FLOP": "flop", "%": "pct", "B/s": "bytes_per_s"}
    for column, name in zip(columns, names, strict=True):
        assert words.get(column.unit, column.unit.lower()) in name, (name, column.unit)


def test_a_spreadsheet_runs_nothing_of_a_csv(tmp_path: Path) -> None:
    hostile = [h.op("=HYPERLINK(1)", 11, 12), h.op("@x", 13, 14), h.op('quo"te,\nline', 15, 16)]
    source = h.write(tmp_path / "trace.json", *h.PRODUCTS, *hostile)
    export_tables(str(source), tmp_path / "csv", "csv", progress=_silent)
    export_tables(str(source), tmp_path / "parquet", "parquet", progress=_silent)
    names = set(pl.read_csv(tmp_path / "csv" / "ops.csv")["name"])
    assert {"'=HYPERLINK(1)", "'@x"} <= names
    assert not any(name.startswith(("=", "@", "+", "-")) for name in names)
    exact = set(pl.read_parquet(tmp_path / "parquet" / "ops.parquet")["name"].cast(pl.String))
    assert {"=HYPERLINK(1)", "@x", 'quo"te,\nline'} <= exact


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h100_bert-small", "mi300x_resnet18_ddp8_actckpt_train_rank0"])
def test_the_whole_file_keeps_the_rules_of_the_trace_event_format(traces: Path, tmp_path: Path, name: str) -> None:
    """Google, "Trace Event Format": required fields by phase; slices of a track are apart or nested, or viewers drop them."""
    target = _export(traces / f"{name}.json.gz", tmp_path / "out.json")
    events = json.loads(target.read_text(), parse_float=Decimal)["traceEvents"]
    ours = [event for event in events if event.get("cat") == "gpudiag" or event["pid"] == 67_707_564]
    named = {event["tid"] for event in ours if event["ph"] == "M" and event["name"] == "thread_name"}
    slices: dict[int, list[tuple[Decimal, Decimal]]] = {}
    for event in ours:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "X":
            slices.setdefault(event["tid"], []).append((Decimal(event["ts"]), Decimal(event["ts"]) + Decimal(event["dur"])))
        elif event["ph"] == "C":
            assert all(isinstance(value, int | float | Decimal) for value in event["args"].values())
    assert set(slices) <= named
    assert len(slices) >= 4  # the fixed ones, and a stream
    for spans in slices.values():
        _check_nested(sorted(spans, key=lambda span: (span[0], -span[1])))


def _check_nested(spans: list[tuple[Decimal, Decimal]]) -> None:
    open_ends: list[Decimal] = []
    for start, end in spans:
        assert end >= start
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1]
        open_ends.append(end)


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    source = h.write(tmp_path / "trace.json", *h.PRODUCTS)
    with pytest.raises(InputError, match="cannot make"):
        export_tables(str(source), source / "x", "csv", progress=_silent)
