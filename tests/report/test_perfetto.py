"""The overlay for Perfetto: format rules, exact times, what the tracks say."""

from __future__ import annotations

import gzip
import itertools
import json
from decimal import Decimal
from typing import Any

import factories as f
import msgspec
import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.model import trace
from gpudiag.model.analysis import Analysis
from gpudiag.model.timeline import QueueStats
from gpudiag.model.trace import Thread
from gpudiag.report import exports
from gpudiag.report.exports import FIRST_TRACK, assign_lanes

BASE = 1_712_345_678_901_234_567
QUEUE = QueueStats(1.0, 1.0, 0, 0, 0, 1.0, 2, 0.0, 0.0, t_ns=(0, 500), depth=(1.0, 1.25))


def _rows(name: str, rows: list[dict[str, Any]]) -> pl.DataFrame:
    schema = trace.build_table_schema(name)
    return pl.DataFrame([{key: row.get(key) for key in schema} for row in rows], schema=schema, orient="row")


@pytest.fixture
def analysis() -> Analysis:
    made = f.analysis(
        [f.Work("aten::mm", 10, 30, name="gemm")],
        steps=2,
        meta={"base_ns": BASE, "threads": (Thread("67707564", "1"), Thread("7", "8"))},
    )
    path = [
        {"step": 0, "start_ns": 0, "end_ns": 10_001, "kind": "host", "bound": "launch", "op": 0},
        {"step": 0, "start_ns": 10_001, "end_ns": 30_000, "kind": "kernel", "bound": "compute", "kernel": 0, "op": 0, "stream": 7},
    ]
    idle = [{
        "gap": 0, "start_ns": 30_000, "end_ns": 30_001, "kind": "host_wait", "cause": "idle_sync", "evidence": "cudaStreamSynchronize",
        "site": "train.py(42): main",
    }]  # fmt: skip
    return msgspec.structs.replace(made, critical_path=_rows("critical_path", path), idle=_rows("idle", idle), queue=QUEUE)


def _events(analysis: Analysis) -> list[dict[str, Any]]:
    return [json.loads(text, parse_float=Decimal) for text in exports.build_overlay(analysis)]


def test_every_event_keeps_the_rules_of_the_trace_event_format(analysis: Analysis) -> None:
    events = _events(analysis)
    assert {event["ph"] for event in events} == {"X", "M", "C"}
    for event in events:
        assert isinstance(event["args"], dict)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["ts"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int | float | Decimal) for value in event["args"].values())
    names = [event for event in events if event["ph"] == "M" and event["name"] == "thread_name"]
    assert {event["tid"] for event in events if event["ph"] == "X"} == {event["tid"] for event in names}


def test_the_process_is_none_of_the_recording(analysis: Analysis) -> None:
    assert {event["pid"] for event in _events(analysis)} == {67_707_565}


def test_times_are_exact_in_the_clock_of_the_file(analysis: Analysis) -> None:
    first = next(event for event in _events(analysis) if event["ph"] == "X")
    assert first["ts"] == Decimal("1712345678901234.567")
    assert first["dur"] == Decimal("10.001")
    assert bytes(exports.format_microseconds(-1_005)) == b"-1.005"


def test_tracks_do_not_overlap_themselves(analysis: Analysis) -> None:
    """Chrome and Perfetto draw events of one track as nested: pieces must touch at most."""
    events = sorted((event for event in _events(analysis) if event["ph"] == "X"), key=lambda event: (event["tid"], event["ts"]))
    for before, after in itertools.pairwise(events):
        assert before["tid"] != after["tid"] or before["ts"] + before["dur"] <= after["ts"]


def test_tracks_say_bound_cause_place_and_depth(analysis: Analysis) -> None:
    events = _events(analysis)
    by_track = {tid: [event for event in events if event["ph"] == "X" and event["tid"] == tid] for tid in (1, 2, 3)}
    assert [event["name"] for event in by_track[1]] == ["launch", "compute"]
    assert by_track[1][1]["args"] == {"kind": "kernel", "op": "aten::mm", "kernel": "gemm", "stream": 7}
    assert by_track[2][0]["name"] == "sync"
    assert by_track[2][0]["args"]["site"] == "train.py(42): main"
    assert [event["name"] for event in by_track[3]] == analysis.steps["name"].to_list()
    counters = [event for event in events if event["ph"] == "C"]
    assert [float(event["args"]["kernels"]) for event in counters] == [1.0, 1.25]


def test_without_path_and_queue_the_rest_is_there(analysis: Analysis) -> None:
    bare = msgspec.structs.replace(analysis, critical_path=None, queue=None)
    assert {event["tid"] for event in _events(bare) if event["ph"] == "X"} == {2, 3, FIRST_TRACK}


def test_work_stands_on_the_track_of_its_stream_by_its_bound(analysis: Analysis) -> None:
    costed = analysis.trace.kernels.with_columns(
        bound=pl.lit("memory"), efficiency=pl.lit(0.51234), t_roof_ns=pl.lit(10_247.0), flops=pl.lit(4e6), bytes_moved=pl.lit(2e6),
        provenance=pl.lit("exact"),
    )  # fmt: skip
    found = msgspec.structs.replace(analysis, trace=msgspec.structs.replace(analysis.trace, kernels=costed))
    events = _events(found)
    (name,) = [event["args"]["name"] for event in events if event["name"] == "thread_name" and event["tid"] == FIRST_TRACK]
    work = [event for event in events if event["ph"] == "X" and event["tid"] == FIRST_TRACK]
    assert name == "bound: stream 7"
    assert len(work) == costed.height
    assert work[0]["name"] == "memory"
    assert work[0]["args"] == {
        "op": "aten::mm", "work": "gemm", "efficiency_share": Decimal("0.5123"), "roofline_time_ns": Decimal("10247.0"),
        "flop": Decimal("4000000.0"), "moved_bytes": Decimal("2000000.0"), "cost": "exact",
    }  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), max_size=30))
def test_pieces_of_one_lane_are_apart_or_inside_each_other(pieces: list[tuple[int, int]]) -> None:
    spans = sorted(((start, start + length) for start, length in pieces), key=lambda span: (span[0], -span[1]))
    starts, ends = (np.array([span[k] for span in spans], dtype=np.int64) for k in (0, 1))
    lanes = assign_lanes(starts, ends).tolist()
    for (one, first), (other, second) in itertools.combinations(zip(spans, lanes, strict=True), 2):
        if first == second:
            assert other[0] >= one[1] or other[1] <= one[1], (one, other)
    apart = all(after[0] >= before[1] for before, after in itertools.pairwise(spans))
    assert not apart or set(lanes) <= {0}  # nothing is spread over lanes without need


def test_samples_become_counters_within_the_recorded_steps(analysis: Analysis) -> None:
    unix = 1_800_000_000_000_000_000
    meta = msgspec.structs.replace(analysis.trace.meta, unix_base_ns=unix)
    known = msgspec.structs.replace(analysis, trace=msgspec.structs.replace(analysis.trace, meta=meta))
    first, last = analysis.steps["start_ns"].min(), analysis.steps["end_ns"].max()
    rows = [{"t_ns": unix + at, "power_w": 300.0 + k, "mem_used_bytes": 2_500_000_000} for k, at in enumerate((first - 1, first, last + 1))]
    samples = _rows("telemetry", rows)
    counters = [json.loads(text, parse_float=Decimal) for text in exports.build_overlay(known, samples) if b'"C"' in text]
    told = {event["name"]: event["args"] for event in counters if event["name"] != "queue depth (kernels)"}
    assert told == {"power (W)": {"W": Decimal("301.0")}, "device memory in use (GB)": {"GB": Decimal("2.5")}}
    without = [text for text in exports.build_overlay(analysis, samples) if b"power" in text]  # no Unix time: no place on the time line
    assert without == []


def test_the_overlay_alone_is_a_document_and_compresses(analysis: Analysis) -> None:
    pieces = list(exports.format_trace_document(exports.build_overlay(analysis)))
    assert len(json.loads(b"".join(pieces))["traceEvents"]) == len(_events(analysis))
    assert gzip.decompress(b"".join(exports.compress_gzip(pieces))) == b"".join(pieces)
    assert json.loads(b"".join(exports.format_trace_document([]))) == {"traceEvents": []}


def test_names_of_the_trace_cannot_break_the_json(analysis: Analysis) -> None:
    hostile = '"}],\x1b[31m\\ \u2028'
    named = analysis.idle.with_columns(site=pl.lit(hostile))
    event = next(event for event in _events(msgspec.structs.replace(analysis, idle=named)) if event.get("tid") == 2 and event["ph"] == "X")
    assert event["args"]["site"] == hostile
