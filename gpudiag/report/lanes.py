"""The time line of an analysed recording, drawn window by window: what a page asks for while somebody pans and zooms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution.autograd import pair_forward_ops
from gpudiag.attribution.names import map_distinct, match_any_of
from gpudiag.errors import InputError
from gpudiag.model.analysis import Analysis
from gpudiag.model.report import ReportData
from gpudiag.report import labels
from gpudiag.report.blocks import Block
from gpudiag.report.console import clean
from gpudiag.report.event_card import Card, build_card, format_event_name, name_styles, read_raw_names
from gpudiag.report.event_links import EventLink, find_links
from gpudiag.report.lane_sums import SEARCHED, Flags, NameSums, TableSum, build_sum_blocks, match_marks
from gpudiag.timeline.breakdown import find_whole_path
from gpudiag.timeline.lanes import LANE_TABLES, STYLES, DrawnPieces, Lane, draw_pieces, find_lanes, find_within

__all__ = [
    "LANE_TABLES",
    "STYLES",
    "Card",
    "Drawing",
    "EventArrow",
    "EventBlock",
    "EventPlace",
    "LaneBoard",
    "LaneRow",
    "LaneTitle",
    "Wanted",
]

MARKED = ("stream", "work", "thread", "python")
"""Kinds of lanes in which events are marked, those of work first."""

FIRST_ROWS = 40
"""Rows that are drawn where the page does not know yet which there are: those of a high window."""

MOST_ROWS = 400
"""Rows drawn at once: more than the highest screen has."""

MOST_NAMES = 3

Marks = dict[int, Flags]
"""For a place in LANE_TABLES which rows of that table are marked."""


class LaneTitle(NamedTuple):
    """What is said of a lane."""

    key: str
    title: str
    note: str
    """What the lane holds or does not hold, '' where there is nothing to say."""
    levels: int
    """Rows of it."""


class LaneRow(NamedTuple):
    """One row of a drawing; the columns have one entry for each piece."""

    lane: int
    row: int
    pieces: DrawnPieces
    table: npt.NDArray[np.uint8]
    id: npt.NDArray[np.int64]
    marked: Flags | None
    """Whether one of its events is among those asked for; None: none were asked for."""
    names: dict[int, str]


class Drawing(NamedTuple):
    """What is seen of a window."""

    rows: tuple[LaneRow, ...]
    events: int
    joined: int
    marked: int | None
    """How many there are of what was asked for, in the whole recording; None: nothing was asked for."""


class Wanted(NamedTuple):
    """What is marked: the work of an op (kernels and calls), or each event whose name holds a text; '' for none."""

    op: str = ""
    text: str = ""


NOTHING = Wanted()


class EventPlace(NamedTuple):
    """Where an event is drawn."""

    lane: int
    row: int
    start_ns: int
    end_ns: int


class EventArrow(NamedTuple):
    """From one event to another, and where both are drawn."""

    link: EventLink
    source: EventPlace
    target: EventPlace


class EventBlock(NamedTuple):
    """What is told of joined events."""

    events: int
    busy_ns: int
    start_ns: int
    end_ns: int
    names: tuple[tuple[str, int, int], ...]


class LaneBoard:
    """The lanes of one recording. Safe to be asked by several threads."""

    def __init__(self, analysis: Analysis, report: ReportData) -> None:
        self._analysis, self._report = msgspec.structs.replace(analysis, critical_path=find_whole_path(analysis)), report
        self._lanes = find_lanes(self._analysis)
        self._sums = NameSums(self._analysis, self._lanes)
        self._forward = pair_forward_ops(analysis.trace.ops).forward
        self._marks: tuple[Wanted, Marks] = (NOTHING, {})
        self.titles = tuple(self._build_title(lane) for lane in self._lanes)
        self.words = name_styles(report)
        rows = [row for lane in self._lanes for row in lane.rows]
        self.from_ns = min((int(row.start_ns[0]) for row in rows), default=0)
        self.to_ns = max((int(row.end_ns[-1]) for row in rows), default=0)

    def draw(
        self, from_ns: int, to_ns: int, pixels: int, rows: Sequence[tuple[int, int]] | None = None, *, wanted: Wanted = NOTHING
    ) -> Drawing:
        """Return what is seen of [from_ns, to_ns) on `pixels` pixels; `rows`: (lane, row) of those seen, None: the first ones.

        `wanted` is marked. Rows that are not there are left out.
        """
        marks = self._find_marks(wanted) if any(wanted) else None
        every = [(lane, row) for lane, title in enumerate(self.titles) for row in range(title.levels)]
        chosen = every[:FIRST_ROWS] if rows is None else [place for place in dict.fromkeys(rows) if self._has_row(*place)][:MOST_ROWS]
        drawn = tuple(self._draw_row(lane, row, (from_ns, to_ns), pixels, marks) for lane, row in chosen)
        counts = [row.pieces.events for row in drawn]
        return Drawing(
            drawn,
            sum(int(count.sum()) for count in counts),
            sum(int(count[count > 1].sum()) for count in counts),
            None if marks is None else sum(int(marks[LANE_TABLES.index(table)].sum()) for table in self._list_found(wanted)),
        )

    def strip(self, pixels: int) -> LaneRow | None:
        """Return the whole recording in small: the fullest row of the busiest stream, on a CPU of the busiest thread; None without one."""
        kinds = [lane.kind for lane in self._lanes]
        kind = next((kind for kind in MARKED if kind in kinds), None)
        if kind is None:
            return None
        lane = kinds.index(kind)
        fullest = max(range(len(self._lanes[lane].rows)), key=lambda place: len(self._lanes[lane].rows[place].id))
        return self._draw_row(lane, fullest, (self.from_ns, self.to_ns), pixels, None)

    def card(self, table: str, row: int) -> Card:
        """Return what is told of one event. Raises InputError where there is none."""
        try:
            return build_card(self._analysis, self._report, table, row)
        except (KeyError, IndexError):
            raise InputError(f"no event {row} of {table[:40]!r} in this recording", "choose one in the time line") from None

    def block(self, lane: int, row: int, first: int, count: int) -> EventBlock:
        """Return what is told of `count` events of a row from its `first` on. Raises InputError where there are none."""
        if not (0 <= lane < len(self._lanes) and 0 <= row < len(self._lanes[lane].rows)):
            raise InputError(f"no row {row} of lane {lane} in this recording", "choose one in the time line")
        of = self._lanes[lane].rows[row]
        last = min(first + count, len(of.id))
        if not 0 <= first < last:
            raise InputError(f"no event {first} in this row", "choose one in the time line")
        table, ids, length = of.table[first:last], of.id[first:last], of.end_ns[first:last] - of.start_ns[first:last]
        sums = []  # name, events and time of the names with most time
        for number in np.unique(table).tolist():
            chosen = table == number
            names = read_raw_names(self._analysis, LANE_TABLES[number]).gather(ids[chosen]).alias("name")
            timed = pl.DataFrame([names, pl.Series("ns", length[chosen])])
            grouped = timed.group_by("name").agg(pl.len().alias("count"), pl.col("ns").sum())
            top = grouped.with_columns(pl.col("name").cast(pl.String)).sort("ns", "name", descending=[True, False]).head(MOST_NAMES)
            for name, events, ns in top.select("name", "count", "ns").iter_rows():
                sums.append((self._format_name(number, name), int(events), int(ns)))
        longest = tuple(sorted(sums, key=lambda one: -one[2])[:MOST_NAMES])
        return EventBlock(last - first, int(length.sum()), int(of.start_ns[first]), int(of.end_ns[last - 1]), longest)

    def sum_area(self, from_ns: int, to_ns: int, rows: Iterable[tuple[int, int]]) -> tuple[TableSum, ...]:
        """Return the time within [from_ns, to_ns) of the events of `rows` (lane, row), by name and style."""
        return self._sums.sum_events([place for place in dict.fromkeys(rows) if self._has_row(*place)], from_ns, to_ns)

    def sum_found(self, wanted: Wanted) -> tuple[TableSum, ...]:
        """Return the time of all events that are marked for `wanted`, by name and style."""
        searched = [LANE_TABLES.index(table) for table in self._list_found(wanted)]
        marks = {number: flags for number, flags in self._find_marks(wanted).items() if number in searched}
        lanes = [place for place, lane in enumerate(self._lanes) if lane.kind in MARKED]
        places = [(lane, row) for lane in lanes for row in range(len(self._lanes[lane].rows))]
        return self._sums.sum_events(places, self.from_ns, self.to_ns, marks)

    def build_blocks(self, sums: Sequence[TableSum], span_ns: int | None = None) -> list[Block]:
        """Return sums as a reader sees them; `span_ns`: what shares are parts of (None: of the sum)."""
        on_cpu = self._analysis.device_index is None
        device = "CPU, each op without those inside it" if on_cpu else labels.name_device(self._report)
        return build_sum_blocks(sums, span_ns, self.words, lambda table, name: self._format_name(LANE_TABLES.index(table), name), device)

    def next_marked(self, wanted: Wanted, at_ns: int, direction: Literal[-1, 1]) -> tuple[str, int] | None:
        """Return (table, row) of what is marked for `wanted` and begins next after `at_ns`, or last before it; None: there is none."""
        marks, back = self._find_marks(wanted), direction < 0
        found: list[tuple[int, str, int]] = []
        for table in self._list_found(wanted):
            start = getattr(self._analysis.trace, table)["start_ns"].to_numpy()
            rows = np.flatnonzero(marks[LANE_TABLES.index(table)] & (start < at_ns if back else start > at_ns))
            if len(rows):
                row = int(rows[start[rows].argmax() if back else start[rows].argmin()])
                found.append((int(start[row]), table, row))
        if not found:
            return None
        _, table, row = max(found) if back else min(found)
        return table, row

    def find_place(self, table: str, row: int) -> EventPlace | None:
        """Return where an event is drawn; None: it is nested too deep, or has no time. Raises InputError where there is no such event."""
        card = self.card(table, row)
        number = LANE_TABLES.index(table)
        for lane, of in enumerate(self._lanes):
            for place, events in enumerate(of.rows):
                first, last = np.searchsorted(events.start_ns, [card.start_ns, card.end_ns + 1])
                found = np.flatnonzero((events.id[first:last] == row) & (events.table[first:last] == number))
                if len(found):
                    at = int(first + found[0])
                    return EventPlace(lane, place, int(events.start_ns[at]), int(events.end_ns[at]))
        return None

    def find_arrows(self, table: str, row: int) -> tuple[EventArrow, ...]:
        """Return the arrows that lead to and from an event. Raises InputError where there is no such event."""
        self.card(table, row)
        found = []
        for link in find_links(self._analysis, self._forward, table, row):
            source, target = self.find_place(*link.source), self.find_place(*link.target)
            if source is not None and target is not None:
                found.append(EventArrow(link, source, target))
        return tuple(found)

    def _has_row(self, lane: int, row: int) -> bool:
        return 0 <= lane < len(self._lanes) and 0 <= row < len(self._lanes[lane].rows)

    def _draw_row(self, lane: int, place: int, window: tuple[int, int], pixels: int, marks: Marks | None) -> LaneRow:
        of = self._lanes[lane].rows[place]
        pieces = draw_pieces(of, *window, pixels)
        table, ids = of.table[pieces.first], of.id[pieces.first]
        marked = None
        if marks is not None and self._lanes[lane].kind in MARKED:
            first, last = find_within(of, *window)
            flags = match_marks(of, slice(first, last), marks)
            marked = np.bitwise_or.reduceat(flags, pieces.first - first) if len(flags) else np.empty(0, dtype=np.bool_)
        wide = 40 * (window[1] - window[0]) // max(1, pixels)  # width from which an event has room for its name
        named = np.flatnonzero((pieces.events == 1) & (pieces.end_ns - pieces.start_ns >= wide))
        texts: dict[int, str] = {}
        for number in np.unique(table[named]).tolist():
            places = named[table[named] == number]
            names = read_raw_names(self._analysis, LANE_TABLES[number]).gather(ids[places]).cast(pl.String)
            texts.update((piece, self._format_name(number, name)) for piece, name in zip(places.tolist(), names, strict=True))
        return LaneRow(lane, place, pieces, table, ids, marked, texts)

    def _format_name(self, table: int, name: str | None) -> str:
        text = name or ""
        if LANE_TABLES[table] == "frames":
            text = text.rpartition("/")[2]  # the end of a path says more than its beginning
        said = self.words.get(text) or self.words.get(f"idle_{text}") if LANE_TABLES[table] in ("idle", "critical_path") else None
        return said.removeprefix("idle: ") if said else format_event_name(text, kernel=LANE_TABLES[table] == "kernels")

    def _list_found(self, wanted: Wanted) -> tuple[str, ...]:
        """Return the tables whose marked events count: of an op its work alone, not also the calls that launch it."""
        return SEARCHED if wanted.text else ("ops" if self._analysis.device_index is None else "kernels",)

    def _find_marks(self, wanted: Wanted) -> Marks:
        kept, marks = self._marks
        if kept == wanted:
            return marks
        if wanted.text:
            marks = {LANE_TABLES.index(table): self._match_text(table, wanted.text.casefold()) for table in SEARCHED}
        else:
            trace = self._analysis.trace
            ops, alone = (
                match_any_of(names, [wanted.op]).fill_null(False).to_numpy() for names in (trace.ops["name"], trace.kernels["name"])
            )
            call = trace.kernels.select(pl.coalesce("owner", "op").fill_null(-1)).to_series().to_numpy()
            kernels = np.where(call >= 0, np.append(ops, False)[call], alone)
            marks = {LANE_TABLES.index("ops"): ops, LANE_TABLES.index("kernels"): kernels}
        self._marks = (wanted, marks)
        return marks

    def _match_text(self, table: str, text: str) -> Flags:
        """Mark the rows whose name holds `text` (lower case): as it was recorded, or as it is written on the event."""

        def holds(names: pl.Series) -> pl.Series:
            shown = (format_event_name(name or "", kernel=table == "kernels") for name in names)
            held = [text in (name or "").casefold() or text in label.casefold() for name, label in zip(names, shown, strict=True)]
            return pl.Series(held, dtype=pl.Boolean)

        names = read_raw_names(self._analysis, table)
        if table == "kernels" and self._analysis.device_index is None:
            return np.zeros(len(names), dtype=np.bool_)  # of a CPU the ops are found, whose pieces these are
        found: Flags = map_distinct(names, holds).fill_null(False).to_numpy()
        return found

    def _build_title(self, lane: Lane) -> LaneTitle:
        analysis, notes = self._analysis, []
        if lane.kind == "stream":
            title = f"stream {'not known' if lane.number == -1 else lane.number}"
            notes.append("" if analysis.device_index is None else f"device {analysis.device_index}")
        elif lane.kind == "work":
            title = f"work of {self._name_thread(lane.number)}"
            notes.append("each op without those inside it")
        elif lane.kind in ("thread", "python"):
            title = f"{'Python of ' if lane.kind == 'python' else ''}{self._name_thread(lane.number)}"
        else:
            title = {"steps": "steps", "idle": "idle time by cause", "path": "critical path"}[lane.kind]
        if lane.kind == "path" and analysis.critical_path is not None:
            known, every = analysis.critical_path["step"].n_unique(), int(analysis.steps["analysed"].sum())
            notes.append("" if known >= every else f"{known} of {every} analysed steps")
        if lane.deeper:
            notes.append(f"{lane.deeper:,} events nested deeper are not drawn")
        return LaneTitle(lane.key, title, "; ".join(filter(None, notes)), len(lane.rows))

    def _name_thread(self, number: int | None) -> str:
        threads = self._analysis.trace.meta.threads
        thread = threads[number] if number is not None and 0 <= number < len(threads) else None
        if thread is None:
            return f"thread {number}"
        name = clean(thread.name or thread.tid, 60)
        return name if name.startswith("thread") else f"thread {name}"
