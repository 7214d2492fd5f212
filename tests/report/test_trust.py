"""What a report says about itself: steps, device, coverage, the profiler's cost."""

from __future__ import annotations

import msgspec
import pytest
import report_sample as sample
from noticewords import texts

from gpudiag.model.finding import Where
from gpudiag.model.notices import NoticeCode, format_notice, make_notice
from gpudiag.model.report import KernelRow, Mfu, MfuReference, RuleOutcome, StepSummary
from gpudiag.report import data_quality, labels
from gpudiag.report.first_screen import build_quality_tile
from gpudiag.units import format_ns

MS = sample.MS


def test_the_mean_is_explained_where_it_differs_from_the_median() -> None:
    steps = StepSummary(4, "ProfilerStep", 300 * MS, 50 * MS, 150 * MS, 4, "ProfilerStep#9", 150 * MS)
    said = "A step takes 50.0 ms (median; the mean, to which its parts add up, is 75.0 ms: step #9 took 150 ms"
    assert labels.format_pace(sample.report(steps=steps)) == f"{said})."
    preempted = msgspec.structs.replace(steps, preempted_ns=90 * MS)
    assert labels.format_pace(sample.report(steps=preempted)) == f"{said}, 90.0 ms of them waiting for a processor)."
    assert labels.format_pace(sample.report()) == "A step takes 75.0 ms."


def test_unknown_shares_are_said_not_shown_as_zero() -> None:
    nothing = sample.trust(linked_share=0.0, modelled_share=None, generic_share=None, unknown_share=None, profiler_slowdown=None)
    lines = dict(data_quality.list_quality_lines(sample.report(trust=nothing)))
    assert lines["coverage"].startswith("Cost models cover none of it: no op with recorded shapes")
    assert lines["coverage"].endswith(" 0 % of all kernel time is attributed to the op that launched it.")
    empty = sample.trust(linked_share=None, modelled_share=None, without_launch_share=None)
    assert "no kernel time that could be attributed" in dict(data_quality.list_quality_lines(sample.report(trust=empty)))["coverage"]
    assert lines["profiler"].startswith("Slow-down unavailable")


def test_without_a_device_the_roofline_is_denied_and_the_reason_is_pointed_at() -> None:
    lines = dict(data_quality.list_quality_lines(sample.no_device()))
    assert "no roofline" in lines["device"]
    assert "among the warnings" in lines["device"]
    assert "not named" in data_quality.explain_missing_peaks(sample.no_device())


def test_a_window_without_steps_is_said() -> None:
    steps = StepSummary(1, "whole trace", 300 * MS, None, None)
    assert data_quality.format_steps(sample.report(steps=steps)).startswith("No steps were found: the whole recorded window of 300 ms")


@pytest.mark.parametrize(
    ("provenance", "words"),
    [("datasheet", "from its data sheet"), ("derived", "derived from"), ("unverified", "unverified"), ("measured", "measured")],
)
def test_the_origin_of_the_peaks_is_said(provenance: str, words: str) -> None:
    device = msgspec.structs.replace(sample.device(), provenance=provenance)
    assert words in data_quality.format_device(sample.report(device=device))


def test_coverage_comes_first() -> None:
    assert data_quality.list_quality_lines(sample.report())[0][0] == "coverage"
    assert data_quality.format_headlines(sample.report())[0] == data_quality.format_coverage(sample.report())


def test_what_changes_every_figure_stands_before_them() -> None:
    cut = make_notice(NoticeCode.TRACE_BREAKS_OFF, events=7)
    whole = sample.report(trust=sample.trust(warnings=(format_notice(cut), "another"), notices=(cut, *texts("another"))))
    assert data_quality.format_headlines(whole)[0] == f"The recording is not whole: {format_notice(cut)}."
    assert data_quality.list_warnings(whole) == ["another"]


def test_a_report_of_the_first_edition_is_read_with_its_words() -> None:
    """It has no codes; its texts begin as they always did."""
    old = "the file breaks off or is malformed after event 7; what comes later is missing"
    report = sample.report(trust=sample.trust(warnings=(old, "another")))
    assert report.trust.notices[0].code == NoticeCode.TRACE_BREAKS_OFF
    assert data_quality.list_warnings(report) == ["another"]


def test_the_coverage_line_says_what_the_rest_is_largest_first() -> None:
    shares = sample.trust(
        modelled_share=0.98, modelled_share_of_all=0.588, attributable_share=0.6, without_launch_share=0.25, collective_share=0.08,
        copy_share=0.019, replay_share=0.001, without_shapes_share=0.05, outside_ops_share=0.0,
    )  # fmt: skip
    assert data_quality.format_coverage(sample.report(trust=shares)) == (
        "Cost models cover 98 % of the kernel time that can be modelled, 59 % of all; the rest: 25 % launched before the recording, "
        "8 % communication, 5 % in ops without shapes, 2 % copies and memory fills, 1 % in ops without a cost model."
    )
    assert sum(share for _, share in data_quality.list_uncovered(sample.report(trust=shares))) == pytest.approx(1 - 0.588 - 0.001)


def test_replays_that_are_mapped_to_their_capture_are_said() -> None:
    lines = dict(data_quality.list_quality_lines(sample.report(trust=sample.trust(mapped_replay_share=0.9))))
    assert "90 % through the capture of the replayed graph" in lines["coverage"]
    assert "by way of" not in dict(data_quality.list_quality_lines(sample.report()))["coverage"]


def test_the_coverage_line_of_a_whole_and_of_no_recording() -> None:
    whole = sample.trust(modelled_share=1.0, modelled_share_of_all=1.0, without_launch_share=0.0)
    assert data_quality.format_coverage(sample.report(trust=whole)) == "Cost models cover 100 % of the kernel time."
    nothing = sample.trust(modelled_share=None, modelled_share_of_all=0.0, without_launch_share=1.0)
    assert (
        data_quality.format_coverage(sample.report(trust=nothing))
        == "Cost models cover none of the kernel time: 100 % launched before the recording."
    )
    assert data_quality.format_coverage(sample.report(trust=sample.trust(linked_share=None, modelled_share=None))) == ""


def test_a_killed_run_is_not_said_to_lack_unprofiled_steps() -> None:
    unfinished = make_notice(NoticeCode.RECORDING_UNFINISHED)
    killed = sample.trust(profiler_slowdown=None, notices=(unfinished,), warnings=(format_notice(unfinished),))
    assert (
        "before the wall times of its unprofiled steps were written"
        in dict(data_quality.list_quality_lines(sample.report(trust=killed)))["profiler"]
    )
    whole = sample.trust(profiler_slowdown=None)
    assert "no unprofiled steps were recorded" in dict(data_quality.list_quality_lines(sample.report(trust=whole)))["profiler"]


def test_only_what_the_slow_down_explains_is_laid_on_it() -> None:
    """Findings that are withheld because torch.compile was at work are no matter of the profiler."""
    compiling = RuleOutcome("INP-01", "not_applicable", "withheld: torch.compile was at work in 100 % of the steps (EFF-03)")
    slowed = RuleOutcome("OVH-01", "not_applicable", "withheld: a step is 1.10 times as long with the profiler, 2 ms more")
    said = dict(data_quality.list_quality_lines(sample.report(trust=sample.trust(profiler_slowdown=1.1), rules=(compiling, slowed))))[
        "profiler"
    ]
    assert "OVH-01" in said
    assert "INP-01" not in said
    only = dict(data_quality.list_quality_lines(sample.report(trust=sample.trust(profiler_slowdown=1.03), rules=(compiling,))))["profiler"]
    assert only == "Profiled steps take 1.03 x as long as unprofiled ones."


def test_rules_that_the_user_changed_are_told() -> None:
    off = RuleOutcome("MEM-07", "not_applicable", "switched off in gpudiag.toml")
    changed = RuleOutcome("OVH-01", "passed", changed="min_share 0.2 (default 0.15)")
    assert dict(data_quality.list_quality_lines(sample.report(rules=(off, changed))))["rules"] == (
        "Thresholds changed: OVH-01 min_share 0.2 (default 0.15). Switched off: MEM-07."
    )
    assert "rules" not in dict(data_quality.list_quality_lines(sample.report()))


def test_events_that_were_not_used_are_counted() -> None:
    assert dict(data_quality.list_quality_lines(sample.report()))["read"] == "216,092 events, 7,360 kernels; not used: 15,012 flow arrows."


def test_a_utilisation_of_mixed_types_names_their_parts_beside_the_figure() -> None:
    mixed = make_notice(NoticeCode.MFU_MIXED_TYPES, types="bf16 66 %, fp8 34 %")
    report = sample.report(mfu=_mfu(), trust=sample.trust(notices=(mixed,), warnings=("",)))
    assert data_quality.format_mfu(report).endswith("of the bf16 peak; of the matrix work, by type: bf16 66 %, fp8 34 %.")


def _mfu(**changes: object) -> Mfu:
    made = sample.report().mfu
    assert made is not None
    return msgspec.structs.replace(made, **changes)


def test_utilisation_names_its_denominator() -> None:
    mfu = _mfu(share=0.356, peak_flop_per_s=989.4e12)
    assert data_quality.format_mfu(sample.report(mfu=mfu)) == (
        "Model FLOPs utilisation (MFU): 35.6 % of 989 TFLOP/s (bf16 dense, NVIDIA H100 80GB HBM3)."
    )
    assert data_quality.format_mfu(sample.report(mfu=_mfu())) == "Model FLOPs utilisation (MFU): 15.0 % of the bf16 peak."
    assert ": below 0.1 % of" in data_quality.format_mfu(sample.report(mfu=_mfu(share=0.0002)))


def test_hardware_utilisation_only_where_work_is_repeated() -> None:
    mfu = _mfu(peak_flop_per_s=989.4e12, hfu_share=0.2, recompute_flops=0.0)
    assert "HFU" not in data_quality.format_mfu(sample.report(mfu=mfu))
    repeated = msgspec.structs.replace(mfu, recompute_flops=1e13)
    assert data_quality.format_mfu(sample.report(mfu=repeated)).endswith("; with recomputed work (HFU) 20.0 %.")


def test_utilisation_that_misses_work_is_a_lower_bound() -> None:
    assert "(MFU): at least 15.0 % of" in data_quality.format_mfu(sample.report(mfu=_mfu(known_share=0.6)))
    assert "at least" not in data_quality.format_mfu(sample.report(mfu=_mfu(known_share=0.99)))


def test_utilisation_is_left_out_where_it_is_not_known() -> None:
    assert "utilisation" in dict(data_quality.list_quality_lines(sample.report()))
    assert "utilisation" not in dict(data_quality.list_quality_lines(sample.report(mfu=None)))
    assert data_quality.format_mfu(sample.report(mfu=None)) == ""


def test_published_figures_carry_their_denominators() -> None:
    reference = MfuReference("Llama 3.1 8B, FSDP, 8 H100", 0.356, "989 TFLOP/s bf16", "https://example.org")
    assert data_quality.format_mfu_reference(reference) == "35.6 % of 989 TFLOP/s bf16"
    assert data_quality.format_mfu_reference(msgspec.structs.replace(reference, another_device=True)).endswith(
        "989 TFLOP/s bf16, another device"
    )


def _kernel(ms: int, op: str | None, kernel_class: str | None) -> KernelRow:
    return KernelRow(name="k", kind="kernel", count=1, kernel_ns=ms * MS, bound="unknown", op=op, kernel_class=kernel_class)


def test_kernels_without_an_op_are_told_by_their_names() -> None:
    kernels = (_kernel(60, None, "gemm"), _kernel(20, None, "triton_pointwise"), _kernel(20, "aten::mm", "gemm"))
    lines = dict(data_quality.list_quality_lines(sample.report(kernels=kernels)))
    assert lines["by name"] == (
        "80 % of the kernel time is in kernels without an attributed op; by their names: 60 % gemm, 20 % triton pointwise."
    )
    few = (_kernel(97, "aten::mm", "gemm"), _kernel(3, None, "gemm"))
    assert "by name" not in dict(data_quality.list_quality_lines(sample.report(kernels=few)))
    assert "by name" not in dict(data_quality.list_quality_lines(sample.report(kernels=())))


def test_the_largest_line_stands_on_the_first_screen() -> None:
    wall, count = sample.report().breakdown.wall_ns, sample.report().steps.count
    own, below = Where("main", "train.py", 31, wall // 2), Where("forward", "aggr/base.py", 185, wall // 5)
    said = data_quality.format_headlines(sample.report(lines=(own, below)))[0]
    assert said == (
        f"Line with the most op time, its backward pass included: train.py:31 (main), {format_ns(wall / 2 / count)} (50 %); "
        f"largest below it: aggr/base.py:185 (forward), {format_ns(wall / 5 / count)} (20 %)."
    )
    small = msgspec.structs.replace(own, time_ns=wall // 11)
    assert data_quality.format_headlines(sample.report(lines=(small,))) == data_quality.format_headlines(sample.report())


def test_contention_stands_on_the_first_screen() -> None:
    busy = sample.finding(
        rule="HW-05", role="disturbance", where=(), message="The cores are contended. Other programs kept 65 % of them busy."
    )
    assert busy.message in data_quality.format_headlines(sample.report(findings=(sample.finding(), busy)))
    calm, disturbed = (build_quality_tile(sample.report(findings=found)) for found in ((sample.finding(),), (sample.finding(), busy)))
    assert disturbed.figure != calm.figure
    assert busy.message in str(disturbed.opens)
    rare = sample.finding(
        rule="EFF-05", role="first_screen", message="Much of the run is not usual.", where=(Where("evaluate()", "train.py", 31),)
    )
    assert "Much of the run is not usual. Seen most: evaluate() (train.py:31)." in data_quality.format_headlines(
        sample.report(findings=(rare,))
    )
    assert not any("contended" in said for said in data_quality.format_headlines(sample.report()))
