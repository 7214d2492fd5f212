"""What texts for a terminal are laid out by: which figures stand beside a name, where paragraphs hang, how names are cut."""

from __future__ import annotations

import re

import pytest
import report_sample as sample
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from gpudiag.report import text
from gpudiag.report.console import (
    LEAST_NAME,
    WIDEST_PROSE,
    create_console,
    create_table,
    fit_columns,
    format_cells,
    print_item,
    print_line,
    print_table,
    shorten_middle,
)

COLUMNS = [("calls", 70), ("time", 0), ("bound", 0), ("share", 60), ("FLOP/B", 100)]
FIGURES = [["1,234", "12.3 ms", "communication", "12.3 %", "0.12"]]


def test_figures_go_before_a_name_is_cut_to_nothing() -> None:
    assert fit_columns(200, COLUMNS, FIGURES) == ([0, 1, 2, 3, 4], 200 - (7 + 9 + 15 + 8 + 8))
    assert fit_columns(80, COLUMNS, FIGURES)[0] == [0, 1, 2, 3]  # FLOP/B wants 100 columns
    assert fit_columns(70, COLUMNS, FIGURES) == ([0, 1, 2, 3], 31)
    assert fit_columns(60, COLUMNS, FIGURES) == ([1, 2, 3], 28)
    assert fit_columns(50, COLUMNS, FIGURES) == ([1, 2], 26)
    assert fit_columns(30, COLUMNS, FIGURES) == ([1, 2], 6)  # those that are always shown stay


@given(st.integers(1, 300), st.lists(st.tuples(st.text("ab", max_size=9), st.integers(0, 200)), max_size=8))
def test_what_fits_leaves_room_for_the_name_or_only_what_must_stay(width: int, columns: list[tuple[str, int]]) -> None:
    kept, room = fit_columns(width, columns, [])
    assert room >= 1
    assert kept == sorted(kept)
    assert {k for k, (_, least) in enumerate(columns) if not least} <= set(kept)
    assert room >= LEAST_NAME or all(columns[k][1] == 0 for k in kept)


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
        console, sink = create_console(width, False)
        table = create_table((("what", "wrapped"), ("time", "right")))
        table.add_row(*format_cells(content, "12.3 ms"))
        print_table(console, table)
        assert max(map(len, sink.getvalue().rstrip().splitlines())) <= widest


@pytest.mark.parametrize("width", [60, 80, 120, 160, 200])
def test_ops_use_the_width_that_there_is(width: int) -> None:
    plain = text.render_text(sample.report(), width=width)
    table = plain[plain.index("Top ops by time") :]
    rows = [row for row in table.splitlines() if row.startswith("aten::mm")]
    assert len(rows) == 1
    assert ("call site, shapes" in table) == (width >= 160)
    assert ("[[4096,4096],[4096,4096]]" in rows[0]) == (width >= 160)
    assert ("FLOP/B" in table) == (width >= 120)
    assert max(map(cell_len, plain.splitlines())) <= width
