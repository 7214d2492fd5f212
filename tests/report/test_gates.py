"""Renderings of a check: text, annotations of GitHub Actions, JUnit XML; nothing in a message escapes from its place."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rendered import render_gates_text

from gpudiag.model.comparison import CheckData, GateResult
from gpudiag.model.report import encode_report
from gpudiag.report import checks

HOSTILE = "100 % of x\r\n::error::owned, a: b <script>&\x00\x1b[31m]]>"

RESULTS = (
    GateResult(name="step_median_ms max", outcome="failed", message=HOSTILE, unit="ms", value=3.0, low=2.0, high=4.0, limit=1.0, line=4),
    GateResult(name="mfu_share min", outcome="unknown", message="not known: no shapes", line=9),
    GateResult(name="peak_memory_gb max", outcome="unknown", message="not known: nothing recorded", required=False, line=11),
    GateResult(name="idle_share max", outcome="within_noise", message="7 % of 5 %", line=13),
    GateResult(name="findings fail_at", outcome="passed", message="none", line=15),
)


@pytest.fixture
def found() -> CheckData:
    return CheckData(path="runs/x", budget="ci/gates, new.toml", results=RESULTS, passed=False)


def test_the_text_lists_failures_first_and_how_many(found: CheckData) -> None:
    text = render_gates_text(found, width=200)
    assert text.startswith("FAILED: 2 of 5 gates, on runs/x")
    assert re.findall(r"^(FAIL|unknown|undecided|ok) ", text, re.MULTILINE) == ["FAIL", "unknown", "unknown", "undecided", "ok"]
    assert "an unavailable figure does not pass" in text
    assert "\x1b" not in text


def test_a_check_that_passes_says_what_it_does_not_know() -> None:
    text = render_gates_text(CheckData(path="runs/x", results=RESULTS[2:], passed=True))
    assert text.startswith("passed: 3 gates (1 undecided, 1 not known and not required), on runs/x")


def test_annotations_name_file_line_and_kind(found: CheckData) -> None:
    lines = checks.render_gates_github(found, "", "token").splitlines()[3:]
    assert [line.split(" ")[0] for line in lines] == ["::error", "::error", "::warning", "::warning", "::notice"]
    assert lines[0].startswith("::error file=ci/gates%2C new.toml,line=4,title=gpudiag%3A step_median_ms max::100 %25 of x ::error::owned")
    assert "passed" not in "".join(lines[:-1]).replace("not passed", "")


def test_a_worked_escape() -> None:
    made = checks.format_workflow_command("error", {"file": "a:b,c%\r\n", "line": "1"}, "50%: a,b\r\nc")
    assert made == "::error file=a%3Ab%2Cc%25%0D%0A,line=1::50%25: a,b%0D%0Ac"


@given(st.text(), st.text())
def test_no_text_begins_a_command_of_its_own(value: str, message: str) -> None:
    made = checks.format_workflow_command("error", {"title": value}, message)
    assert "\n" not in made
    assert "\r" not in made
    properties, _, shown = made.removeprefix("::error ").partition("::")
    assert re.fullmatch(r"title=[^:,\r\n]*", properties, re.DOTALL)
    for escaped, character in (("%0A", "\n"), ("%0D", "\r"), ("%25", "%")):
        shown = shown.replace(escaped, character)
    assert shown == message


def test_the_text_before_the_annotations_cannot_hold_commands() -> None:
    empty = CheckData(path="runs/x", results=(), passed=True)
    lines = checks.render_gates_github(empty, "  ::set-env name=PATH::x\n::error::y\n", "token").splitlines()
    assert lines[0] == "::stop-commands::token"
    assert lines[-2] == "::token::"


def test_junit_has_a_case_for_each_gate(found: CheckData) -> None:
    suite = ElementTree.fromstring(checks.render_gates_junit(found)).find("testsuite")  # noqa: S314 our own
    assert suite.attrib == {"name": "gpudiag check", "tests": "5", "failures": "1", "errors": "1", "skipped": "2"}
    kinds = [[child.tag for child in case] for case in suite]
    assert kinds == [["failure"], ["error"], ["skipped"], ["skipped"], ["system-out"]]
    assert suite[0][0].get("message") == "100 % of x ::error::owned, a: b <script>&]]>"


def test_an_undecided_gate_that_is_strict_is_a_failure_everywhere(found: CheckData) -> None:
    strict = CheckData(path="runs/x", results=(msgspec.structs.replace(RESULTS[3], strict=True),), passed=False)
    assert render_gates_text(strict).startswith("FAILED: 1 of 1 gate")
    assert checks.render_gates_github(strict, "", "token").splitlines()[3].startswith("::error ")
    case = ElementTree.fromstring(checks.render_gates_junit(strict))[0][0]  # noqa: S314 our own
    assert [child.tag for child in case] == ["failure"]


@given(st.text(st.characters()))
def test_junit_can_always_be_read(text: str) -> None:
    result = GateResult(name=text, outcome="failed", message=text)
    made = checks.render_gates_junit(CheckData(path=text, results=(result,), passed=False))
    assert len(ElementTree.fromstring(made)[0]) == 1  # noqa: S314 our own


def test_the_json_is_read_back_as_it_was(found: CheckData) -> None:
    assert msgspec.json.decode(encode_report(found), type=CheckData) == found
