"""What texts for a terminal are laid out by: which figures stand beside a name, where paragraphs hang, how names are cut."""

from __future__ import annotations

import re

import pytest
import report_sample as sample
from hypothesis import given
from hypothesis import strategies as st
from rendered import render_document, render_text
from rich.cells import cell_len

from gpudiag.report.blocks import Column, Document, Table, build_row
from gpudiag.report.console import WIDEST_PROSE, create_console, print_item, print_line, shorten_middle
from gpudiag.report.render_text import LEAST_NAME

COLUMNS = (("calls", 70), ("time", 0), ("bound", 0), ("share", 60), ("FLOP/B", 100))
FIGURES = ("1,234", "12.3 ms", "communication", "12.3 %", "0.12")
NAME = "aten::convolution_backward_of_a_weight"


def _render(width: int, columns: tuple[tuple[str, int], ...], figures: tuple[str, ...], name: str = NAME) -> str:
    made = Table((Column("op", "name"), *(Column(title, "number", least=least) for title, least in columns)), (build_row(name, *figures),))
    return render_document(Document("", "", leads=(made,)), width=width)


def test_figures_go_before_a_name_is_cut_to_nothing() -> None:
    shown = {width: _render(width, COLUMNS, FIGURES).splitlines()[0].split()[1:] for width in (200, 80, 70, 60, 50, 40)}
    assert shown[200] == ["calls", "time", "bound", "share", "FLOP/B"]
    assert shown[80] == shown[70] == ["calls", "time", "bound", "share"]  # FLOP/B wants 100 columns
    assert shown[60] == ["time", "bound", "share"]
    assert shown[50] == shown[40] == ["time", "bound"]  # those that are always shown stay
    assert NAME in _render(200, COLUMNS, FIGURES)


@given(st.integers(40, 300), st.lists(st.tuples(st.text("ab", min_size=1, max_size=9), st.integers(0, 200)), max_size=8))
def test_what_fits_leaves_room_for_the_name_or_only_what_must_stay(width: int, columns: list[tuple[str, int]]) -> None:
    lines = _render(width, tuple(columns), ("1",) * len(columns)).splitlines()
    optional = [title for title, least in columns if least and title in lines[0].split()[1:]]
    if optional and not {title for title, least in columns if not least} & set(optional):
        assert len(lines[1].split("  ")[0]) >= min(LEAST_NAME, len(NAME))


def test_a_long_name_keeps_its_head_and_its_tail() -> None:
    assert shorten_middle("aten::cudnn_convolution_backward_weight", 24) == "aten::cudnn_conv…_weight"
    assert shorten_middle("short", 5) == "short"


@given(st.text(max_size=50), st.integers(0, 60))
def test_a_cut_name_is_as_long_as_it_may_be(name: str, limit: int) -> None:
    cut = shorten_middle(name, limit)
    assert len(cut) == min(len(name), limit)
    assert cut == name or "…" in cut or limit == 0


def test_further_lines_of_an_item_hang_below_its_first_word() -> None:
    console, sink = create_console(40, False)
    print_item(console, "12. ", "Eager model with a large share that a compiler would fuse (OVH-03)", indent=3)
    lines = sink.getvalue().splitlines()
    assert lines[0].startswith("   12. Eager")
    assert all(re.match(r" {7}\S", row) for row in lines[1:])
    assert len(lines) > 1
    assert max(map(cell_len, lines)) <= 40


def test_prose_stays_readable_on_a_wide_terminal() -> None:
    console, sink = create_console(300, False)
    print_line(console, "word " * 100)
    print_item(console, "! ", "word " * 100)
    assert max(map(len, sink.getvalue().splitlines())) <= WIDEST_PROSE


def test_a_table_takes_no_more_than_it_needs_and_no_more_than_there_is() -> None:
    for width, content, widest in ((100, "short", 20), (50, "long " * 20, 50)):
        made = Table((Column("what", "words"), Column("time", "number")), (build_row(content, "12.3 ms"),))
        assert max(map(len, render_document(Document("", "", leads=(made,)), width=width).splitlines())) <= widest


@pytest.mark.parametrize("width", [60, 80, 120, 160, 200])
def test_ops_use_the_width_that_there_is(width: int) -> None:
    plain = render_text(sample.report(), width=width)
    table = plain[plain.index("Top ops by time") :]
    rows = [row for row in table.splitlines() if row.startswith("aten::mm")]
    assert len(rows) == 1
    assert ("call site, shapes" in table) == (width >= 160)
    assert ("[[4096,4096],[4096,4096]]" in rows[0]) == (width >= 160)
    assert ("FLOP/B" in table) == (width >= 120)
    assert max(map(cell_len, plain.splitlines())) <= width
