"""The programs in many styles: each has a truth that names real rules and real lines, and reports are held against it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from styles.table import Pair, judge

from gpudiag.model.finding import Ceiling, Finding, Severity, Where

ROOT = Path(__file__).resolve().parents[2]
STYLES = ROOT / "samples" / "styles"
TRUTHS = yaml.safe_load((STYLES / "truth.yaml").read_text())
RULES = {path.stem for path in (ROOT / "rules").glob("*/*.yaml")}
PAIRS = (Pair(4.0, 4.0, 2.0, 1.0), Pair(5.0, 5.0, 2.0, 2.0))
"""Gains of 50 and 60 % by wall, 75 and 60 % by CPU time."""


class Reported:
    """As much of a report as is judged."""

    def __init__(self, *findings: Finding) -> None:
        self.findings = findings


def say(rule: str, *places: tuple[int, int], severity: Severity = "warning", bound: float = 0.3) -> Finding:
    where = tuple(Where("a call", "/elsewhere/program.py", line, time) for line, time in places)
    return Finding(rule, "title", severity, "overhead", "message", ceiling=Ceiling(1, bound, "formula", "gone"), where=where)


def test_the_programs_and_their_truths_are_the_same() -> None:
    programs = {path.stem for path in STYLES.glob("*.py")} - {"score", "table"}
    healthy = {name for name in programs if name.startswith("healthy_")}
    assert programs - healthy == set(TRUTHS)
    assert len(TRUTHS) >= 25
    assert len(healthy) >= 10


@pytest.mark.parametrize("name", TRUTHS)
def test_a_truth_names_rules_and_lines_that_exist(name: str) -> None:
    text = (STYLES / f"{name}.py").read_text()
    assert any(line.endswith("# cause") for line in text.splitlines())
    assert "--cured" in text
    assert set(TRUTHS[name]["rules"]) <= RULES


def test_the_first_finding_above_info_its_line_and_its_bound_are_judged() -> None:
    report = Reported(say("EFF-03", severity="info"), say("OVH-08", (12, 5), (40, 9)), say("MEM-05", (40, 99)))
    score = judge(report, "program.py", ("OVH-08",), {12}, PAIRS)
    assert (score.right, score.line, score.line_right, score.loud) == (True, "program.py:12", True, ("OVH-08", "MEM-05"))
    assert score.gain == pytest.approx(0.55)
    assert score.promise == pytest.approx(0.3 / 0.55)
    assert score.below  # 30 % was promised at most, and each pair gained 50 % or more
    assert not judge(Reported(say("OVH-08", bound=0.55)), "program.py", ("OVH-08",), {12}, PAIRS).below


def test_another_first_finding_or_line_is_wrong_and_promises_nothing() -> None:
    score = judge(Reported(say("MEM-05", (13, 5)), say("OVH-08", (12, 5))), "program.py", ("OVH-08",), {12}, PAIRS)
    assert (score.right, score.line_right, score.promise, score.below) == (False, False, None, False)
    assert not judge(Reported(say("OVH-08", (12, 5))), "other.py", ("OVH-08",), {12}, PAIRS).line_right


def test_where_no_rule_knows_the_cause_the_largest_call_site_counts() -> None:
    report = Reported(say("MEM-05", (13, 5)), say("CMP-02", (12, 50), severity="info"))
    assert judge(report, "program.py", (), {12}, PAIRS).line_right
    assert not judge(report, "program.py", (), {13}, PAIRS).line_right
    assert not judge(Reported(), "program.py", (), {13}, PAIRS).line_right


def test_nothing_above_info_may_be_said_of_a_healthy_program() -> None:
    assert not judge(Reported(say("EFF-03", severity="info")), "healthy.py", None, set(), ()).loud
    assert judge(Reported(say("CMP-02")), "healthy.py", None, set(), ()).loud == ("CMP-02",)
