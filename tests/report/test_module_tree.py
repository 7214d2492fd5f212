"""The tree of modules: each with all that stands within it, siblings by time, and hostile paths that end."""

from __future__ import annotations

import msgspec
import pytest
import report_sample as sample

from gpudiag.model.report import OpRow, ReportData
from gpudiag.report.module_tree import OUTSIDE, build_module_table, build_module_tree


def report(**times: int) -> ReportData:
    """Return a report of ops in modules: path (with '__' for '.') -> ns."""
    row = sample.report().ops[0]
    return sample.report(ops=tuple(_place(row, path.replace("__", "."), ns) for path, ns in times.items()))


def _place(row: OpRow, path: str, ns: int) -> OpRow:
    return msgspec.structs.replace(row, module=path or None, kernel_ns=ns, name=f"aten::{ns}", bound_ns={})


def test_a_module_has_the_time_of_all_that_stands_within_it() -> None:
    found = report(Net__a__x=30, Net__a__y=20, Net__b=100, Net=5)
    nodes = build_module_tree(found)
    assert [(node.group.name, node.depth, node.group.kernel_ns, node.own_ns, node.opens) for node in nodes] == [
        ("Net", 0, 155, 5, True),
        ("Net.b", 1, 100, 100, False),
        ("Net.a", 1, 50, 0, True),
        ("Net.a.x", 2, 30, 30, False),
        ("Net.a.y", 2, 20, 20, False),
    ]
    table = build_module_table(nodes, "time", found)
    assert [(row.cells[0].text, row.depth, row.opens) for row in table.rows][:3] == [("Net", 0, True), ("b", 1, False), ("a", 1, True)]
    assert table.rows[0].cells[0].details == ("itself 5 ns",)


def test_what_stands_in_no_module_is_told_and_a_text_keeps_what_its_modules_stand_in() -> None:
    row = sample.report().ops[0]
    found = sample.report(ops=(_place(row, "", 7), _place(row, "Net.a.Linear", 3), _place(row, "Net.b", 2)))
    assert [node.group.name for node in build_module_tree(found)] == [OUTSIDE, "Net", "Net.a", "Net.a.Linear", "Net.b"]
    assert [node.group.name for node in build_module_tree(found, find="linear")] == ["Net", "Net.a", "Net.a.Linear"]


@pytest.mark.parametrize("path", ["." * 500, "..a..b..", "x." * 5_000, "."])
def test_hostile_paths_end(path: str) -> None:
    row = sample.report().ops[0]
    nodes = build_module_tree(sample.report(ops=(_place(row, path, 7),)))
    assert nodes
    assert max(node.depth for node in nodes) < 60
