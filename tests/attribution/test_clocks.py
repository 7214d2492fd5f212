"""Device times that lie before their launches are moved behind them; clocks that agree are left alone."""

from __future__ import annotations

import json
from pathlib import Path

import kept
import polars as pl
import pytest
from handmade import Event, call, kernel, steps, trace
from noticewords import format_notices
from simulator import launch, op, python, simulate, step
from tracecheck import check_trace

from gpudiag.analysis import analyse
from gpudiag.attribution.device import CLOCK_NOISE_NS, align_clocks
from gpudiag.inputs import resolve_input


def _run(moved: float, device: int = 0, first: int = 0) -> list[Event]:
    """Return 40 launches, 100 us apart, each of a kernel of 30 us that starts 8 us after the call begins, on a clock that is `moved`."""
    events = []
    for number in range(1, 41):
        start, correlation = 100.0 * number, first + number
        events += [call(start, correlation, tid=1 + device), kernel(start + 8 + moved, start + 38 + moved, correlation, device=device)]
    return events


@pytest.mark.parametrize("moved", [-20_000.0, -300.0, -20.0])
def test_a_device_clock_that_is_behind_is_moved_to_the_earliest_start_that_can_be(moved: float) -> None:
    wrong = trace(*steps(0, 5000), *_run(moved))
    right, notices = align_clocks(wrong)
    (warning,) = format_notices(notices)
    check_trace(right, "read")
    launched = right.kernels.join(right.launches.select("correlation", called_ns="start_ns"), on="correlation")
    assert (launched["start_ns"] - launched["called_ns"]).unique().to_list() == [0]
    assert "disagree" in warning
    assert "40 of 40 pieces" in warning
    assert (right.kernels["end_ns"] - right.kernels["start_ns"]).unique().to_list() == [30_000]


@pytest.mark.parametrize("moved", [0.0, -8.0 - CLOCK_NOISE_NS / 1000, 5_000.0])
def test_clocks_that_agree_within_noise_are_left_alone(moved: float) -> None:
    made = trace(*steps(0, 5000), *_run(moved))
    assert align_clocks(made) == (made, ())


def test_a_broken_record_is_no_clock() -> None:
    events = [*_run(0.0), *_run(0.0, device=0, first=100), *_run(0.0, device=0, first=200)]
    made = trace(*steps(0, 5000), *events, call(4500, 999), kernel(10, 20, 999))  # 1 of 121 starts 4.5 ms too early
    assert align_clocks(made)[1] == ()


def test_each_device_has_its_own_clock_and_collectives_keep_their_kernels() -> None:
    named = {"Collective name": "allreduce", "Group size": 2}
    nccl = kernel(4200, 4300, 900, "ncclDevKernel_AllReduce_Sum_f32", **named)
    made = trace(*steps(0, 5000), *_run(0.0), *_run(-2_050.0, device=1, first=100), call(4150, 900), nccl)
    right, _ = align_clocks(made)
    launched = right.kernels.join(right.launches.select("correlation", called_ns="start_ns"), on="correlation")
    late = launched.filter(pl.col("correlation") != 900).select("device", late=pl.col("start_ns") - pl.col("called_ns")).unique()
    assert sorted(late.rows()) == [(0, 8_000), (1, 0)]
    assert right.kernels["start_ns"].is_sorted()
    assert right.kernels["id"].to_list() == list(range(81))
    assert right.kernels["name"].cast(pl.String)[right.collectives["kernel"][0]].startswith("nccl")


def test_a_shifted_recording_gives_the_same_causes_and_says_so(tmp_path: Path) -> None:
    loop = [step(), *[op("aten::mm", [python(30), launch("gemm", 15)]), python(20)] * 20]
    run = simulate([python(5), *loop * 6, step()])
    whole = run.write(tmp_path / "whole.json")
    shifted = tmp_path / "shifted.json"
    shifted.write_text(_shifted(whole.read_text(), -300))
    before, after = (analyse(resolve_input(str(path), None), lambda _: None) for path in (whole, shifted))
    assert not [text for text in format_notices(before.notices) if "clocks" in text]
    assert [text for text in format_notices(after.notices) if "clocks" in text]
    for cause in ("idle_launch", "idle_unexplained", "idle_dependency"):
        expected, found = (getattr(one.breakdown.buckets_ns, cause) / one.breakdown.wall_ns for one in (before, after))
        assert found == pytest.approx(expected, abs=0.02), cause
    assert before.replay is not None
    assert after.replay is not None


def _shifted(text: str, us: float) -> str:
    document = json.loads(text)
    for event in document["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            event["ts"] += us
    return json.dumps(document)


@pytest.mark.slow
def test_no_real_recording_starts_work_before_its_launch(traces: Path) -> None:
    for path in sorted(traces.glob("*.json.gz")):
        assert align_clocks(kept.tables(path))[1] == (), path.name
