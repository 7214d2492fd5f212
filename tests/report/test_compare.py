"""Renderings of a comparison: they say what was found, at any width, and no name from a trace does harm in them."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import msgspec
import pytest
from compared import finding, recorded, run
from markdown_it import MarkdownIt
from rendered import render_comparison_markdown, render_comparison_page, render_comparison_text

from gpudiag.comparison.steps import compare_runs
from gpudiag.model.comparison import OpKey, StepComparison
from gpudiag.model.report import IdleRow, encode_report

HOSTILE = '<script>alert(1)</script>|`"onerror=x \x1b[31m\u202e\n::error::' + "x" * 10_000
STEADY = [1_000_000, 1_010_000, 990_000, 1_005_000, 995_000, 1_002_000]


@pytest.fixture
def found() -> StepComparison:
    a = run(
        [5_000_000] * 6, {OpKey("aten::mm", "forward", None, "[8, 8]"): STEADY, OpKey("aten::add", "forward"): STEADY},
        plain=[9_000_000 + 10_000 * (place % 4) for place in range(9)], findings=[finding("A-1")], command=("train.py", "--fast"),
    )  # fmt: skip
    twice = [2 * ns for ns in STEADY]
    b = run(
        [9_000_000] * 6, {OpKey("aten::mm", "forward", None, "[16, 8]"): twice, OpKey(HOSTILE, "forward"): STEADY[::-1]},
        plain=[18_000_000 + 10_000 * (place % 4) for place in range(9)], findings=[finding("B-1")], passed=["A-1"], device=HOSTILE,
        command=("train.py", HOSTILE), idle=[2_000_000 + 1_000 * place for place in range(6)], recorded=recorded(),
        idle_rows=(IdleRow(cause="idle_data", count=1, idle_ns=9_000_000, evidence=HOSTILE, file=HOSTILE, line=1),),
    )  # fmt: skip
    return compare_runs(a, b, fail_if_slower=0.03)


def test_the_text_says_what_decided(found: StepComparison) -> None:
    text = render_comparison_text(found, width=120)
    assert text.startswith("B takes 9.00 ms (99.9 %) longer a step (interval +99.")
    assert "other devices" in text
    assert re.search(r"aten::mm +forward +1\.00 ms ± 7\.\d+ us +2\.00 ms ± 14\.\d+ us +\+1\.00 ms +slower, other shapes", text)
    assert re.search(r"aten::add +forward +1\.00 ms ± 7\.\d+ us +- +-1\.00 ms +gone", text)
    assert re.search(r"came +B-1", text)
    assert re.search(r"went +A-1", text)
    assert "another run of the same program may differ" in text
    assert "fail-if-slower: FAILED:" in text


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
@pytest.mark.parametrize("color", [False, True])
def test_no_line_is_wider_than_the_terminal(found: StepComparison, width: int, color: bool) -> None:
    for line in re.sub(r"\x1b\[[\d;]*m", "", render_comparison_text(found, width=width, color=color)).splitlines():
        assert len(line) <= width, line


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_keeps_names_and_changes(found: StepComparison, width: int) -> None:
    text = render_comparison_text(found, width=width)
    for word in ("aten::mm", "+1.00 ms", "-1.00 ms", "title of B-1", "  forward, [8, 8] -> [16, 8]"):
        assert word in text


def test_names_do_no_harm_in_a_terminal(found: StepComparison) -> None:
    text = render_comparison_text(found, color=False)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", text)
    assert max(map(len, text.splitlines())) <= 100


def test_names_do_no_harm_in_markdown(found: StepComparison) -> None:
    made = MarkdownIt("commonmark", {"html": True}).enable("table").render(render_comparison_markdown(found))
    assert "<script" not in made
    assert made.count("<table>") == 5
    rows = [len(re.findall("<t[dh]", row)) for row in re.findall(r"<tr>.*?</tr>", made, re.DOTALL)]
    assert set(rows) == {4, 5, 6}  # a pipe in a name adds no cell


class _Page(HTMLParser):
    """Collects the elements, ids of handlers and the text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.policies: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.policies += [value or "" for name, value in attrs if name == "content" and "default-src" in (value or "")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_holds_all_and_no_script(found: StepComparison) -> None:
    page = _Page()
    made = render_comparison_page(found)
    page.feed(made)
    assert page.elements.count("script") == 1  # of our own: colours
    assert not page.handlers
    assert page.policies[0].startswith("default-src 'none'; script-src 'sha256-")
    assert page.elements.count("table") == 5
    assert "://" not in made
    for word in ("aten::mm", "<script>alert(1)</script>", "FAILED"):
        assert word in page.text


def test_the_json_is_read_back_as_it_was(found: StepComparison) -> None:
    assert msgspec.json.decode(encode_report(found), type=StepComparison) == found


def test_one_recording_against_itself_claims_nothing() -> None:
    side = run([5_000_000, 5_100_000] * 3, {OpKey("aten::mm"): STEADY})
    text = render_comparison_text(compare_runs(side, side))
    assert text.startswith("A and B are the same recording: nothing can have changed")
    assert "slower 1" not in text
    assert "aten::mm" not in text


def test_without_steps_the_text_says_so() -> None:
    text = render_comparison_text(compare_runs(run(), run()))
    assert "no complete step" in text
    assert "no ops were recorded" in text


def test_the_sums_hold_every_op(found: StepComparison) -> None:
    text = " ".join(render_comparison_text(found, top=1).split())
    assert "slower 1 op, +1.00 ms a step" in text
    assert "1 of 3 changed ops" in text
