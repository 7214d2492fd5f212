"""What is said of idle time: places, calls that wait, the queue, the longest path, what changes give."""

from __future__ import annotations

import msgspec
import pytest
import report_sample as sample

from gpudiag.model.replay import WhatIf
from gpudiag.model.report import StepSummary
from gpudiag.report import waiting

MS = sample.MS


def test_places_are_per_step_with_their_line_and_what_happened() -> None:
    first, second = waiting.places(sample.replayed())  # the third is 0.3 % of the time
    assert (first.cause, first.ns, first.detail) == ("host launches too late", 25 * MS, "exp/model.py:12: sleep()")
    assert first.share == pytest.approx(1 / 3)
    assert second.detail == "cudaStreamSynchronize waited for a copy"


def test_without_any_cause_no_places_are_told() -> None:
    nothing = sample.breakdown({"compute": 200, "idle_unexplained": 100})
    assert waiting.places(sample.replayed(breakdown=nothing)) == []


def test_how_far_the_host_is_ahead() -> None:
    report = sample.replayed()
    assert waiting.queue_line(report) == (
        "The host runs 3.10 ms ahead of the GPU (median), with 120 kernels issued and not yet over; at 16 % of the kernels the GPU waits "
        "for it."
    )
    slow = msgspec.structs.replace(report.queue, host_bound_share=0.84, empty_share=0.7)
    assert waiting.queue_line(sample.replayed(queue=slow)) == (
        "The GPU waits for the host at 84 % of its kernels; for 70 % of the time it has nothing to do."
    )
    assert waiting.queue_line(sample.report()) == ""


def test_the_longest_path_by_bound() -> None:
    assert waiting.path_line(sample.replayed()) == (
        "Longest path through the step: 61 % compute, 22 % the host issuing work, 17 % time between dependent work."
    )
    assert waiting.path_line(sample.report()) == ""


def test_changes_have_the_error_of_the_replay() -> None:
    assert waiting.changes(sample.replayed()) == [
        ("issuing work at no cost (one CUDA graph)", "50.0 ms", "33 % \u00b1 2 %", pytest.approx(1 / 3)),
        ("every kernel at 80 % of its roof", "60.0 ms", "20 % \u00b1 2 %", 0.2),
    ]
    other = (WhatIf("mine=3", "something", 2.0, 1.0, 0.5),)
    assert waiting.changes(sample.replayed(what_ifs=other))[0][0] == "mine=3"


def test_how_well_the_replay_does() -> None:
    assert waiting.replay_line(sample.replayed()) == (
        "#2 (fastest), #4 (median, slowest) stand for all analysed steps. Replayed with nothing changed, the measured time is missed by "
        "2 % at most; <1 % of it are waits that no dependency explains."
    )
    both = StepSummary(2, "ProfilerStep", 150 * MS, 75 * MS, 78 * MS, 2)
    assert waiting.replay_line(sample.replayed(steps=both)).startswith("Replayed with nothing changed")


@pytest.mark.parametrize("width", [40, 80, 100])
def test_the_terminal_shows_all_of_it(width: int) -> None:
    from gpudiag.report import text

    shown = text.render(sample.replayed(), width=width)
    for wanted in ("Why the GPU was idle", "exp/model.py:12", "Calls that wait for the GPU", "What changes could give at most"):
        assert wanted in " ".join(shown.split()), wanted
    assert max(map(len, shown.splitlines())) <= width


def test_markdown_and_page_show_the_same() -> None:
    from gpudiag.report import html, markdown

    report = sample.replayed()
    for shown in (markdown.render(report), html.render(report)):
        for wanted in ("exp/model.py:12", "sleep()", "train.py:41", "3.10 ms ahead", "22 % the host issuing work", "50.0 ms"):
            assert wanted in shown, wanted
    assert "<polyline" in html.render(report)
