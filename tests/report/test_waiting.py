"""What is said of idle time: places, calls that wait, the queue, the critical path, what changes give."""

from __future__ import annotations

import msgspec
import pytest
import report_sample as sample
from rendered import render_html, render_markdown, render_text

from gpudiag.model.report import IdleRow, ReportData, StepSummary
from gpudiag.model.timeline import WhatIf
from gpudiag.report import idle_time
from gpudiag.report.blocks import TERMINAL

MS = sample.MS


def test_causes_have_their_places_per_step_and_add_up() -> None:
    first, second, *_ = idle_time.list_idle_causes(sample.replayed())
    assert (first.label, first.ns, second.label) == ("host overhead (Python, framework, launches)", 25 * MS, "host-device sync")
    (place,) = first.places
    assert (place.detail, place.ns) == ("exp/model.py:12: sleep()", 25 * MS)
    assert first.share == pytest.approx(1 / 3)
    assert [place.detail for place in second.places] == ["cudaStreamSynchronize waited for a copy"]
    known = sample.breakdown({"compute": 180, "idle_launch": 112, "idle_sync": 8})
    longer, _ = idle_time.list_idle_causes(sample.replayed(breakdown=known))
    assert [(place.detail, place.ns) for place in longer.places] == [("exp/model.py:12: sleep()", 25 * MS), ("other call sites", 3 * MS)]
    assert sum(place.ns for place in longer.places) == pytest.approx(longer.ns)
    assert "Host overhead (Python, framework, launches): nothing is queued for the GPU while" in idle_time.format_cause_meanings(
        [first, second]
    )


def test_places_of_the_same_words_are_one_and_small_ones_go_into_the_rest() -> None:
    event = "cudaMemcpyAsync waited for Memcpy DtoH (Device -> Pageable)"
    rows = [IdleRow(cause="idle_sync", count=1, idle_ns=part * MS, op=f"aten::op{part}", evidence=event) for part in (5, 3)]
    rows += [IdleRow(cause="idle_sync", count=1, idle_ns=MS, file="train.py", line=line, evidence=event) for line in range(4)]
    idle = sample.breakdown({"compute": 288, "idle_sync": 12})
    (cause,) = idle_time.list_idle_causes(sample.replayed(idle=tuple(rows), breakdown=idle))
    assert [(place.detail, place.ns) for place in cause.places] == [(event, 2 * MS), ("other call sites", MS)]


def test_a_cause_whose_places_are_not_known_stands_alone() -> None:
    rows = (IdleRow(cause="idle_unexplained", count=3, idle_ns=50 * MS),)
    split = sample.breakdown({"compute": 200, "idle_unexplained": 50, "idle_gc": 50})
    assert [cause.places for cause in idle_time.list_idle_causes(sample.replayed(idle=rows, breakdown=split))] == [(), ()]


def test_without_any_cause_none_is_told() -> None:
    nothing = sample.breakdown({"compute": 200, "idle_unexplained": 100})
    assert idle_time.list_idle_causes(sample.replayed(breakdown=nothing)) == []


def test_calls_are_those_of_one_step_and_one_place_is_one_call() -> None:
    (row,) = idle_time.list_waiting_calls(sample.replayed())
    assert _call_figures(sample.replayed()) == ("1", "10.0 ms", "2.00 ms")
    twice = (row, msgspec.structs.replace(row, api="cudaMemcpyAsync", count=6))
    assert _call_figures(sample.replayed(syncs=twice)) == ("2.5", "20.0 ms", "4.00 ms")


def _call_figures(report: ReportData) -> tuple[str, ...]:
    table = idle_time.build_syncs_table(report, TERMINAL)
    assert table is not None
    (row,) = table.rows
    return tuple(row.cells[k].text for k in (1, 2, 4))


def test_how_far_the_host_is_ahead() -> None:
    report = sample.replayed()
    assert idle_time.format_queue(report) == (
        "The host runs 3.10 ms ahead of the GPU (median), with 120 kernels in flight; the GPU waits for it before 16 % of its kernels."
    )
    shallow = msgspec.structs.replace(report.queue, depth_median=0.2)
    assert "(median); the GPU waits for it before 16 % of" in idle_time.format_queue(sample.replayed(queue=shallow))
    slow = msgspec.structs.replace(report.queue, host_bound_share=0.84, empty_share=0.7)
    assert idle_time.format_queue(sample.replayed(queue=slow)) == (
        "The GPU waits for the host before 84 % of its kernels; for 70 % of the time nothing is queued."
    )
    assert idle_time.format_queue(sample.report()) == ""


def test_the_longest_path_by_bound() -> None:
    assert idle_time.format_critical_path(sample.replayed()) == (
        "Critical path of the step: 61 % compute-bound kernels, 22 % host overhead, 17 % dependencies."
    )
    assert idle_time.format_critical_path(sample.report()) == ""


def test_changes_have_the_error_of_the_replay_and_the_name_to_try_them() -> None:
    first, second = idle_time.list_what_if_changes(sample.replayed())
    assert (first.label, first.setting, first.then) == ("one CUDA graph launches all work", "launch=0", "50.0 ms")
    assert (first.gain, first.share) == ("33 % \u00b1 2 %", pytest.approx(1 / 3))
    assert (second.label, second.setting, second.gain) == ("all work at 80 % of its roofline", "roof=0.8", "20 % \u00b1 2 %")
    other = (WhatIf("mine=3", "something", 2.0, 1.0, 0.5),)
    assert idle_time.list_what_if_changes(sample.replayed(what_ifs=other))[0].label == "mine=3"


def test_a_changed_step_is_measured_by_the_analysed_one_and_the_batch_stands_last() -> None:
    batch = WhatIf("batch=2", "", 100.0 * MS, 120.0 * MS, 0.4, short="2 x the batch (gain per sample)")
    sync = WhatIf("sync=0", "", 100.0 * MS, 80.0 * MS, 0.2, short="no host-device sync")
    found = idle_time.list_what_if_changes(
        sample.replayed(what_ifs=(batch, sync))
    )  # replayed alone a step takes 100 ms, the analysed ones take 75
    assert [(change.label, change.then) for change in found] == [
        ("no host-device sync", "60.0 ms"),
        ("2 x the batch (gain per sample)", "90.0 ms"),
    ]


def test_how_well_the_replay_does() -> None:
    assert idle_time.format_replay_trust(sample.replayed()) == (
        "#2 (fastest), #4 (median, slowest) stand for all analysed steps. Replayed with nothing changed, the step time is off by "
        "2 % at most; <1 % of it are waits that no dependency explains."
    )
    both = StepSummary(2, "ProfilerStep", 150 * MS, 75 * MS, 78 * MS, 2)
    assert idle_time.format_replay_trust(sample.replayed(steps=both)).startswith("Replayed with nothing changed")


@pytest.mark.parametrize("width", [40, 80, 100])
def test_the_terminal_shows_all_of_it(width: int) -> None:

    shown = render_text(sample.replayed(), width=width)
    for wanted in ("Why the GPU was idle", "exp/model.py:12", "Calls that synchronise", "What-if: potential speed-up"):
        assert wanted in " ".join(shown.split()), wanted
    assert max(map(len, shown.splitlines())) <= width


def test_markdown_and_page_show_the_same() -> None:

    report = sample.replayed()
    for shown in (render_markdown(report), render_html(report)):
        for wanted in ("exp/model.py:12", "sleep()", "train.py:41", "3.10 ms ahead", "22 % host overhead", "50.0 ms", "launch=0"):
            assert wanted in shown.replace("\u00a0", " "), wanted
    assert "<polyline" in render_html(report)
