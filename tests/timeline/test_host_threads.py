"""Who answers for idle time where a recording holds more threads than any training has."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from handmade import Event, call, kernel, linked, op, steps

from gpudiag.attribution import intervals
from gpudiag.attribution.call_sites import Frames
from gpudiag.attribution.device import find_gaps
from gpudiag.attribution.steps import find_steps
from gpudiag.timeline.host_threads import MAX_THREADS, HostActivity, find_responsible_threads, format_frame
from gpudiag.timeline.idle import add_launch_latency, explain_idle

THREADS = 2 * MAX_THREADS
END = 100.0 * (THREADS + 20)


def _issuing(number: int, thread: int) -> list[Event]:
    """Return one op that launches a kernel of 40 us, every 100 us another, on a thread."""
    start = 100.0 * number
    return [
        op("aten::mm", start, start + 40, tid=thread),
        call(start + 10, number + 1, end=start + 15, tid=thread),
        kernel(start + 20, start + 60, number + 1),
    ]


def _many() -> list[Event]:
    """Return a run in which each thread issues one kernel, and the last one of them twenty more."""
    numbers = [(number, number + 1) for number in range(THREADS)] + [(THREADS + row, THREADS) for row in range(20)]
    return [*steps(0, END / 2, END), *(event for number, thread in numbers for event in _issuing(number, thread))]


def test_the_threads_with_most_gaps_answer_for_theirs() -> None:
    trace = linked(*_many())
    window = intervals.build_spans(find_steps(trace).table)
    found = find_gaps(trace.kernels, trace.launches, window).with_columns(begun_ns="start_ns", row="id")
    leads = add_launch_latency(found, trace, 0, on_cpu=False)["lead"]
    assert 2 <= leads.n_unique() <= MAX_THREADS + 1
    busiest = trace.launches["thread"].value_counts(sort=True)["thread"][0]
    assert (leads == busiest).sum() >= 20


@pytest.mark.slow
def test_every_gap_is_still_explained() -> None:
    trace = linked(*_many())
    table = find_steps(trace).table
    whole = find_gaps(trace.kernels, trace.launches, intervals.build_spans(table))
    idle = explain_idle(trace, whole, intervals.build_spans(table), table)
    np.testing.assert_array_equal(intervals.build_spans(idle), intervals.build_spans(whole))
    lengths = idle.with_columns(ns=pl.col("end_ns") - pl.col("start_ns"))
    assert int(lengths["ns"].sum()) == intervals.measure_spans(intervals.build_spans(whole))
    in_flight = lengths.filter(pl.col("cause") == "idle_launch")["ns"].sum()
    assert in_flight > 0.2 * lengths["ns"].sum()  # 10 us of 60 for the call to take effect, and more where the thread was at work


def test_what_one_thread_did_is_cut_out_of_what_all_did() -> None:
    trace = linked(*_many())
    host = HostActivity(trace, Frames(trace.frames))
    for thread in (1, 7, THREADS, 10**6):
        ops = trace.ops.filter(pl.col("thread") == thread)
        spans, rows = host.ops[thread]
        assert rows.tolist() == ops["id"].to_list()
        assert spans.tolist() == ops.select("start_ns", "end_ns").to_numpy().tolist()


def test_no_more_threads_of_autograd_are_asked_than_a_machine_has() -> None:
    nodes = [op("autograd::engine::evaluate_function: MmBackward0", 10 * row, 10 * row + 5, tid=row + 2) for row in range(THREADS)]
    busy = [
        op("autograd::engine::evaluate_function: MmBackward0", 10**5 + 10 * row, 10**5 + 10 * row + 5, tid=THREADS + 1) for row in range(9)
    ]
    own = [op("aten::mm", 10 * row + 5, 10 * row + 6, tid=1) for row in range(THREADS)]
    trace = linked(*steps(0, 2 * 10**5), *nodes, *busy, *own)
    found = find_responsible_threads(trace)
    assert len(found) == MAX_THREADS + 1
    last = int(trace.ops.sort("start_ns")["thread"][-1])
    assert last in found


@pytest.mark.parametrize(
    ("frame", "told"),
    [
        ("<built-in function sleep>", "sleep()"),
        ("a/b.py(3): f", "f() of b.py"),
        ("site-packages/gpudiag/capture/unmodified/boundary.py(86): _noted", "_noted() of gpudiag's boundary.py"),
        ("/x/gpudiag/capture/demo.py(57): forward", "forward() of demo.py"),
        ("/x/gpudiag/train.py(5): main", "main() of train.py"),
        ("what else", "what else"),
    ],
)
def test_frames_are_named_as_people_say_them(frame: str, told: str) -> None:
    assert pl.DataFrame({"text": [frame]}).select(format_frame("text")).item() == told
