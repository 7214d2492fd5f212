"""The report in a notebook: a fragment without scripts that shows hostile names as text."""

from __future__ import annotations

import base64
import gzip
import html
import re
from html.parser import HTMLParser

import pytest
import report_sample as sample
from rendered import render_notebook

from gpudiag import api
from gpudiag.experiment.result import ExperimentResult
from gpudiag.model.experiment import ExperimentData

VOID = {"br"}
ALLOWED = {
    "div", "p", "b", "small", "code", "ol", "ul", "li", "details", "summary", "span", "br", "table", "thead", "tbody", "tr", "th", "td",
}  # fmt: skip


class Fragment(HTMLParser):
    """Collects tags, attributes and text; fails where tags do not close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def _read(text: str) -> Fragment:
    found = Fragment()
    found.feed(text)
    found.close()
    assert found.open == []
    return found


@pytest.mark.parametrize("made", [sample.report(), sample.hostile(), sample.no_device(), sample.report(findings=(), ops=())])
def test_it_is_a_fragment_of_plain_tags(made) -> None:
    found = _read(render_notebook(made))
    assert found.tags <= ALLOWED
    assert found.attributes <= {"style", "scope", "start"}


def test_it_says_what_the_report_says_first() -> None:
    text = " ".join(_read(render_notebook(sample.report())).text.replace("\u00a0", " ").split())
    order = [
        "A step takes 75.0 ms",
        "Where a step goes",
        "33.3 %",
        "The GPU waits for the host",
        "Potential speed-up: up to 25.0 ms",
        "Top ops by time",
        "aten::mm",
    ]
    assert [text.index(words) for words in order] == sorted(text.index(words) for words in order)
    assert "loss.item() (train.py:41)" in text


def test_hostile_names_stay_text() -> None:
    made = render_notebook(sample.hostile())
    assert "<script" not in made
    assert "<img" not in made
    assert "\x1b" not in made
    assert "\u202e" not in made
    assert "&lt;script&gt;" in made
    assert max(map(len, re.findall(r"x{100,}", html.unescape(made))), default=0) <= 2_000  # of a name of 10,000


def test_bars_are_as_long_as_their_shares() -> None:
    widths = [float(width) for width in re.findall(r"width:([\d.]+)em", render_notebook(sample.report()))]
    assert max(widths) == 8
    assert 8 * 22.5 / 25 in [pytest.approx(width, abs=0.01) for width in widths]


def test_the_page_is_folded_below_in_a_frame_that_reaches_nothing_outside() -> None:
    report = api.Report(sample.hostile())
    shown = report._repr_html_()
    (frame,) = re.findall("<iframe ([^>]*)>", shown)
    assert 'sandbox="allow-scripts"' in frame
    (packed,) = re.findall(r"atob\('([^']+)'\)", html.unescape(frame))
    assert gzip.decompress(base64.b64decode(packed)).decode() == report.html()
    assert len(shown) < len(report.html()) / 2


def test_a_report_object_shows_itself() -> None:
    report = api.Report(sample.report())
    assert report._repr_html_().startswith(render_notebook(report.data))

    class Printer:
        def __init__(self) -> None:
            self.said = ""

        def text(self, text: str) -> None:
            self.said += text

    for shown in (report, ExperimentResult(ExperimentData())):
        printer = Printer()
        shown._repr_pretty_(printer, False)
        assert printer.said == str(shown)
