"""The history of a run in words, on the terminal, in Markdown and on the page."""

from __future__ import annotations

from typing import Any

import msgspec
import report_sample as sample
from rendered import render_html, render_markdown, render_text

from gpudiag.model.report import decode_report, encode_report
from gpudiag.model.timeline import Drift, PhaseTimes, ProfilerCost, SlowPart, SlowStep, StepHistory
from gpudiag.report import data_quality, labels, whole_run

MS = sample.MS


def made(**changes: Any) -> StepHistory:
    found = StepHistory(
        steps=5_000,
        profiled=8,
        plain=4_900,
        wall_ns=62_000 * MS,
        first_ns=3_100 * MS,
        median_ns=12 * MS,
        p95_ns=14 * MS,
        phases=PhaseTimes(
            clock="device", loader_wait_ns=1 * MS, forward_ns=4 * MS, backward_ns=6 * MS, optimizer_ns=20_000, rest_ns=1 * MS
        ),
        padded_share=0.18,
        drift=Drift(first_ns=12 * MS, last_ns=13 * MS, share=0.07, low_share=0.05, high_share=0.09, real=True),
        slow_steps=12,
        slow_share=0.031,
        slowest=(
            SlowStep(731, 2_310 * MS, (SlowPart("loader", 2_100 * MS), SlowPart("gc", 90 * MS, "gen 2"))),
            SlowStep(1_000, 99 * MS, (SlowPart("save", 80 * MS, "torch.save"), SlowPart("file_write", 0, "model.pt"))),
            SlowStep(7, 40 * MS),
        ),
        profiler=(ProfilerCost("timing", 6, 13 * MS, 6 * MS), ProfilerCost("export", 2, 600 * MS, 1_176 * MS)),
    )
    return msgspec.structs.replace(found, **changes)


def test_what_matters_is_said_in_a_few_lines() -> None:
    lines = whole_run.list_history(made())
    assert lines == [
        "5,000 steps, 8 of them profiled: an unprofiled one takes 12.0 ms (median), 95 % take less than 14.0 ms; the first took 3.10 s.",
        "Of a typical one (times of the device): forward 4.00 ms, backward 6.00 ms, waiting for batches 1.00 ms, the rest 1.00 ms.",
        "18 % of the positions in the batches are padding.",
        "The last quarter of the run is 7 % slower than the first: 12.0 ms to 13.0 ms a step (99 % interval 5 % to 9 %).",
        "12 of 4,900 unprofiled steps took more than 1.5 times the median and cost 3.1 % of the time. Slowest: step 731, 2.31 s "
        "(2.10 s waiting for its batch, 90.0 ms garbage collection); step 1,000, 99.0 ms (80.0 ms in torch.save, wrote "
        "model.pt); step 7, 40.0 ms (unexplained).",
        "Profiling added 1.18 s to the 62.0 s of all steps: recording (6 steps, on average 1.1 x the usual time), writing the "
        "trace (2 steps, on average 50.0 x the usual time).",
    ]


def test_a_calm_run_takes_two_lines() -> None:
    calm = made(
        drift=msgspec.structs.replace(made().drift, real=False), padded_share=None, slow_steps=0, slowest=(), profiler=(), first_ns=None
    )  # type: ignore[type-var]
    assert len(whole_run.list_history(calm)) == 2


def test_a_run_that_became_faster_says_so_with_the_interval_in_order() -> None:
    faster = Drift(first_ns=13 * MS, last_ns=12 * MS, share=-0.07, low_share=-0.09, high_share=-0.05, real=True)
    (line,) = (text for text in whole_run.list_history(made(drift=faster)) if "quarter" in text)
    assert "7 % faster" in line
    assert "5 % to 9 %" in line


def test_the_time_that_a_person_knows_stands_first_where_the_recorded_steps_differ() -> None:
    """The recorded steps took 75 ms."""
    alike = labels.format_verdict(sample.report(history=made(median_ns=70 * MS)))
    assert alike.startswith("A step takes 75.0 ms. ")
    for usual in (40, 200):
        other = labels.format_verdict(sample.report(history=made(median_ns=usual * MS)))
        assert other.startswith(f"Without the profiler a step takes {usual:.3g}{'.0' if usual < 100 else ''} ms (median of 4,900). ")
        assert "The recorded ones, analysed here, took 75.0 ms. The GPU spends" in other


def test_a_few_steps_without_the_profiler_do_not_stand_in_place_of_the_recorded_ones() -> None:
    few = sample.report(history=made(median_ns=200 * MS, plain=3))
    assert labels.format_verdict(few).startswith("A step takes 75.0 ms; the 3 without the profiler took 200 ms (median). The GPU spends")


def test_many_slow_steps_are_no_exceptions() -> None:
    said = " ".join(whole_run.list_history(made(slow_steps=2_000)))
    assert "The pace varies widely: 2,000 of 4,900" in said
    assert "step 1,000" not in said


def test_every_renderer_tells_it_and_json_keeps_it() -> None:
    report = sample.report(history=made())
    said = " ".join(render_text(report).split())
    assert "Whole run" in said
    assert "7 % slower" in said
    assert "## Whole run" in render_markdown(report)
    page = render_html(report)
    assert 'id="history-title"' in page
    assert "The slowest unprofiled steps" in page
    assert decode_report(encode_report(report)) == report


def test_of_a_trace_the_trust_section_says_that_only_its_steps_are_known() -> None:
    plain = sample.report()
    assert ("whole run", whole_run.NO_HISTORY) in data_quality.list_quality_lines(plain)
    assert "Whole run" not in render_text(plain) + render_markdown(plain) + render_html(plain)
    short = sample.report(history=made(plain=1, steps=9, median_ns=None, p95_ns=None))
    assert whole_run.list_history(short.history) == []
    assert "1 of 9 steps" in dict(data_quality.list_quality_lines(short))["whole run"]


def test_hostile_names_are_harmless() -> None:
    for name in sample.HOSTILE:
        slow = (SlowStep(5, 99 * MS, (SlowPart("file_write", 0, name),)),)
        report = sample.report(history=made(slowest=slow, slow_steps=1))
        assert "<script>alert" not in render_html(report)
        assert "\x1b" not in render_text(report)
        assert "\n# heading" not in render_markdown(report)
