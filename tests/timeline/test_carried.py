"""Pauses of a window without stacks, explained by the same pauses of one with stacks: by the place within, not by the longest frame."""

from __future__ import annotations

import msgspec
import numpy as np
import polars as pl
import pytest
from handmade import linked, mark, op, steps
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.attribution import intervals
from gpudiag.attribution.device import find_cpu_gaps
from gpudiag.attribution.intervals import FoldedTime
from gpudiag.attribution.steps import find_steps
from gpudiag.timeline.idle import explain_idle

Event = dict[str, object]
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def frame(name: str, start: float, end: float) -> Event:
    return {"ph": "X", "cat": "python_function", "name": name, "pid": 1, "tid": 1, "ts": start, "dur": end - start, "args": {}}


def told(timing: list[Event], stacked: list[Event], marks: pl.DataFrame | None = None) -> list[tuple[float, str, str | None, str | None]]:
    """Return (ms, cause, site, evidence) of the pieces of the window `timing`."""
    trace, other = (linked(*events, on_cpu=True) for events in (timing, stacked))
    bases = [msgspec.structs.replace(made.meta, unix_base_ns=base) for made, base in ((trace, 0), (other, 10**9))]
    trace, other = (msgspec.structs.replace(made, meta=meta) for made, meta in zip((trace, other), bases, strict=True))
    table = find_steps(trace).table
    window = intervals.build_spans(table.filter("analysed"))
    whole = find_cpu_gaps(intervals.build_spans(trace.ops), window)
    idle = explain_idle(trace, whole, window, table, site_window=(other, find_steps(other).table), host_marks=marks, on_cpu=True)
    time = (pl.col("end_ns") - pl.col("start_ns")) / 1e6
    return [row for row in idle.select(time, "cause", "site", "evidence").iter_rows() if row[0] >= 1]


def window(length: float, *pause: Event) -> list[Event]:
    """Return one step (us) of two ops with a pause in between from 1000 to `length` - 1000."""
    return [*steps(0, length), op("aten::mm", 0, 1000, seq=1), op("aten::mul", length - 1000, length), *pause]


def test_what_follows_a_batch_is_not_explained_by_the_frames_that_made_it() -> None:
    timing = window(17_000, mark(LOADER, 1000, 11_000))
    stacked = window(
        20_000,
        frame("train.py(40): main", 0, 20_000),
        frame("torch/utils/data/dataloader.py(700): __next__", 1000, 14_000),
        frame("data.py(12): busy", 1100, 13_900),
        frame("<built-in function sleep>", 14_100, 18_900),
    )
    data, rest = told(timing, stacked)
    assert data[:2] == (10, "idle_data")
    assert rest == (5, "idle_launch", "train.py(40): main", "sleep() (by the site window)")


def test_what_comes_before_a_file_is_written_is_not_explained_by_the_writing() -> None:
    stacked = window(
        18_000,
        frame("train.py(40): main", 0, 18_000),
        frame("make.py(3): arrays", 1100, 6900),
        frame("numpy/lib/_npyio_impl.py(500): save", 7000, 16_900),
    )
    row = {"kind": "file_write", "name": "c.npy", "start_unix_ns": 7_000_000, "duration_ns": 9_400_000, "site": "train.py:44", "step": 1}
    opened = pl.DataFrame([row])
    before, writing = told(window(17_400), stacked, opened)
    assert before == (pytest.approx(6), "idle_launch", "make.py(3): arrays", "arrays() of make.py (by the site window)")
    assert writing == (pytest.approx(9.4), "idle_io", "train.py(44)", "c.npy opened for writing")


def test_a_batch_is_made_at_the_line_that_holds_most_of_it_by_the_line_that_asked() -> None:
    """Two loaders, asked for at lines 44 and 50: the frames show where each makes its batch."""
    stacked = window(
        18_000,
        frame("train.py(40): main", 0, 18_000),
        frame("torch/utils/data/dataloader.py(700): __next__", 1100, 9000),
        frame("data.py(12): __getitem__", 1200, 8800),
        frame("other/loader.py(7): __next__", 9100, 16_900),
    )
    asked = [(1_050_000, 8_000_000, "train.py:44"), (9_100_000, 7_800_000, "train.py:50")]
    rows = [
        {"kind": "loader", "name": "", "start_unix_ns": base + start, "duration_ns": duration, "site": site, "step": 1}
        for base in (0, 10**9)
        for start, duration, site in asked
    ]
    first, second = told(window(18_000), stacked, pl.DataFrame(rows))
    assert first[1:3] == ("idle_data", "data.py(12): __getitem__")
    assert second[1:3] == ("idle_data", "other/loader.py(7): __next__")
    unseen = told(window(18_000), window(18_000), pl.DataFrame(rows))
    assert [row[1:3] for row in unseen] == [("idle_data", "train.py(44)"), ("idle_data", "train.py(50)")]


def test_what_is_saved_under_the_call_of_a_trainer_stands_where_it_is_saved_not_where_batches_are_made() -> None:
    """All that a trainer of a package does is called at one line of the program: each cause has a line of its own below that."""
    stacked = window(
        18_000,
        frame("trainer/loop.py(40): train", 0, 18_000),
        frame("trainer/data.py(12): __iter__", 1100, 9000),
        frame("trainer/checkpoint.py(7): save", 9150, 16_850),
    )
    done = [(0, "loader", 1_050_000, 8_000_000), (0, "save", 9_100_000, 7_800_000)]
    done += [(10**9 + at, kind, start, length) for at, kind, start, length in done]
    done.append((10**9, "save", 20_000_000, 900_000_000))  # behind the window with stacks: its frames say nothing of it
    rows = [
        {"kind": kind, "name": "", "start_unix_ns": at + start, "duration_ns": length, "site": "train.py:9", "step": 1}
        for at, kind, start, length in done
    ]
    first, second = told(window(18_000), stacked, pl.DataFrame(rows))
    assert first[1:3] == ("idle_data", "trainer/data.py(12): __iter__")
    assert second[1:3] == ("idle_io", "trainer/checkpoint.py(7): save")


def test_a_pause_without_events_of_its_own_is_matched_by_its_place() -> None:
    stacked = window(
        12_000,
        frame("train.py(40): main", 0, 12_000),
        frame("a.py(1): first", 1000, 8000),
        frame("b.py(1): second", 8000, 11_000),
    )
    # the device's own work cuts the pause of the window: ops on another thread are no pause of the training thread
    timing = [*window(12_000), op("aten::add", 8000, 8500, tid=5)]
    assert [(cause, site) for _, cause, site, _ in told(timing, stacked)] == [
        ("idle_launch", "a.py(1): first"), ("idle_launch", "b.py(1): second"),
    ]  # fmt: skip


def test_a_pause_that_lasts_far_longer_than_its_twin_is_not_explained_to_its_end() -> None:
    stacked = window(3000, frame("train.py(40): main", 0, 3000), frame("<built-in function sleep>", 1100, 1900))
    pieces = told(window(52_000), stacked)
    assert {cause for _, cause, _, _ in pieces} == {"idle_launch", "idle_unexplained"}
    assert sum(time for time, cause, _, _ in pieces if cause == "idle_launch") == pytest.approx(4, abs=0.3)  # LIKE x 1 ms


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 50)), max_size=12), st.lists(st.integers(0, 1100), min_size=2, max_size=9))
def test_folded_time_is_the_kept_time_before(spans: list[tuple[int, int]], moments: list[int]) -> None:
    kept = intervals.merge_spans(np.array([(start, start + length) for start, length in spans], dtype=np.int64).reshape(-1, 2))
    times = np.array(sorted(moments), dtype=np.int64)
    folded = FoldedTime(kept)
    assert folded.fold(times).tolist() == [sum(max(0, min(end, time) - start) for start, end in kept.tolist()) for time in times.tolist()]
    reached = folded.fold(times)
    if len(kept):
        assert folded.fold(folded.unfold(reached)).tolist() == reached.tolist()
