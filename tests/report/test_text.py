"""The report in a terminal."""

from __future__ import annotations

import re

import msgspec
import pytest
import report_sample as sample
from noticewords import format_notices, texts
from rendered import render_text
from rich.cells import cell_len

from gpudiag.model.finding import RuleOutcome
from gpudiag.model.notices import NoticeCode, make_notice
from gpudiag.model.report import Source
from gpudiag.report import labels
from gpudiag.report.console import replace_unencodable

REPORTS = {
    "full": sample.report(),
    "roofline": sample.roofline(),
    "no device": sample.no_device(),
    "hostile": sample.hostile(),
    "nothing found": sample.report(findings=()),
    "empty": sample.report(findings=(), ops=(), rules=(), breakdown=sample.breakdown({})),
}
SGR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("name", list(REPORTS))
@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_no_line_is_wider_than_the_terminal(name: str, width: int) -> None:
    wide = [line for line in render_text(REPORTS[name], width=width).splitlines() if cell_len(line) > width]
    assert wide == []


@pytest.mark.parametrize("name", list(REPORTS))
def test_plain_text_holds_no_control_characters(name: str) -> None:
    plain = render_text(REPORTS[name])
    assert [character for character in plain if not character.isprintable() and character != "\n"] == []
    assert plain.endswith("\n")
    replace_unencodable(plain, "ascii").encode("ascii")


def test_colours_are_only_colours_and_change_no_word() -> None:
    coloured = render_text(REPORTS["hostile"], color=True)
    assert SGR.search(coloured)
    stripped = "\n".join(line.rstrip() for line in SGR.sub("", coloured).splitlines())
    assert stripped == render_text(REPORTS["hostile"]).rstrip("\n")


def test_the_verdict_comes_before_everything_else() -> None:
    plain = " ".join(render_text(sample.report()).split())
    order = [
        "A step takes",
        "Cost models cover",
        "(MFU)",
        "Where a step goes",
        "Findings",
        "Data quality",
        "Top ops by time",
        "Of 3 rules",
    ]
    assert [plain.index(words) for words in order] == sorted(plain.index(words) for words in order)


def test_figures_of_the_breakdown_are_per_step() -> None:
    plain = render_text(sample.report())
    assert re.search(r"compute-bound kernels +22\.5 ms +30\.0 % +█", plain)
    assert re.search(r"idle: host overhead \(Python, framework, launches\) +25\.0 ms +33\.3 % +█", plain)
    assert "garbage collection" not in plain  # zero


def test_rules_that_hold_and_are_no_finding_are_named_and_their_reasons_told_on_request() -> None:
    rules = (
        RuleOutcome("CMP-02", "suppressed", "holds, but would save 0.0 % of the step at most at the recorded pace: fp32"),
        RuleOutcome("MEM-01", "suppressed", "OVH-01: the device waits"),
        RuleOutcome("MEM-02", "suppressed", "OVH-01: the device waits"),
        RuleOutcome("OVH-02", "not_applicable", "withheld: a step is 1.25 times as long"),
        RuleOutcome("OVH-03", "not_applicable", "no ops"),
    )
    brief = " ".join(render_text(sample.report(rules=rules)).split())
    assert "Suppressed, no gain at the recorded pace: CMP-02. Suppressed (why: --all-findings): MEM-01, MEM-02, OVH-02. A" in brief
    full = " ".join(render_text(sample.report(rules=rules), everything=True).split())
    assert "CMP-02 holds, but would save 0.0 % of the step at most at the recorded pace: fp32" in full
    assert "Suppressed: MEM-01, MEM-02: OVH-01: the device waits Suppressed: OVH-02: a step is 1.25 times as long" in full
    assert "Suppressed" not in render_text(sample.report())


def test_the_parts_are_seen_to_sum_to_the_step() -> None:
    assert re.search(r"^sum: the step +75\.0 ms +100\.0 %$", render_text(sample.report()), re.MULTILINE)


def test_a_weak_measurement_stands_in_trust_and_an_invalid_one_first() -> None:
    measured = sample.finding(
        rule="EFF-03", role="measurement", title="The recording distorts", bound="method", ceiling=None, message="Steps analysed: 1."
    )
    weak = msgspec.structs.replace(measured, severity="info")
    plain = render_text(sample.report(findings=(sample.finding(), weak)))
    assert "The recording distorts" not in plain
    assert plain.index("Data quality") < plain.index("Steps analysed: 1.")
    assert "found a cause worth changing" in render_text(sample.report(findings=(weak,)))
    assert "1. The recording distorts  critical  EFF-03" in render_text(sample.report(findings=(measured, sample.finding())))


def test_path_and_device_have_lines_of_their_own() -> None:
    path = f"runs/{'long/' * 20}trace.json.gz"
    lines = render_text(sample.report(source=Source(path, "trace"))).splitlines()
    assert lines[0] == "gpudiag 0.1.0 on NVIDIA H100 80GB HBM3"
    assert "".join(lines[1:3]) == path


def test_call_sites_stand_under_their_ops() -> None:
    rows = (
        sample.op("aten::mm", 9, where="/home/me/models/net.py(12): forward", phase="forward"),
        sample.op("aten::add_", 1, signature=None),
    )
    lines = render_text(sample.report(ops=rows)).splitlines()
    (place,) = [k for k, line in enumerate(lines) if line.startswith("aten::mm ")]
    assert lines[place + 1] == "  models/net.py:12 forward, [[4096,4096],[4096,4096]], forward"
    assert lines[place + 2].startswith("aten::add_ ")


def test_figures_are_whole_in_a_narrow_terminal() -> None:
    narrow = render_text(sample.report(), width=60)
    assert re.search(r"compute-bound kernels +22\.5 ms +30\.0 %$", narrow, re.MULTILINE)
    assert "█" not in narrow  # a bar of three characters shows nothing


def test_the_longest_bar_is_the_largest_part() -> None:
    bars = {line.count("█"): line for line in render_text(sample.report()).splitlines() if "█" in line}
    assert "host overhead (Python, framework, launches)" in bars[max(bars)]


def test_three_findings_are_told_and_the_rest_named() -> None:
    findings = tuple(sample.finding(rule=f"OVH-0{k}", title=f"Finding {k}", message=f"Message {k}.") for k in range(1, 6))
    plain = render_text(sample.report(findings=findings))
    assert "Message 3." in plain
    assert "Message 4." not in plain
    assert "4. Finding 4 (OVH-04, critical, up to 33 %)\n" in plain
    assert "5. Finding 5 (OVH-05, critical, up to 33 %)\n" in plain
    assert plain.count("These upper bounds do not add up") == 1
    everything = render_text(sample.report(findings=findings), everything=True)
    assert "Message 5." in everything
    assert "more (in full" not in everything


def test_a_finding_shows_ceiling_and_code_change() -> None:
    plain = " ".join(render_text(sample.report()).split())
    assert "Potential speed-up: up to 25.0 ms of the 75.0 ms of a step (33 %; an upper bound) if every kernel" in plain
    assert 'model = torch.compile(model, mode="reduce-overhead")' in plain
    assert "Where: loss.item() (train.py:41), 2.00 ms a step" in plain


def test_a_report_without_findings_says_what_was_judged() -> None:
    plain = " ".join(render_text(REPORTS["nothing found"]).split())
    assert "No rule that could be judged found a cause worth changing" in plain
    assert "1 not applicable" in plain
    assert "no attention op was recorded" in plain


def test_without_a_device_it_says_that_no_roofline_was_possible() -> None:
    plain = " ".join(render_text(REPORTS["no device"]).split())
    assert "there is no roofline" in plain
    assert "the device is not named in the recording" in plain


def test_ops_are_cut_at_top_and_sorted_by_time() -> None:
    plain = render_text(sample.many_ops(50), top=7)
    assert re.findall(r"aten::op_\d+", plain) == [f"aten::op_{k:04d}" for k in range(7)]
    assert "7 of 50" in plain
    assert "Top ops by time" not in render_text(sample.many_ops(5), top=0)


def test_op_figures() -> None:
    # 48 calls in 90 ms of 185 ms; 494.7 of 989.4 TFLOP/s
    (line,) = [line for line in render_text(sample.report(), width=120).splitlines() if line.startswith("aten::mm ")]
    assert line.split()[-10:-1] == ["90.0", "ms", "48.6", "%", "compute", "50", "%", "495", "362"]
    assert line.split()[-1] == labels.format_number(494.7e12 / 362e9)


def test_what_is_not_known_is_a_question_mark_with_a_legend() -> None:
    plain = render_text(sample.report())
    (line,) = [line for line in plain.splitlines() if line.startswith("mylib::custom_kernel")]
    assert line.split()[-4:] == ["?", "?", "?", "?"]
    assert "?: unavailable" in plain


def test_utilisation_stands_with_its_denominator_and_published_figures() -> None:
    plain = " ".join(render_text(sample.roofline()).split())
    assert "(MFU): 33.6 % of 989 TFLOP/s (bf16 dense, NVIDIA H100 80GB HBM3); with recomputed work (HFU) 43.7 %." in plain
    assert "published Llama 3.1 8B, FSDP, 8 H100: 35.6 % of 989 TFLOP/s bf16; Megatron-LM, 3072 A100: 52.4 % of 312" in plain
    assert "published" not in render_text(sample.report())


def test_recomputed_work_and_what_beats_its_roof_are_words() -> None:
    lines = render_text(sample.roofline(), width=120).splitlines()
    places = {line.split()[0]: k for k, line in enumerate(lines) if line.startswith("aten::")}
    assert lines[places["aten::mm"] + 1].endswith("backward, 33 % recomputed")
    assert lines[places["aten::addmm"] + 1].endswith("backward, recomputed")
    relu = lines[places["aten::relu"]]
    assert "above roofline" in relu
    assert "131" not in relu
    assert "above roofline: faster than the peak allows" in " ".join(lines)
    assert "above roofline" not in render_text(sample.report())


def test_an_efficiency_that_cannot_be_is_not_shown_even_where_nothing_marked_it() -> None:
    plain = render_text(sample.report(ops=(sample.op("aten::mm", 9, efficiency=2.16),)))
    assert "216 %" not in plain
    assert "above roofline" in plain


def test_warnings_that_repeat_the_steps_are_left_out() -> None:
    repeated = (make_notice(NoticeCode.NO_STEP_MARKS), make_notice(NoticeCode.FEW_STEPS, steps=3), *texts("only 3 ranks"))
    plain = render_text(sample.report(trust=sample.trust(warnings=format_notices(repeated), notices=repeated)))
    assert [line for line in plain.splitlines() if line.startswith("!")] == ["! only 3 ranks"]


def test_a_finding_that_no_fix_mends_says_what_to_know() -> None:
    told = [" ".join(render_text(sample.report(findings=(sample.finding(fixes=fixes),))).split()) for fixes in ((), ("compile",))]
    assert ["Note: A kernel that is launched after the device fell idle" in plain for plain in told] == [True, False]
