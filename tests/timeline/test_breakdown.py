"""The partition of the steps against counting nanoseconds one by one."""

from __future__ import annotations

import numpy as np
import polars as pl
from handmade import kernel, linked, steps
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.attribution import intervals
from gpudiag.model.ops import BOUNDS
from gpudiag.model.timeline import BUCKETS
from gpudiag.timeline.breakdown import break_down, break_down_steps, build_unknown_breakdown, measure_device_time

span = st.tuples(st.integers(0, 80), st.integers(0, 30)).map(lambda pair: (pair[0], pair[0] + pair[1]))
BUCKET = {bound: bound for bound in BOUNDS} | {"communication": "exposed_communication", "copy": "exposed_copy"}
PRIORITY = ("compute", "memory", "overhead", "unknown", "communication", "copy")


@given(st.lists(st.tuples(st.sampled_from(BOUNDS), span), max_size=12), st.lists(span, max_size=4))
def test_every_nanosecond_goes_to_the_first_bucket_in_order(work: list[tuple[str, tuple[int, int]]], bounds: list[tuple[int, int]]) -> None:
    window = intervals.merge_spans(np.array(bounds, dtype=np.int64).reshape(-1, 2))
    spans = np.array([item for _, item in work], dtype=np.int64).reshape(-1, 2)
    found = break_down(pl.Series([bound for bound, _ in work], dtype=pl.String), spans, window)
    found.validate()
    expected = dict.fromkeys([*BUCKET.values(), "idle_unexplained"], 0)
    moments = {t for start, end in bounds for t in range(start, end)}
    for t in moments:
        here = [bound for bound in PRIORITY if any(bound == b and start <= t < end for b, (start, end) in work)]
        expected[BUCKET[here[0]] if here else "idle_unexplained"] += 1
    assert found.wall_ns == len(moments)
    assert {name: getattr(found.buckets_ns, name) for name in expected} == expected
    assert found.idle_ns == expected["idle_unexplained"]


def test_a_kernel_that_crosses_a_mark_is_cut_there() -> None:
    window = np.array([[0, 100], [200, 300]], dtype=np.int64)
    found = break_down(pl.Series(["compute"]), np.array([[50, 250]], dtype=np.int64), window)
    assert (found.buckets_ns.compute, found.buckets_ns.idle_unexplained, found.wall_ns) == (100, 100, 200)


def test_what_was_not_recorded_is_unknown_and_not_idle() -> None:
    found = build_unknown_breakdown(np.array([[0, 100]], dtype=np.int64))
    found.validate()
    assert (found.buckets_ns.unknown, found.idle_ns) == (100, 0)


def test_device_time_over_every_event_of_the_trace() -> None:
    events = [
        kernel(10, 40, 1), kernel(30, 60, 2, "ncclDevKernel_AllReduce", stream=8),
        kernel(50, 80, 3, "Memcpy HtoD (Pinned -> Device)", stream=9),
        kernel(90, 95, 4, "Memset (Device)"), kernel(100, 110, 5, "Memcpy DtoD (Device -> Device)"),
    ]  # fmt: skip
    found = measure_device_time(linked(*steps(0, 20), *events).kernels)
    assert found is not None
    assert (found.span_ns, found.busy_ns, found.idle_ns) == (100_000, 85_000, 15_000)
    assert (found.compute_ns, found.communication_ns, found.copy_ns) == (35_000, 30_000, 40_000)
    assert (found.exposed_communication_ns, found.exposed_copy_ns) == (20_000, 30_000)


def test_no_device_event_no_device_time() -> None:
    assert measure_device_time(linked(*steps(0, 20)).kernels) is None


@given(st.lists(st.tuples(st.sampled_from(BOUNDS), span), max_size=12), st.lists(st.integers(1, 30), min_size=1, max_size=4), span)
def test_breakdowns_of_steps_sum_to_that_of_all(
    work: list[tuple[str, tuple[int, int]]], lengths: list[int], pause: tuple[int, int]
) -> None:
    marks = np.cumsum([0, *lengths])
    bounds = np.stack([marks[:-1], marks[1:]], axis=1).astype(np.int64)
    spans = np.array([item for _, item in work], dtype=np.int64).reshape(-1, 2)
    words = pl.Series([bound for bound, _ in work], dtype=pl.String)
    idle = pl.DataFrame({"start_ns": [pause[0]], "end_ns": [pause[1]], "cause": ["idle_sync"]})
    whole = break_down(words, spans, intervals.merge_spans(bounds), idle)
    parts = break_down_steps(words, spans, bounds, idle)
    for part, length in zip(parts, lengths, strict=True):
        part.validate()
        assert part.wall_ns == length
    for name in BUCKETS:
        assert sum(getattr(part.buckets_ns, name) for part in parts) == getattr(whole.buckets_ns, name)
