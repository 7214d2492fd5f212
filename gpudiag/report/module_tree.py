"""The ops by the modules that call them, as a tree: each module with all that stands within it."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from gpudiag.model.ops import Bound
from gpudiag.model.report import OpRow, ReportData
from gpudiag.report import labels
from gpudiag.report.blocks import Cell, Row, Table
from gpudiag.report.op_table import OpGroup, OpTable, Sorting, build_group_table, build_op_group, select_ops, sort_groups
from gpudiag.units import format_ns

MOST_MODULES = 1_000
"""Modules that are shown: those with the most time. A parent has at least the time of its parts, so none is left without its place."""

OUTSIDE = "(outside modules)"


class ModuleNode(msgspec.Struct, frozen=True):
    """One module of the tree."""

    group: OpGroup
    """Sums over its ops and those of all modules within it; its name is the whole path."""
    depth: int
    own_ns: int
    """Time of its ops that stand in no module within it."""
    opens: bool
    """Whether there are modules within it."""


def build_module_tree(
    report: ReportData, *, sorting: Sorting = "time", phase: str | None = None, bound: Bound | None = None, find: str = ""
) -> list[ModuleNode]:
    """Return the modules with their parts behind them, siblings in the order of `sorting`; `find`: those whose path holds it, with what
    they stand in. Raises InputError for a phase that the recording does not know."""
    inside: defaultdict[str, list[OpRow]] = defaultdict(list)
    own: defaultdict[str, int] = defaultdict(int)
    for row in select_ops(report, phase, bound):
        path = ".".join(part for part in (row.module or "").split(".")[:_DEEPEST] if part) or OUTSIDE
        own[path] += row.kernel_ns
        for prefix in _list_prefixes(path):
            inside[prefix].append(row)
    total = labels.sum_op_ns(report.ops)
    if find:
        matching = [path for path in inside if find.lower() in path.lower()]
        kept = {prefix for path in matching for prefix in _list_prefixes(path)}
        inside = defaultdict(list, {path: rows for path, rows in inside.items() if path in kept})
    largest = sorted(inside, key=lambda path: -labels.sum_op_ns(inside[path]))[:MOST_MODULES]
    children: defaultdict[str, list[OpGroup]] = defaultdict(list)
    for path in largest:
        children[path.rpartition(".")[0]].append(build_op_group(path, inside[path], total))
    found: list[ModuleNode] = []

    def add(parent: str, depth: int) -> None:
        for group in sort_groups(children[parent], sorting):
            found.append(ModuleNode(group, depth, own[group.name], group.name in children))
            if group.name in children:
                add(group.name, depth + 1)

    add("", 0)
    return found


def _list_prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


_DEEPEST = 60
"""Levels of a tree: no program has as many, a hostile name may."""


def build_module_table(nodes: list[ModuleNode], sorting: Sorting, report: ReportData) -> Table:
    """Return the tree as a table: each module by the last part of its name, as deep as it stands."""
    table = OpTable("module", sorting, tuple(node.group for node in nodes), labels.sum_op_ns(report.ops))
    made = build_group_table(table, report=report)
    rows: list[Row] = []
    for node, row in zip(nodes, made.rows, strict=True):
        name = node.group.name.rpartition(".")[2]
        itself = f"itself {format_ns(node.own_ns)}" if node.opens and node.own_ns else ""
        first = Cell(name, details=(itself,) if itself else ())
        rows.append(msgspec.structs.replace(row, cells=(first, *row.cells[1:]), depth=node.depth, opens=node.opens))
    return msgspec.structs.replace(made, rows=tuple(rows), caption="Modules by time, each with all that stands within it")
