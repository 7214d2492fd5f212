"""The report as Markdown, seen through a Markdown parser."""

from __future__ import annotations

import re

import pytest
import report_sample as sample
from markdown_it import MarkdownIt
from rendered import render_markdown

REPORTS = {
    "full": sample.report(),
    "no device": sample.no_device(),
    "hostile": sample.hostile(),
    "nothing found": sample.report(findings=()),
}
# What the report itself writes; a name from the trace must add nothing.
TAGS = {"h1", "h2", "h3", "p", "strong", "code", "ul", "li", "br", "table", "thead", "tbody", "tr", "th", "td", "details", "summary"}


def _html(name: str) -> str:
    return MarkdownIt("commonmark", {"html": True}).enable("table").render(render_markdown(REPORTS[name]))


@pytest.mark.parametrize("name", list(REPORTS))
def test_only_elements_of_our_own(name: str) -> None:
    assert set(re.findall(r"<\s*([A-Za-z]\w*)", _html(name))) <= TAGS


@pytest.mark.parametrize("name", list(REPORTS))
def test_every_row_has_the_cells_of_its_header(name: str) -> None:
    rendered = _html(name)
    tables = re.findall(r"<table>.*?</table>", rendered, re.DOTALL)
    assert tables
    for table in tables:
        header, *rows = re.findall(r"<tr>.*?</tr>", table, re.DOTALL)
        assert rows
        assert {row.count("<td") for row in rows} == {header.count("<th")}


def test_no_raw_pipe_row_falls_out_of_a_table() -> None:
    paragraphs = re.findall(r"<p>(.*?)</p>", _html("hostile"), re.DOTALL)
    assert [text for text in paragraphs if text.startswith("|")] == []


def test_names_of_any_length_leave_short_lines() -> None:
    assert max(len(line) for line in render_markdown(REPORTS["hostile"]).splitlines()) < 6_000


def test_the_same_verdict_and_figures_as_in_the_terminal() -> None:
    text = render_markdown(sample.report())
    assert "A step takes 75.0 ms. The GPU spends 39 % of it idle" in text
    assert "| **sum: the step** | 75.0 ms | 100.0 % |  |" in text
    assert "| compute-bound kernels | 22.5 ms | 30.0 % |" in text
    assert "**Potential speed-up: up to 25.0 ms of the 75.0 ms of a step (33 %; an upper bound) if every kernel were launched" in text
    assert "`model = torch.compile(model)`" in text
    assert "| op | calls | time | share | bound | of roofline | TFLOP/s | GB/s | FLOP/B |" in text
    assert r"`aten::mm`<br>\[\[4096,4096\],\[4096,4096\]\] | 48 | 90.0 ms | 48.6 % | compute | 50 % | 495 | 362 | 1,367 |" in text
    assert "| MEM-03 | not applicable | no attention op was recorded |" in text


def test_call_sites_stand_below_their_ops() -> None:
    rows = (sample.op("aten::mm", 9, where="src/net.py(12): forward"), sample.op("aten::add_", 1))
    text = render_markdown(sample.report(ops=rows))
    assert "| `aten::mm`<br>src/net.py:12 forward, " in text


def test_ops_are_cut_at_top() -> None:
    assert len(re.findall(r"^\| `aten::op_", render_markdown(sample.many_ops(50), top=7), re.MULTILINE)) == 7


def test_roofline_figures() -> None:
    made = render_markdown(sample.roofline())
    assert "989 TFLOP/s (bf16 dense, NVIDIA H100 80GB HBM3); with recomputed work (HFU) 43.7 %." in made
    assert "\n\n- Llama 3.1 8B, FSDP, 8 H100: 35.6 % of 989 TFLOP/s bf16 (https://example.org/table)\n" in made
    assert "| above roofline<br>data in the cache |" in made
    assert "33 % recomputed" in made
    assert made.index("Cost models cover") < made.index("## Where a step goes")


def test_a_finding_that_no_fix_mends_says_what_to_know() -> None:
    told = [render_markdown(sample.report(findings=(sample.finding(fixes=fixes),))) for fixes in ((), ("compile",))]
    assert ["Note: A kernel that is launched" in text for text in told] == [True, False]
