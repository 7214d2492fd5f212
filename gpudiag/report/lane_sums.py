"""Time of many events of the time line, by name and bound: of an area that somebody chose, or of what a search found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl

from gpudiag.arrays import Ints
from gpudiag.model.analysis import Analysis
from gpudiag.report import labels
from gpudiag.report.blocks import BarPart, Bars, Block, Cell, Column, Heading, Row, Table
from gpudiag.report.event_card import read_raw_names
from gpudiag.timeline.lanes import LANE_TABLES, STYLES, Codes, find_within
from gpudiag.timeline.lanes import Row as LaneEvents
from gpudiag.units import format_ns, format_share

MOST_NAMES = 15
"""Rows of a table: those with most time."""

SEARCHED = ("kernels", "ops", "launches", "marks", "frames")
"""Tables whose names can be searched for."""

MOST_LETTERS = 1_500
"""Of a name that can be searched for by a link."""

_TITLES = {
    "kernels": "Work of the {device}",
    "idle": "Idle time by cause",
    "critical_path": "Critical path",
    "ops": "Ops on the host, with the ops inside them",
    "launches": "Runtime calls",
    "marks": "Annotations",
    "frames": "Python functions, with what they call",
    "steps": "Steps",
}
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


class Events(NamedTuple):
    """Events of one table, or pieces of such: row, style and ns of each."""

    id: Ints
    code: Codes
    ns: Ints


def cut_events(rows: Sequence[LaneEvents], from_ns: int, to_ns: int) -> dict[str, Events]:
    """Return by table the events of `rows` that reach into [from_ns, to_ns), with their time in it."""
    parts: dict[str, list[Events]] = {}
    for row in rows:
        span = slice(*find_within(row, from_ns, to_ns))
        table = row.table[span]
        ns = row.end_ns[span] - row.start_ns[span]
        if len(ns):  # the events of a row do not overlap: only the outermost reach beyond the window
            ns[0] -= max(0, from_ns - int(row.start_ns[span.start]))
            ns[-1] -= max(0, int(row.end_ns[span.stop - 1]) - to_ns)
        numbers = np.flatnonzero(np.bincount(table)).tolist()
        for number in numbers:
            chosen = slice(None) if len(numbers) == 1 else table == number  # most rows hold events of one table
            part = Events(row.id[span][chosen], row.code[span][chosen], ns[chosen])
            parts.setdefault(LANE_TABLES[number], []).append(part)
    return {table: Events(*map(np.concatenate, zip(*found, strict=True))) for table, found in parts.items()}


def sum_events(analysis: Analysis, events: Mapping[str, Events]) -> tuple[TableSum, ...]:
    """Return the time of events by table, name and bound, in the order in which they are read."""
    return tuple(_sum_table(analysis, table, events[table]) for table in _TITLES if table in events and len(events[table].id))


def _sum_table(analysis: Analysis, table: str, events: Events) -> TableSum:
    ids, code, ns = events
    of_table = read_raw_names(analysis, table)
    # a cause of idle time is a style
    key = pl.Series(code) if table == "idle" else of_table.cast(pl.Categorical).to_physical().gather(ids)
    if table == "kernels":  # one number for name and bound: by two columns it takes twice as long
        key = key.cast(pl.Int64).fill_null(-1) * len(STYLES) + pl.Series(code)
    frame = pl.DataFrame({"key": key, "id": ids, "ns": ns})
    pieces = table == "kernels" and analysis.device_index is None  # of a CPU: an op stands in pieces
    count = pl.col("id").n_unique() if pieces else pl.len()
    longest = pl.col("ns").max().alias("longest")
    grouped = frame.with_row_index("place").group_by("key").agg(count.alias("events"), pl.col("ns").sum(), longest, pl.col("place").first())
    name = of_table.gather(ids[grouped["place"].to_numpy()]).cast(pl.String).fill_null("").alias("name")
    grouped = grouped.with_columns(name, pl.Series("code", code[grouped["place"].to_numpy()]))
    grouped = grouped.sort("ns", "name", descending=[True, False]).select("name", "code", "events", "ns", "longest")
    sums = tuple(
        NameSum(name, STYLES[style], events, spent, longest) for name, style, events, spent, longest in grouped.head(MOST_NAMES).iter_rows()
    )
    by_style = grouped.group_by("code").agg(pl.col("ns").sum()).sort("ns", "code", descending=[True, False])
    styles = tuple((STYLES[style], int(spent)) for style, spent in by_style.iter_rows())
    return TableSum(table, int(grouped["events"].sum()), int(ns.sum()), sums, max(0, grouped.height - MOST_NAMES), styles)


def build_sum_blocks(
    sums: Sequence[TableSum], span_ns: int | None, words: Mapping[str, str], format_name: Callable[[str, str], str], device: str
) -> list[Block]:
    """Return the tables of sums, that of the device with its time by bound. `span_ns`: what shares are parts of, None: of the sum."""
    blocks: list[Block] = []
    for one in sums:
        left = f"; the {len(one.names)} names with most time of {len(one.names) + one.others:,}" if one.others else ""
        title = _TITLES[one.table].format(device=device)
        blocks.append(Heading(title, f"{one.events:,} {labels.pluralize(one.events, 'event')}, {format_ns(one.ns)}{left}"))
        if one.table == "kernels" and one.ns:
            parts = tuple(
                BarPart(labels.name_css_classes(_BUCKETS.get(style, style)), words[style], ns, ns / one.ns)
                for style, ns in one.styles
                if ns
            )
            blocks.append(Bars(parts))
        blocks.append(_build_name_table(one, title, span_ns or one.ns, words, format_name))
    return blocks


def _build_name_table(one: TableSum, title: str, whole_ns: int, words: Mapping[str, str], format_name: Callable[[str, str], str]) -> Table:
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
    return Table(tuple(columns), tuple(rows), caption=title)
