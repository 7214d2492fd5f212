"""The programs in many styles: each has a truth that names real rules and real lines, and reports are held against it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from suite.programs import Pair, Score, Truth, judge, write_table

from gpudiag.model.finding import Ceiling, Finding, Severity, Where

ROOT = Path(__file__).resolve().parents[2]
STYLES = ROOT / "samples" / "styles"
TRUTHS = yaml.safe_load((STYLES / "truth.yaml").read_text())
PLANTED = [name for name, truth in TRUTHS.items() if "cause" in truth]
RULES = {path.stem for path in (ROOT / "rules").glob("*/*.yaml")}
TRUTH = Truth(rules=("OVH-08",))
PAIRS = (Pair(4.0, 4.0, 2.0, 1.0), Pair(5.0, 5.0, 2.0, 2.0))
"""Gains of 50 and 60 % by wall, 75 and 60 % by CPU time."""


class Reported:
    """As much of a report as is judged."""

    ops, breakdown = (), SimpleNamespace(wall_ns=100)

    def __init__(self, *findings: Finding, lines: tuple[Where, ...] = ()) -> None:
        self.findings, self.lines = findings, lines


def say(rule: str, *places: tuple[int, int], severity: Severity = "warning", bound: float = 0.3) -> Finding:
    where = tuple(Where("a call", "/elsewhere/program.py", line, time) for line, time in places)
    return Finding(rule, "title", severity, "overhead", "message", ceiling=Ceiling(1, bound, "formula", "gone"), where=where)


def test_the_programs_and_their_truths_are_the_same() -> None:
    programs = {path.stem for path in STYLES.glob("*.py")} - {"score"}
    healthy = {name for name in programs if name.startswith("healthy_")}
    assert programs - healthy == set(PLANTED)
    assert set(TRUTHS) - set(PLANTED) <= healthy
    assert all(set(TRUTHS[name]["gains"]) <= RULES for name in set(TRUTHS) - set(PLANTED))
    assert len(PLANTED) >= 25
    assert len(healthy) >= 10


@pytest.mark.parametrize("name", PLANTED)
def test_a_truth_names_rules_and_lines_that_exist(name: str) -> None:
    text = (STYLES / f"{name}.py").read_text()
    assert any(line.endswith("# cause") for line in text.splitlines())
    assert "--cured" in text
    assert set(TRUTHS[name]["rules"]) <= RULES


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text("def train():\n    prepare()\n    slow()  # cause\n\ndef main():\n    train()\n")
    return path


def test_the_first_finding_above_info_its_line_and_its_bound_are_judged(program: Path) -> None:
    report = Reported(say("EFF-03", severity="info"), say("OVH-08", (3, 5), (40, 9)), say("MEM-05", (40, 99)))
    score = judge(report, program, TRUTH, PAIRS)
    assert (score.right, score.line, score.line_right, score.loud) == (True, "program.py:3", True, ("OVH-08", "MEM-05"))
    assert score.gain == pytest.approx(0.55)
    assert score.promise == pytest.approx(0.3 / 0.55)
    assert score.below  # 30 % was promised at most, and each pair gained 50 % or more
    assert not judge(Reported(say("OVH-08", bound=0.46)), program, TRUTH, PAIRS).below  # within noise


def test_a_program_that_could_not_be_recorded_is_wrong(tmp_path: Path) -> None:
    score = Score.without_report("program", TRUTH)
    assert (score.right, score.line_right, score.promise, score.below) == (False, False, None, False)
    write_table([score, Score.without_report("healthy_one", Truth())], tmp_path / "SCORE.md", "Scores", "")
    text = (tmp_path / "SCORE.md").read_text()
    assert "First finding right: 0 of 1" in text
    assert "no measured gain bears out: 1 of 1" in text


def test_another_first_finding_is_wrong_and_promises_nothing(program: Path) -> None:
    score = judge(Reported(say("MEM-05", (2, 5)), say("OVH-08", (3, 5))), program, TRUTH, PAIRS)
    assert (score.right, score.line_right, score.promise, score.below) == (False, False, None, False)


@pytest.mark.parametrize(("line", "right", "function"), [(3, True, True), (1, False, True), (2, False, False), (5, False, False)])
def test_a_line_is_that_of_the_cause_or_of_its_function(program: Path, line: int, right: bool, function: bool) -> None:
    score = judge(Reported(say("OVH-08", (line, 5))), program, TRUTH, PAIRS)
    assert (score.line_right, score.function_right) == (right, function)
    other = judge(Reported(say("OVH-08", (line, 5))), program.rename(program.with_name("other.py")), TRUTH, PAIRS)
    assert not other.function_right  # the same line of another file


def test_where_no_rule_knows_the_cause_the_largest_line_counts(program: Path) -> None:
    right, wrong = (Where("forward", "/elsewhere/program.py", line, 50) for line in (3, 2))
    assert judge(Reported(say("MEM-05", (2, 5)), lines=(right, wrong)), program, Truth(rules=()), PAIRS).line_right
    assert not judge(Reported(say("MEM-05", (3, 5)), lines=(wrong, right)), program, Truth(rules=()), PAIRS).line_right
    assert not judge(Reported(), program, Truth(rules=()), PAIRS).function_right


def test_nothing_above_info_may_be_said_of_a_healthy_program(program: Path) -> None:
    assert not judge(Reported(say("EFF-03", severity="info")), program, Truth(), ()).loud
    assert judge(Reported(say("CMP-02")), program, Truth(), ()).loud == ("CMP-02",)


def test_low_precision_on_a_healthy_program_is_false_unless_every_pair_gained(program: Path) -> None:
    said, lost = Reported(say("CMP-02"), say("CAP-07")), Pair(4.0, 4.0, 4.2, 4.1)
    assert judge(said, program, Truth(), PAIRS).false_alarms == ("CAP-07",)
    assert judge(said, program, Truth(), (*PAIRS, lost)).false_alarms == ("CMP-02", "CAP-07")
    assert judge(said, program, Truth(), ()).false_alarms == ("CMP-02", "CAP-07")
    assert judge(said, program, Truth(gains={"CAP-07": "a fifth"}), ()).false_alarms == ("CMP-02",)
