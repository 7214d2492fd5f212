"""Every kind of block in every format: shown, and harmless whatever a recording calls its things."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from htmlpage import Page
from report_sample import HOSTILE

from gpudiag.report import blocks
from gpudiag.report.blocks import Cell, Column, Document, Row, Section
from gpudiag.report.render_html import render_page
from gpudiag.report.render_markdown import render_markdown
from gpudiag.report.render_notebook import render_notebook
from gpudiag.report.render_text import render_text

DRAWN = (blocks.Chart, blocks.Strips, blocks.Tiles)
"""What pages alone show: tables and sentences hold the same figures."""


def one_of_each(name: str) -> tuple[blocks.Block, ...]:
    row = Row((Cell(name, details=(name,), tone="good"), Cell("1", 1.0), Cell("", 0.5)), name, (blocks.Paragraph(name),))
    table = blocks.Table((Column(name, "name"), Column("n", "number"), Column("bar", "bar")), (row,), name)
    return (
        blocks.Heading(name, name),
        blocks.Paragraph(name, "warning"),
        blocks.Listing((name,), "warning", (name,)),
        blocks.Topics(((name, name),), (name,)),
        blocks.Code(name),
        table,
        blocks.Bars((blocks.BarPart("idle idle-data", name, 5.0, 1.0),), name, 5.0, (blocks.Paragraph(name),)),
        blocks.Tiles(
            (blocks.Tile(name, name, name, "warning", ("finding", name)), blocks.Tile(name, name, opens=(blocks.Paragraph(name),)))
        ),
        blocks.FindingCard(
            number=1, rule=name, title=name, severity="info", confidence="high", message=name, gain=name, share=0.5, figure=name, why=name,
            places=((name, ("op", name)),), symptoms=((name, name),),
            fixes=(blocks.Fix(name, name, name, name, name, name), blocks.Fix(name, name, test=name)),
            evidence=((name, name, name),), references=(name,),
        ),
        blocks.Chart("chart", {"data": [], "layout": {"height": 10}}, name, (("compute", name),)),
        blocks.Strips((blocks.Strip(name, name, name, name, name, lines=("0,0 1,1",)),), name),
        blocks.Card(name, (table,)),
        blocks.Fold(name, (table,), name),
    )  # fmt: skip


def document(name: str) -> Document:
    return Document("gpudiag", name, (name,), (blocks.Paragraph(name),), (Section(name, one_of_each(name)),), title=name)


def test_a_kind_of_block_is_shown_by_every_format() -> None:
    assert {type(block) for block in one_of_each("x")} == set(get_args(blocks.Block))
    for kind in one_of_each("seen"):
        for render in (render_text, render_markdown, render_notebook, render_page):
            if isinstance(kind, DRAWN) and render is not render_page:
                continue
            assert "seen" in render(Document("", "", sections=(Section("", (kind,)),)))


def test_the_dashboard_shows_every_kind_of_block() -> None:
    pytest.importorskip("dash", reason="the dashboard's libraries are not installed: pip install gpudiag[dashboard]")
    from gpudiag_dashboard.components import View, build_blocks

    for kind in one_of_each("seen"):
        assert isinstance(kind, blocks.Strips) or "seen" in str(build_blocks([kind], View()))


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_harmless_in_every_kind_of_block(name: str) -> None:
    made = document(name)
    text = render_text(made, width=80)
    assert [character for character in text if not character.isprintable() and character != "\n"] == []
    assert max(map(len, text.splitlines())) <= 80
    markdown = re.sub(r"(?ms)^(`{3,})\w*\n.*?^\1$", "", render_markdown(made))
    assert not re.search(r"<(?!/?(details|summary|br)>)", re.sub(r"(`+).*?\1", "", markdown).replace("\\<", ""))
    for page in (Page(render_page(made)), Page(render_notebook(made))):
        assert not {"img", "iframe"} & {tag for tag, _ in page.tags}
        assert not [key for _, attributes in page.tags for key in attributes if key.startswith("on")]
        assert not any("alert(" in script for script in page.scripts)
