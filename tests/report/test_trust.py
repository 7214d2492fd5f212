"""What a report says about itself: steps, device, coverage, the profiler's cost."""

from __future__ import annotations

import msgspec
import pytest
import report_sample as sample

from gpudiag.model.report import StepSummary
from gpudiag.report import trust

MS = sample.MS


def test_the_mean_is_explained_where_it_differs_from_the_median() -> None:
    steps = StepSummary(4, "ProfilerStep", 300 * MS, 50 * MS, 150 * MS)
    assert "the mean of 75.0 ms is used below" in trust.step_line(sample.report(steps=steps))
    assert "mean" not in trust.step_line(sample.report())


def test_unknown_shares_are_said_not_shown_as_zero() -> None:
    nothing = sample.trust(linked_share=0.0, modelled_share=None, generic_share=None, unknown_share=None, profiler_slowdown=None)
    lines = dict(trust.trust_lines(sample.report(trust=nothing)))
    assert lines["coverage"].startswith(
        "0 % of the kernel time is linked to an op. Cost models cover none of it: no op with recorded shapes"
    )
    empty = sample.trust(linked_share=None, modelled_share=None, without_launch_share=None)
    assert "no kernel time that could be linked" in dict(trust.trust_lines(sample.report(trust=empty)))["coverage"]
    assert lines["profiler"].startswith("Slow-down unknown")


def test_without_a_device_the_roofline_is_denied_and_the_reason_is_pointed_at() -> None:
    lines = dict(trust.trust_lines(sample.no_device()))
    assert "no roofline" in lines["device"]
    assert "among the warnings" in lines["device"]
    assert "has no name" in trust.peaks_reason(sample.no_device())


def test_a_window_without_steps_is_said() -> None:
    steps = StepSummary(1, "whole trace", 300 * MS, None, None)
    assert trust.step_line(sample.report(steps=steps)).startswith("No steps were found: the whole recorded window of 300 ms")


@pytest.mark.parametrize(
    ("provenance", "words"),
    [("datasheet", "from its data sheet"), ("derived", "derived from"), ("unverified", "unverified"), ("measured", "measured")],
)
def test_the_origin_of_the_peaks_is_said(provenance: str, words: str) -> None:
    device = msgspec.structs.replace(sample.device(), provenance=provenance)
    assert words in trust.device_line(sample.report(device=device))


def test_shares_that_round_to_nothing_are_not_listed() -> None:
    lines = dict(trust.trust_lines(sample.report(trust=sample.trust(without_launch_share=0.3, replay_share=0.001, outside_ops_share=0.0))))
    assert lines["coverage"].endswith("Of the kernel time, 30 % was launched before the recording.")


def test_events_that_were_not_used_are_counted() -> None:
    assert dict(trust.trust_lines(sample.report()))["read"] == "216,092 events, 7,360 kernels; not used: 15,012 flow arrows."


def test_utilisation_is_left_out_where_it_is_not_known() -> None:
    assert dict(trust.trust_lines(sample.report()))["utilisation"].startswith("Model FLOPs utilisation 15.0 % of the bf16 peak")
    tiny = msgspec.structs.replace(sample.report().mfu, share=0.0002)
    assert "utilisation below 0.1 % of" in dict(trust.trust_lines(sample.report(mfu=tiny)))["utilisation"]
    assert "utilisation" not in dict(trust.trust_lines(sample.report(mfu=None)))
