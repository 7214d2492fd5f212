"""Time of many events of the time line, by name and bound: of an area that somebody chose, or of what a search found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.arrays import Ints
from gpudiag.attribution.names import map_distinct
from gpudiag.model.analysis import Analysis
from gpudiag.report import labels
from gpudiag.report.blocks import BarPart, Bars, Block, Cell, Column, Heading, Row, Table
from gpudiag.report.event_card import read_raw_names
from gpudiag.timeline.lanes import LANE_TABLES, STYLES, Lane, find_within
from gpudiag.timeline.lanes import Row as LaneEvents
from gpudiag.units import format_ns, format_share

MOST_NAMES = 15
"""Rows of a table: those with most time."""

SEARCHED = ("kernels", "ops", "launches", "marks", "frames")
"""Tables whose names can be searched for."""

MOST_LETTERS = 1_500
"""Of a name that can be searched for by a link."""

Flags = npt.NDArray[np.bool_]

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
_STRIDES = {"kernels": len(STYLES)}
"""Keys that a name has where its events are told apart by style; elsewhere 1."""
_BLOCK = 65_536
"""Events compared at once: what is in the processor's cache. At two million at once memory alone takes 60 ms."""

_BUCKETS = {"communication": "exposed_communication", "copy": "exposed_copy"}
"""Bounds whose colour has the name of a bucket."""


class NameSum(NamedTuple):
    """The events of one name, of kernels those of one bound."""

    name: str
    """As it stands in the trace."""
    style: str
    """Its bound, among kernels; '' elsewhere."""
    events: int
    ns: int
    longest_ns: int
    longest: int
    """Row of its table of the event that took so long."""


class TableSum(NamedTuple):
    """The events of one table: the names with most time, how many others there are, and the time by style."""

    table: str
    events: int
    ns: int
    names: tuple[NameSum, ...]
    others: int
    styles: tuple[tuple[str, int], ...]
    """Of kernels; of other tables ()."""


class NameSums:
    """Sums the events of a recording by name, those of kernels by bound too. Safe to be asked by several threads."""

    def __init__(self, analysis: Analysis, lanes: Sequence[Lane]) -> None:
        """Give each name a key, and each event that of its name: millions of events are then summed within some hundredths of a second."""
        self._analysis, self._lanes = analysis, lanes
        self._examples: dict[int, Ints] = {}
        """By place in LANE_TABLES for each name of the table a row that bears it, in the order of the names."""
        self._slices: dict[int, slice] = {}
        ranks, size = {}, 0
        for number in sorted({number for lane in lanes for row in lane.rows for number in _list_tables(row)}):
            table = LANE_TABLES[number]
            names = read_raw_names(analysis, table)
            rank: Ints = map_distinct(names, lambda distinct: distinct.rank("dense")).cast(pl.Int64).fill_null(0).to_numpy()
            self._examples[number] = example = np.zeros(int(rank.max(initial=0)) + 1, dtype=np.int64)
            example[rank] = np.arange(len(rank))
            self._slices[number] = slice(size, size + len(example) * _STRIDES.get(table, 1))
            ranks[number], size = rank, self._slices[number].stop
        self._size = size
        self._keys = [[self._key_events(row, ranks) for row in lane.rows] for lane in lanes]

    def _key_events(self, row: LaneEvents, ranks: Mapping[int, Ints]) -> Ints:
        keys = np.empty(len(row.id), dtype=np.int64)
        for number in _list_tables(row):
            chosen, stride = row.table == number, _STRIDES.get(LANE_TABLES[number], 1)
            styles = row.code[chosen] if stride > 1 else 0
            keys[chosen] = self._slices[number].start + ranks[number][row.id[chosen]] * stride + styles
        return keys

    def sum_events(
        self, places: Iterable[tuple[int, int]], from_ns: int, to_ns: int, marks: Mapping[int, Flags] | None = None
    ) -> tuple[TableSum, ...]:
        """Return the time within [from_ns, to_ns) of the events of rows (lane, row), by table in the order in which they are read.

        `marks`: those of them alone whose row of a table is marked, by place in LANE_TABLES.
        """
        sums = events, ns, longest_ns, longest = tuple(np.zeros(self._size, dtype=np.int64) for _ in range(4))
        summed: list[tuple[Ints, Ints, Ints]] = []
        for lane, place in places:
            row = self._lanes[lane].rows[place]
            span = slice(*find_within(row, from_ns, to_ns))
            keys, ids, spent = self._keys[lane][place][span], row.id[span], row.end_ns[span] - row.start_ns[span]
            if len(spent):  # the events of a row do not overlap: only the outermost reach beyond the window
                spent[0] -= max(0, from_ns - int(row.start_ns[span.start]))
                spent[-1] -= max(0, int(row.end_ns[span.stop - 1]) - to_ns)
            if marks is not None:
                chosen = match_marks(row, span, marks)
                keys, ids, spent = keys[chosen], ids[chosen], spent[chosen]
            np.add.at(ns, keys, spent)
            np.maximum.at(longest_ns, keys, spent)
            summed.append((keys, ids, spent))
            np.add.at(events, keys[_find_last_pieces(ids)] if self._lanes[lane].kind == "work" else keys, 1)
        for keys, ids, spent in reversed(summed):
            for block in (slice(at, at + _BLOCK) for at in reversed(range(0, len(keys), _BLOCK))):
                found = np.flatnonzero(spent[block] == longest_ns[keys[block]])[::-1]  # of equals the first is named: it is written last
                longest[keys[block][found]] = ids[block][found]
        numbers = [number for number in map(LANE_TABLES.index, _TITLES) if number in self._slices]
        return tuple(self._sum_table(number, sums) for number in numbers if events[self._slices[number]].any())

    def _sum_table(self, number: int, sums: Iterable[Ints]) -> TableSum:
        table, keys = LANE_TABLES[number], self._slices[number]
        stride = _STRIDES.get(table, 1)
        events, ns, longest_ns, longest = (one[keys] for one in sums)
        found = np.flatnonzero(events)
        found = found[np.argsort(-ns[found], kind="stable")]  # the keys are in the order of the names
        top = found[:MOST_NAMES]
        names = read_raw_names(self._analysis, table).gather(self._examples[number][top // stride]).cast(pl.String).fill_null("")
        named = tuple(
            NameSum(name, STYLES[key % stride] if stride > 1 else "", *(int(one[key]) for one in (events, ns, longest_ns, longest)))
            for name, key in zip(names, top.tolist(), strict=True)
        )
        by_style = np.zeros(stride, dtype=np.int64)
        np.add.at(by_style, found % stride, ns[found])
        styles = tuple((STYLES[code], int(by_style[code])) for code in np.argsort(-by_style, kind="stable").tolist() if by_style[code])
        return TableSum(table, int(events.sum()), int(ns.sum()), named, len(found) - len(top), styles if stride > 1 else ())


def _list_tables(row: LaneEvents) -> list[int]:
    return [number for number, count in enumerate(np.bincount(row.table).tolist()) if count]


def match_marks(row: LaneEvents, span: slice, marks: Mapping[int, Flags]) -> Flags:
    """Return which events of a part of a row are marked; `marks`: by place in LANE_TABLES for each row of that table."""
    table, ids = row.table[span], row.id[span]
    found = np.zeros(len(ids), dtype=np.bool_)
    for number, of_table in marks.items():
        chosen = table == number
        found[chosen] = of_table[ids[chosen]]
    return found


def _find_last_pieces(ids: Ints) -> Flags:
    """Mark one piece of each: on a CPU an op stands in pieces, between those inside it."""
    places = np.arange(len(ids))
    last = np.empty(int(ids.max(initial=-1)) + 1, dtype=np.int64)
    last[ids] = places
    found: Flags = last[ids] == places
    return found


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
        blocks.append(_build_name_table(one, title, span_ns, words, format_name))
    return blocks


def _build_name_table(
    one: TableSum, title: str, span_ns: int | None, words: Mapping[str, str], format_name: Callable[[str, str], str]
) -> Table:
    bounds, whole_ns = one.table == "kernels", span_ns or one.ns
    columns = [Column("name", "name"), *([Column("bound")] if bounds else [])]
    share = "of the area" if span_ns else "share"
    columns += [Column(title, "number") for title in ("time", share, "events", "mean", "longest")]
    rows = []
    for name in one.names:
        link = ("find", name.name) if 0 < len(name.name) <= MOST_LETTERS and one.table in SEARCHED else None
        cells = [Cell(format_name(one.table, name.name), link=link)]
        if bounds:
            cells.append(Cell(words[name.style].removesuffix("-bound"), css=labels.name_css_classes(_BUCKETS.get(name.style, name.style))))
        figures = (format_ns(name.ns), format_share(name.ns / whole_ns, 1) if whole_ns else "", f"{name.events:,}")
        cells += map(Cell, (*figures, format_ns(name.ns / name.events)))
        rows.append(Row((*cells, Cell(format_ns(name.longest_ns), link=("event", f"{one.table}-{name.longest}")))))
    return Table(tuple(columns), tuple(rows), caption=title)
