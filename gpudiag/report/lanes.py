"""The time line of an analysed recording, drawn window by window: what a page asks for while somebody pans and zooms."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.errors import InputError
from gpudiag.model.analysis import Analysis
from gpudiag.model.report import ReportData
from gpudiag.report.console import clean
from gpudiag.report.event_card import Card, build_card, format_event_name, name_styles, read_raw_names
from gpudiag.timeline.lanes import LANE_TABLES, STYLES, DrawnPieces, Lane, draw_pieces, find_lanes, find_within

__all__ = ["LANE_TABLES", "STYLES", "Card", "Drawing", "EventBlock", "LaneBoard", "LaneRow", "LaneTitle"]

SHOWN_LANES = {"stream": 12, "work": 4, "thread": 4}
"""Lanes of a kind that are drawn unless one is asked for by its key: the busiest (a page of about 60 rows)."""

SHOWN_ROWS = {"path": 3, "stream": 3, "thread": 5}
"""Rows drawn of such a lane; nested ops lie deeper (a lane asked for by its key has all of its rows)."""

MOST_NAMES = 3

Flags = npt.NDArray[np.bool_]


class LaneTitle(NamedTuple):
    """What is said of a lane."""

    key: str
    title: str
    note: str
    """What the lane does not hold, '' where there is nothing to say."""
    hint: str
    """What is not drawn of it unless it is asked for by its key, '' where all is."""


class LaneRow(NamedTuple):
    """One row of a drawing; the columns have one entry for each piece."""

    lane: int
    row: int
    pieces: DrawnPieces
    table: npt.NDArray[np.uint8]
    id: npt.NDArray[np.int64]
    marked: Flags | None
    """Whether one of its events is of the op asked for; None: none was asked for."""
    names: dict[int, str]


class Drawing(NamedTuple):
    """What is seen of a window."""

    rows: tuple[LaneRow, ...]
    events: int
    joined: int
    marked: int | None
    """Kernels (on a CPU: ops) of the op asked for in the whole recording; None: no op was asked for."""


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
        self._analysis, self._report = analysis, report
        self._lanes = find_lanes(analysis)
        self._op: tuple[str, dict[int, Flags]] = ("", {})
        self.titles = tuple(self._build_title(lane) for lane in self._lanes)
        self.words = name_styles(report)
        rows = [row for lane in self._lanes for row in lane.rows]
        self.from_ns = min((int(row.start_ns[0]) for row in rows), default=0)
        self.to_ns = max((int(row.end_ns[-1]) for row in rows), default=0)

    def draw(self, from_ns: int, to_ns: int, pixels: int, *, lane: str | None = None, op: str | None = None) -> Drawing:
        """Return what is seen of [from_ns, to_ns) on `pixels` pixels; `lane`: of that lane alone, with the steps; `op`: marks its work.

        Raises InputError for a lane that is not there.
        """
        marks = self._find_marks(op) if op else None
        if lane is not None and lane not in {one.key for one in self._lanes}:
            raise InputError(f"this recording has no lane {lane[:40]!r}", "choose one of the list above the time line")
        left, drawn = dict(SHOWN_LANES), []
        for number, one in enumerate(self._lanes):
            if lane is None:
                left[one.kind] = left.get(one.kind, 1) - 1
                shown = SHOWN_ROWS.get(one.kind, 1) if left[one.kind] >= 0 else 0
            else:
                shown = len(one.rows) if one.key in ("steps", lane) else 0
            places = range(min(shown, len(one.rows)))
            drawn += [self._draw_row(number, place, (from_ns, to_ns), pixels, marks) for place in places]
        counts = [row.pieces.events for row in drawn]
        work = "ops" if self._analysis.device_index is None else "kernels"
        return Drawing(
            tuple(drawn),
            sum(int(count.sum()) for count in counts),
            sum(int(count[count > 1].sum()) for count in counts),
            int(marks[LANE_TABLES.index(work)].sum()) if marks else None,
        )

    def strip(self, pixels: int) -> LaneRow | None:
        """Return the whole recording in small: the fullest row of the busiest stream, on a CPU of the busiest thread; None without one."""
        kinds = [lane.kind for lane in self._lanes]
        kind = next((kind for kind in SHOWN_LANES if kind in kinds), None)
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

    def next_marked(self, op: str, at_ns: int, direction: Literal[-1, 1]) -> tuple[str, int] | None:
        """Return (table, row) of the work of `op` that begins next after `at_ns`, or last before it; None where there is none."""
        table = "ops" if self._analysis.device_index is None else "kernels"
        frame: pl.DataFrame = getattr(self._analysis.trace, table)
        chosen = frame.select("id", "start_ns").filter(pl.Series(self._find_marks(op)[LANE_TABLES.index(table)]))
        start, back = pl.col("start_ns"), direction < 0
        found = chosen.filter(start < at_ns if back else start > at_ns).sort("start_ns", descending=back)
        return (table, int(found["id"][0])) if found.height else None

    def _draw_row(self, lane: int, place: int, window: tuple[int, int], pixels: int, marks: dict[int, Flags] | None) -> LaneRow:
        of = self._lanes[lane].rows[place]
        pieces = draw_pieces(of, *window, pixels)
        table, ids = of.table[pieces.first], of.id[pieces.first]
        marked = None
        if marks is not None and self._lanes[lane].kind in SHOWN_LANES:
            first, last = find_within(of, *window)
            flags = np.zeros(last - first, dtype=np.bool_)
            for number, of_table in marks.items():
                chosen = of.table[first:last] == number
                flags[chosen] = of_table[of.id[first:last][chosen]]
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
        said = self.words.get(text) or self.words.get(f"idle_{text}") if LANE_TABLES[table] in ("idle", "critical_path") else None
        return said.removeprefix("idle: ") if said else format_event_name(text, kernel=LANE_TABLES[table] == "kernels")

    def _find_marks(self, op: str) -> dict[int, Flags]:
        kept, marks = self._op
        if kept == op:
            return marks
        trace = self._analysis.trace
        ops, alone = ((names == op).fill_null(False).to_numpy() for names in (trace.ops["name"], trace.kernels["name"]))
        call = trace.kernels.select(pl.coalesce("owner", "op").fill_null(-1)).to_series().to_numpy()
        kernels = np.where(call >= 0, np.append(ops, False)[call], alone)
        marks = {LANE_TABLES.index("ops"): ops, LANE_TABLES.index("kernels"): kernels}
        self._op = (op, marks)
        return marks

    def _build_title(self, lane: Lane) -> LaneTitle:
        analysis, notes = self._analysis, []
        shown = SHOWN_ROWS.get(lane.kind, 1)
        hint = f"{shown} of {len(lane.rows)} levels; choose the lane to see all" if len(lane.rows) > shown else ""
        if lane.kind == "stream":
            device = "" if analysis.device_index is None else f"device {analysis.device_index}, "
            title = f"{device}stream {'not known' if lane.number == -1 else lane.number}"
        elif lane.kind == "work":
            title = f"work of {self._name_thread(lane.number).removeprefix('host ')}: each op without those inside it"
        elif lane.kind == "thread":
            title = self._name_thread(lane.number)
        else:
            title = {"steps": "steps", "idle": "idle time of the device by cause", "path": "longest path"}[lane.kind]
        if lane.kind == "path":
            numbers = [] if analysis.critical_path is None else analysis.critical_path["step"].unique().sort().to_list()
            names = [clean(str(analysis.steps["name"][number]), 40) for number in numbers]
            notes.append(", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} steps")
        if lane.deeper:
            notes.append(f"{lane.deeper:,} events nested deeper are not drawn")
        return LaneTitle(lane.key, title, "; ".join(notes), hint)

    def _name_thread(self, number: int | None) -> str:
        threads = self._analysis.trace.meta.threads
        thread = threads[number] if number is not None and 0 <= number < len(threads) else None
        if thread is None:
            return f"host thread {number}"
        name = clean(thread.name or thread.tid, 60)
        return f"host {name if name.startswith('thread') else f'thread {name}'}"
