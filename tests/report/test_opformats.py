"""The op table as text, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest
import report_sample as sample
from rendered import render_op_table
from rich.cells import cell_len

from gpudiag.report.op_table import LONGEST_NAME, OpTable, build_op_table, encode_op_table_csv, encode_op_table_json

MS = sample.MS
HOSTILE = (*sample.HOSTILE, "=HYPERLINK(1)", "+1", "-1", "@SUM(A1)", 'a,"b",c')


def _table(**options: object) -> OpTable:
    return build_op_table(sample.report(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [40, 60, 72, 80, 100, 120, 160, 200])
@pytest.mark.parametrize("grouping", ["op", "signature", "phase", "kernel"])
def test_no_line_is_wider_than_the_terminal_and_names_stay_readable(width: int, grouping: str) -> None:
    lines = render_op_table(_table(grouping=grouping), width=width).splitlines()
    assert [line for line in lines if cell_len(line) > width] == []
    assert len(lines[0]) <= width
    shown = lines[1].split("  ")[0]
    assert len(shown) >= {"op": 8, "signature": 8, "phase": 8, "kernel": 12}[grouping], shown


def test_a_wider_terminal_shows_more_columns() -> None:
    def titles(width: int) -> list[str]:
        return render_op_table(_table(), width=width).splitlines()[0].split()

    counts = [len(titles(width)) for width in (40, 60, 80, 100, 120, 160)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    assert {"op", "time", "of", "roofline"} <= set(titles(40))
    assert {"time/call", "judged", "dtype", "cost"} <= set(titles(160))


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize(("sorting", "title"), [("ai", "FLOP/B"), ("bytes", "bytes"), ("flops", "FLOP"), ("calls", "calls")])
def test_what_a_table_is_sorted_by_is_shown(width: int, sorting: str, title: str) -> None:
    assert title in render_op_table(_table(sorting=sorting), width=width).splitlines()[0].split()


def test_plain_text_has_no_colour_and_coloured_text_has() -> None:
    assert "\x1b" not in render_op_table(_table())
    assert "\x1b[" in render_op_table(_table(), color=True)


def test_figures_of_a_line() -> None:
    (line,) = [line for line in render_op_table(_table(), width=120).splitlines() if line.startswith("aten::mm ")]
    assert re.split(r"  +", line)[1:] == ["48", "90.0 ms", "48.6 %", "compute", "50 %", "495", "362", "1,367"]


def test_what_is_partly_judged_says_by_how_much() -> None:
    rows = (sample.op("aten::mm", 3), sample.op("aten::mm", 1, t_roof_ns=None, efficiency=None, signature=None))
    plain = render_op_table(build_op_table(sample.report(ops=rows)), width=80)
    assert "judged" in plain.splitlines()[0]
    assert re.search(r"50 % +75 % +495$", plain.splitlines()[1])
    assert "75 % of these ops' time" in plain


def test_over_roof_is_a_word_with_a_legend() -> None:
    rows = (sample.op("aten::mm", 3, efficiency=None, over_roof=1.4), sample.op("aten::add", 1))
    plain = render_op_table(build_op_table(sample.report(ops=rows)), width=80)
    assert "above roofline" in plain.splitlines()[1]
    assert "%" not in plain.splitlines()[1].rpartition("compute")[2].replace("0 %", "")
    assert "faster than the peak allows" in " ".join(plain.split())


def test_lines_left_out_are_counted() -> None:
    assert "2 of 6 rows" in render_op_table(_table(), top=2)
    assert render_op_table(_table(phase=None, bound="copy")) == "No op passes these filters.\n"


def test_csv_holds_raw_numbers_and_units_in_its_header() -> None:
    header, *rows = csv.reader(io.StringIO(encode_op_table_csv(_table(sorting="time"))))
    assert {"kernel_ns", "flop_per_s", "byte_per_s", "t_roof_ns", "efficiency_share", "memory_bound_ns"} <= set(header)
    first = dict(zip(header, rows[0], strict=True))
    assert (first["group"], first["calls"], first["kernel_ns"], first["efficiency_share"]) == ("aten::mm", "48", str(90 * MS), "0.5")
    assert float(first["flop_per_s"]) == pytest.approx(494.7e12)
    unknown = dict(zip(header, next(row for row in rows if row[0] == "mylib::custom_kernel"), strict=True))
    assert (unknown["flop"], unknown["efficiency_share"], unknown["t_roof_known_ns"]) == ("", "", "0")
    assert len(rows) == 6


def test_csv_of_hostile_names_is_a_table_without_formulas() -> None:
    rows = tuple(sample.op(name, 1 + k, signature=name) for k, name in enumerate(HOSTILE))
    header, *found = csv.reader(io.StringIO(encode_op_table_csv(build_op_table(sample.report(ops=rows), grouping="signature"))))
    assert len(found) == len(HOSTILE)
    assert all(len(row) == len(header) for row in found)
    cells = [cell for row in found for cell in row]
    assert all(cell.isprintable() and len(cell) <= LONGEST_NAME + 1 for cell in cells)
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@"))]
    assert 'a,"b",c' in cells


def test_json_is_the_same_table() -> None:
    made = json.loads(encode_op_table_json(_table(), top=2))
    assert (made["group_by"], made["sort_by"], made["total_ns"]) == ("op", "time", 185 * MS)
    assert [group["group"] for group in made["groups"]] == ["aten::mm", "aten::add_"]
    assert made["groups"][0]["cost_provenance"] == "exact"
