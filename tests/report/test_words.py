"""What every renderer says: the verdict, the breakdown, ceilings, trust."""

from __future__ import annotations

import msgspec
import pytest
import report_sample as sample
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.model.finding import Ceiling, Evidence
from gpudiag.model.notices import NoticeCode, make_notice
from gpudiag.model.report import RuleOutcome, StepSummary
from gpudiag.model.timeline import BUCKETS
from gpudiag.report import labels

MS = sample.MS


@given(st.dictionaries(st.sampled_from(BUCKETS), st.integers(0, 10**6), min_size=1))
def test_the_lines_of_the_breakdown_add_up_to_the_step(milliseconds: dict[str, int]) -> None:
    report = sample.report(breakdown=sample.breakdown(milliseconds))
    rows = labels.build_bucket_rows(report)
    assert len(rows) <= 12
    assert sum(row.ns for row in rows) == pytest.approx(labels.step_ns(report))
    assert sum(row.share for row in rows) == pytest.approx(1 if report.breakdown.wall_ns else 0)
    assert all(row.ns > 0 for row in rows)
    shown = {row.bucket for row in rows}
    for name in ("unknown", "idle_unexplained"):  # what is not known is never merged away
        assert (name in shown) == (milliseconds.get(name, 0) > 0)


@given(st.dictionaries(st.sampled_from(BUCKETS), st.integers(0, 10**6), min_size=1).filter(lambda parts: sum(parts.values()) > 0))
def test_the_verdict_is_two_sentences_for_any_breakdown(milliseconds: dict[str, int]) -> None:
    text = labels.format_verdict(sample.report(breakdown=sample.breakdown(milliseconds)))
    assert text.startswith("A step takes ")
    assert text.endswith(".")
    assert text.count(" of it") == 1
    assert ("not modelled" in text) == (milliseconds.get("unknown", 0) / sum(milliseconds.values()) >= 0.005)


def test_the_verdict_names_the_largest_part_first() -> None:
    text = labels.format_verdict(sample.report())
    assert text == (
        "A step takes 75.0 ms. The GPU spends 39 % of it idle (mostly host-bound, 33 %), 30 % in "
        "compute-bound kernels, 20 % in memory-bound kernels, 5 % in exposed communication and 3 % in kernels that are not modelled; "
        "smaller parts make up the other 3 %."
    )


def test_the_verdict_of_a_step_that_only_computes() -> None:
    assert (
        labels.format_verdict(sample.report(breakdown=sample.breakdown({"compute": 300})))
        == "A step takes 75.0 ms. The GPU spends 100 % of it in compute-bound kernels."
    )


def test_without_time_the_verdict_says_so() -> None:
    assert labels.format_verdict(sample.report(breakdown=sample.breakdown({}))).startswith("No time could be analysed")


def test_without_steps_the_window_is_not_called_a_step() -> None:
    steps = StepSummary(1, "whole trace", 300 * MS, None, None)
    report = sample.report(steps=steps)
    assert labels.format_verdict(report).startswith(
        "The recorded window lasts 300 ms; no steps are marked in it, so it counts as one step. The GPU "
    )


def test_a_ceiling_is_told_per_step() -> None:
    # 100 ms over 4 steps of 75 ms
    assert labels.format_upper_bound(sample.finding(), sample.report()) == (
        "Potential speed-up: up to 25.0 ms of the 75.0 ms of a step (33 %; an upper bound) if every kernel were launched before the device "
        'falls idle. On 1 other program (GPU), "Compile with CUDA graphs" gave 1.08 x the speed.'
    )
    assert labels.format_upper_bound(sample.finding(ceiling=None), sample.report()) == "Potential speed-up: not known."
    assert (
        labels.format_upper_bound(sample.finding(ceiling=None, bound="method"), sample.report()) == ""
    )  # about the recording, not the step
    assert (
        labels.format_upper_bound(sample.finding(ceiling=Ceiling(4 * MS, 0.0133, "formula", ""), fixes=()), sample.report())
        == "Potential speed-up: up to 1.00 ms of the 75.0 ms of a step (1 %; an upper bound)."
    )


def test_programs_that_gained_more_than_can_be_gained_here_are_no_example() -> None:
    for share, told in ((0.08, True), (0.07, False)):  # the program gained 1.08 x, or 7.4 % of its step
        ceiling = Ceiling(round(share * 300 * MS), share, "formula", "")
        assert ("1.08 x" in labels.format_upper_bound(sample.finding(ceiling=ceiling), sample.report())) == told


def test_nearly_all_of_a_step_is_never_called_all_of_it() -> None:
    found = sample.finding(ceiling=Ceiling(300 * MS - 1, 1 - 1e-9, "formula", ""), fixes=())
    assert "(over 99 %; an upper bound)" in labels.format_upper_bound(found, sample.report())


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.333, "share", "33.3 %"),
        (25 * MS, "ns", "25.0 ms"),
        (1.5e9, "B", "1.50 GB"),
        (3.35e12, "B/s", "3.35 TB/s"),
        (1840, "kernels", "1,840 kernels"),
        (1840, "count", "1,840"),
        (2.34567, "ratio", "2.35"),
        (True, "bool", "yes"),
        ("bf16", "text", "bf16"),
    ],
)
def test_evidence_carries_its_unit(value: object, unit: str, text: str) -> None:
    assert labels.format_evidence(Evidence("fact", value, unit)) == text  # type: ignore[arg-type]


def test_a_fix_that_is_not_known_stands_for_itself() -> None:
    assert labels.list_fix_lines(sample.finding(fixes=("compile", "my-own"))) == [
        ("Compile the model", "model = torch.compile(model)", "differs by rounding"),
        ("my-own", "", ""),
    ]


def test_a_cpu_run_does_not_speak_of_kernels() -> None:
    device = msgspec.structs.replace(sample.device(), kind="cpu", name="Xeon")
    report = sample.report(device=device)
    assert "The CPU spends 39 % of it idle" in labels.format_verdict(report)
    assert "kernel" not in labels.format_verdict(report) + "".join(row.label for row in labels.build_bucket_rows(report) if not row.idle)


def test_rates_of_unknown_work_are_unknown() -> None:
    assert labels.compute_rate(None, 5) is None
    assert labels.compute_rate(1.0, 0) is None
    assert labels.format_number(None) == "?"
    assert [labels.format_number(value) for value in (0.0, 0.001, 0.034, 12.34, 1234.5)] == ["0", "<0.01", "0.03", "12.3", "1,234"]
    assert [labels.format_number(share, 100, " %") for share in (0.0, 0.001, 0.5)] == ["0 %", "<1 %", "50 %"]


def test_what_is_nearly_all_is_not_called_all() -> None:
    text = labels.format_verdict(sample.report(breakdown=sample.breakdown({"idle_unexplained": 9_999, "memory": 1})))
    assert text.endswith("The GPU spends over 99 % of it idle.")


@pytest.mark.parametrize(
    ("rate", "flop_unit", "byte_unit"),
    [(4e14, "TFLOP/s", "TB/s"), (3e12, "GFLOP/s", "GB/s"), (1.3e11, "GFLOP/s", "GB/s"), (5e5, "MFLOP/s", "MB/s")],
)
def test_the_unit_of_a_table_fits_most_of_its_time(rate: float, flop_unit: str, byte_unit: str) -> None:
    rows = [sample.op("typical", 90, flops=rate * 0.09, bytes=rate * 0.09), sample.op("fast and short", 0.1, flops=1e15, bytes=1e12)]
    report = sample.report(ops=tuple(rows))
    assert [unit for unit, _ in labels.choose_op_units(report)] == [flop_unit, byte_unit]
    assert [unit for unit, _ in labels.choose_op_units(sample.report(), rows)] == [flop_unit, byte_unit]


def test_a_table_without_rates_has_a_unit() -> None:
    assert labels.choose_op_units(sample.report(), [])[0][0] == "GFLOP/s"


def test_idle_time_without_causes_says_what_to_record() -> None:
    idle = sample.breakdown({"compute": 200, "idle_unexplained": 100})
    assert labels.format_idle_note(sample.report(breakdown=idle)).startswith(
        "The idle time is unexplained: nothing was recorded on the host"
    )
    split = sample.breakdown({"compute": 200, "idle_unexplained": 60, "idle_launch": 40})
    assert labels.format_idle_note(sample.report(breakdown=split)).startswith("The GPU is idle for 20 % of a step without a known cause")
    bundle = msgspec.structs.replace(sample.report().source, kind="bundle")  # gpudiag.profile made it: to advise that again helps nobody
    assert "gpudiag.profile" not in labels.format_idle_note(sample.report(breakdown=split, source=bundle))
    stacks = msgspec.structs.replace(sample.report().trust, site_match_share=0.9)
    assert "Python stacks" in labels.format_idle_note(sample.report(breakdown=split))
    assert "Python stacks" not in labels.format_idle_note(sample.report(breakdown=split, trust=stacks))
    little = sample.breakdown({"compute": 200, "idle_unexplained": 20, "idle_launch": 80})
    assert labels.format_idle_note(sample.report(breakdown=little)) == ""


def test_a_replayed_ceiling_has_an_error_and_none_is_told_in_words() -> None:
    replayed = Ceiling(100 * MS, 1 / 3, "replay", "the host were quicker", 0.018)
    assert labels.format_upper_bound(sample.finding(ceiling=replayed, fixes=()), sample.report()) == (
        "Potential speed-up: up to 25.0 ms of the 75.0 ms of a step (33 %; an upper bound, replay error 2 %) if the host were quicker."
    )
    nothing = Ceiling(0, 0.0, "replay", "the host were quicker", 0.018)
    assert labels.format_upper_bound(sample.finding(ceiling=nothing), sample.report()) == (
        "No gain by itself: replayed, the step takes as long if the host were quicker; other work is on the critical path."
    )


def test_rules_that_only_weaken_the_measurement_are_told_apart() -> None:
    weak = sample.finding(rule="EFF-03", role="measurement", severity="info", bound="method")
    assert "1 fired (EFF-03 on data quality)" in labels.format_rule_counts(sample.report(findings=(weak,)))
    plain = sample.report(findings=(sample.finding(folded=()),))
    assert "1 fired, " in labels.format_rule_counts(plain)
    explains = sample.report(findings=(weak, sample.finding(folded=("OVH-03", "OVH-02"))))
    assert "1 fired (EFF-03 on data quality; OVH-02, OVH-03 explained by others)" in labels.format_rule_counts(explains)


def test_rules_that_are_withheld_count_as_suppressed() -> None:
    held = RuleOutcome("OVH-01", "not_applicable", "", notice=make_notice(NoticeCode.WITHHELD_BY_PROFILER, slowdown=2.0, added_ns=1.0))
    assert "0 not applicable, 1 suppressed" in labels.format_rule_counts(sample.report(rules=(held,)))


def test_where_most_rules_lack_what_they_look_at_it_says_first_what_to_record() -> None:
    unseen = make_notice(NoticeCode.NOT_APPLICABLE_MISSING, reason="no kernel is linked to an op")
    rules = (*(RuleOutcome(f"CMP-0{i}", "not_applicable", "", notice=unseen) for i in range(3)), RuleOutcome("INP-01", "passed"))
    whole = make_notice(NoticeCode.NSYS_WHOLE_GRAPHS, launches=10, share=1.0)
    said = labels.format_nothing_found(sample.report(rules=rules, trust=sample.trust(notices=(whole,), warnings=("",))))
    assert said.startswith("Most rules could not be judged: ")
    assert "--cuda-graph-trace=node" in said
    replayed = sample.report(rules=rules, trust=sample.trust(replay_share=0.88, notices=(), warnings=()))
    assert labels.format_nothing_found(replayed).startswith(
        "Most rules could not be judged: 88 % of the kernel time was replayed from graphs; record their capture too (--graph-capture). No"
    )
    few = sample.report(rules=rules[2:], trust=sample.trust(replay_share=0.88, notices=(), warnings=()))
    assert labels.format_nothing_found(few).startswith("No rule that could be judged found a cause worth changing.")
