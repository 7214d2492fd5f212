"""Time of many events of the time line, by name and bound: of an area that somebody chose, or of what a search found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl

from gpudiag.model.analysis import Analysis
from gpudiag.report import labels
from gpudiag.report.blocks import BarPart, Bars, Block, Cell, Column, Heading, Row, Table
from gpudiag.report.event_card import read_raw_names
from gpudiag.timeline.lanes import LANE_TABLES, STYLES
from gpudiag.timeline.lanes import Row as LaneEvents
from gpudiag.units import format_ns, format_share

MOST_NAMES = 15
"""Rows of a table: those with most time."""

SEARCHED = ("kernels", "ops", "launches", "marks")
"""Tables whose names can be searched for."""

MOST_LETTERS = 1_500
"""Of a name that can be searched for by a link."""

_TITLES = {
    "kernels": "Work of the device",
    "idle": "Idle time by cause",
    "critical_path": "Critical path",
    "ops": "Ops on the host, with the ops inside them",
    "launches": "Runtime calls",
    "marks": "Annotations",
    "steps": "Steps",
}
_ORDER = tuple(_TITLES)
_BUCKETS = {"communication": "exposed_communication", "copy": "exposed_copy"}
"""Bounds whose colour has the name of a bucket."""


class NameSum(NamedTuple):
    """The events of one name and one style."""

    name: str
    """As it stands in the trace."""
    style: str
    events: int
    ns: int
    longest_ns: int


class TableSum(NamedTuple):
    """The events of one table: the names with most time, how many others there are, and the time by style."""

    table: str
    events: int
    ns: int
    names: tuple[NameSum, ...]
    others: int
    styles: tuple[tuple[str, int], ...]


Columns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Place of the table in LANE_TABLES, row of it, style, ns: one entry for each event, or piece of one."""


def cut_events(rows: Sequence[LaneEvents], from_ns: int, to_ns: int) -> Columns:
    """Return the events of `rows` that reach into [from_ns, to_ns), with their time in it."""
    parts: list[list[np.ndarray]] = [[], [], [], []]
    for row in rows:
        first = int(np.searchsorted(row.end_ns, from_ns, side="right"))
        last = max(first, int(np.searchsorted(row.start_ns, to_ns, side="left")))
        span = slice(first, last)
        ns = np.minimum(row.end_ns[span], to_ns) - np.maximum(row.start_ns[span], from_ns)
        for part, column in zip(parts, (row.table[span], row.id[span], row.code[span], ns), strict=True):
            part.append(column)
    if not rows:
        return np.empty(0, np.uint8), np.empty(0, np.int64), np.empty(0, np.uint8), np.empty(0, np.int64)
    table, ids, code, ns = (np.concatenate(part) for part in parts)
    return table, ids, code, ns


def sum_events(analysis: Analysis, columns: Columns) -> tuple[TableSum, ...]:
    """Return the time of events by table, name and style, in the order in which they are read."""
    table, ids, code, ns = columns
    found = {LANE_TABLES[number]: table == number for number in np.flatnonzero(np.bincount(table)).tolist()}
    return tuple(_sum_table(analysis, name, ids[found[name]], code[found[name]], ns[found[name]]) for name in _ORDER if name in found)


def _sum_table(analysis: Analysis, table: str, ids: np.ndarray, code: np.ndarray, ns: np.ndarray) -> TableSum:
    names = read_raw_names(analysis, table).gather(ids)
    # one number for name and style: by two columns it takes twice as long
    key = names.cast(pl.Categorical).to_physical().cast(pl.Int64).fill_null(-1) * len(STYLES) + pl.Series(code)
    frame = pl.DataFrame({"key": key, "code": code, "id": ids, "ns": ns})
    pieces = table == "kernels" and analysis.device_index is None  # of a CPU: an op stands in pieces
    count = pl.col("id").n_unique() if pieces else pl.len()
    figures = (count.alias("events"), pl.col("ns").sum(), pl.col("ns").max().alias("longest"), pl.col("code", "id").first())
    grouped = frame.group_by("key").agg(figures)
    grouped = grouped.with_columns(read_raw_names(analysis, table).gather(grouped["id"]).cast(pl.String).fill_null("").alias("name"))
    grouped = grouped.sort("ns", "name", descending=[True, False]).select("name", "code", "events", "ns", "longest")
    sums = tuple(
        NameSum(name, STYLES[style], events, spent, longest) for name, style, events, spent, longest in grouped.head(MOST_NAMES).iter_rows()
    )
    by_style = grouped.group_by("code").agg(pl.col("ns").sum()).sort("ns", "code", descending=[True, False])
    styles = tuple((STYLES[style], int(spent)) for style, spent in by_style.iter_rows())
    return TableSum(table, int(grouped["events"].sum()), int(ns.sum()), sums, max(0, grouped.height - MOST_NAMES), styles)


def build_sum_blocks(
    sums: Sequence[TableSum], span_ns: int | None, words: Mapping[str, str], format_name: Callable[[str, str], str]
) -> list[Block]:
    """Return the tables of sums, that of the device with its time by bound. `span_ns`: what shares are parts of, None: of the sum."""
    blocks: list[Block] = []
    for one in sums:
        left = f"; the {len(one.names)} of {len(one.names) + one.others:,} names with most time" if one.others else ""
        blocks.append(Heading(_TITLES[one.table], f"{one.events:,} {labels.pluralize(one.events, 'event')}, {format_ns(one.ns)}{left}"))
        if one.table == "kernels" and one.ns:
            parts = tuple(
                BarPart(labels.name_css_classes(_BUCKETS.get(style, style)), words[style], ns, ns / one.ns)
                for style, ns in one.styles
                if ns
            )
            blocks.append(Bars(parts))
        blocks.append(_build_name_table(one, span_ns or one.ns, words, format_name))
    return blocks


def _build_name_table(one: TableSum, whole_ns: int, words: Mapping[str, str], format_name: Callable[[str, str], str]) -> Table:
    bounds = one.table == "kernels"
    columns = [Column("name", "name"), *([Column("bound")] if bounds else [])]
    columns += [Column(title, "number") for title in ("time", "share", "events", "mean", "longest")]
    rows = []
    for name in one.names:
        style = [Cell(words[name.style].removesuffix("-bound"), css=labels.name_css_classes(_BUCKETS.get(name.style, name.style)))]
        figures = (format_ns(name.ns), format_share(name.ns / whole_ns, 1) if whole_ns else "", f"{name.events:,}")
        each = (format_ns(name.ns / name.events), format_ns(name.longest_ns))
        link = ("find", name.name) if 0 < len(name.name) <= MOST_LETTERS and one.table in SEARCHED else None
        cells = (Cell(format_name(one.table, name.name), link=link), *(style if bounds else []), *map(Cell, (*figures, *each)))
        rows.append(Row(cells))
    return Table(tuple(columns), tuple(rows), caption=_TITLES[one.table])
