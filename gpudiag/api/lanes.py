"""The time line of an analysed recording, drawn window by window: what a page asks for while somebody pans and zooms."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.api.pipeline import AnalysedRecording
from gpudiag.errors import InputError
from gpudiag.report.console import clean
from gpudiag.report.event_card import Card, build_card, format_event_name, name_styles, read_raw_names
from gpudiag.timeline.lanes import LANE_TABLES, STYLES, DrawnPieces, Lane, draw_pieces, find_lanes, find_within

__all__ = ["LANE_TABLES", "STYLES", "Card", "Drawing", "EventBlock", "LaneBoard", "LaneRow", "LaneTitle"]

LABEL_PIXELS = 40
"""Width from which an event has room for its name."""

SHOWN_LANES = {"stream": 12, "work": 4, "thread": 4}
"""Lanes of a kind that are drawn unless one is asked for by its key: the busiest (a page of about 60 rows)."""

SHOWN_ROWS = {"path": 3, "stream": 3, "thread": 5}
"""Rows drawn of such a lane; nested ops lie deeper (a lane asked for by its key has all of its rows)."""

MOST_NAMES = 3
"""Names told of joined events, those with most time."""

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
    """Place in Board.titles."""
    row: int
    """Of the lane."""
    pieces: DrawnPieces
    table: npt.NDArray[np.uint8]
    """Place in TABLES, of the piece's first event."""
    id: npt.NDArray[np.int64]
    """Row of that table."""
    marked: Flags | None
    """Whether one of its events is of the op asked for; None: none was asked for."""
    names: dict[int, str]
    """Names of the pieces that are wide enough, by their place."""


class Drawing(NamedTuple):
    """What is seen of a window."""

    rows: tuple[LaneRow, ...]
    events: int
    """In the rows and the window."""
    joined: int
    """Of these, drawn together with others."""
    marked: int | None
    """Kernels (on a CPU: ops) of the op asked for in the whole recording; None: no op was asked for."""


class EventBlock(NamedTuple):
    """What is told of joined events."""

    events: int
    busy_ns: int
    start_ns: int
    end_ns: int
    names: tuple[tuple[str, int, int], ...]
    """Name, events, time in ns, those with most time first."""


class LaneBoard:
    """The lanes of one recording. Safe to be asked by several threads."""

    def __init__(self, opened: AnalysedRecording) -> None:
        self._analysis, self._report, self._sites = opened.analysis, opened.report, opened.sites
        self._lanes = find_lanes(opened.analysis)
        self._op: tuple[str, dict[int, Flags]] = ("", {})
        self.titles = tuple(self._build_title(lane) for lane in self._lanes)
        self.words = name_styles(opened.report)
        rows = [row for lane in self._lanes for row in lane.rows]
        self.from_ns = min((int(row.start_ns[0]) for row in rows), default=0)
        self.to_ns = max((int(row.end_ns[-1]) for row in rows), default=0)

    def draw(self, from_ns: int, to_ns: int, pixels: int, *, lane: str | None = None, op: str | None = None) -> Drawing:
        """Return what is seen of [from_ns, to_ns) on `pixels` pixels; `lane`: of that lane alone, with the steps; `op`: marks its work.

        Raises InputError for a lane that is not there.
        """
        marks = self._find_marks(op) if op else None
        drawn = [
            self._draw_row(number, place, (from_ns, to_ns), pixels, marks)
            for number, shown in self._choose_lanes(lane)
            for place in range(min(shown, len(self._lanes[number].rows)))
        ]
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
            return build_card(self._analysis, self._report, self._sites, table, row)
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
        length = of.end_ns[first:last] - of.start_ns[first:last]
        names = self._find_longest(of.table[first:last], of.id[first:last], length)
        return EventBlock(last - first, int(length.sum()), int(of.start_ns[first]), int(of.end_ns[last - 1]), names)

    def next_marked(self, op: str, at_ns: int, direction: Literal[-1, 1]) -> tuple[str, int] | None:
        """Return (table, row) of the work of `op` that begins next after `at_ns`, or last before it; None where there is none."""
        table = "ops" if self._analysis.device_index is None else "kernels"
        frame: pl.DataFrame = getattr(self._analysis.trace, table)
        chosen = frame.select("id", "start_ns").filter(pl.Series(self._find_marks(op)[LANE_TABLES.index(table)]))
        start, back = pl.col("start_ns"), direction < 0
        found = chosen.filter(start < at_ns if back else start > at_ns).sort("start_ns", descending=back)
        return (table, int(found["id"][0])) if found.height else None

    def _choose_lanes(self, key: str | None) -> list[tuple[int, int]]:
        if key is not None:
            if key not in {lane.key for lane in self._lanes}:
                raise InputError(f"this recording has no lane {key[:40]!r}", "choose one of the list above the time line")
            return [(place, len(lane.rows)) for place, lane in enumerate(self._lanes) if lane.key in ("steps", key)]
        left = dict(SHOWN_LANES)
        chosen = []
        for place, lane in enumerate(self._lanes):
            left[lane.kind] = left.get(lane.kind, 1) - 1
            if left[lane.kind] >= 0:
                chosen.append((place, SHOWN_ROWS.get(lane.kind, 1)))
        return chosen

    def _draw_row(self, lane: int, place: int, window: tuple[int, int], pixels: int, marks: dict[int, Flags] | None) -> LaneRow:
        of = self._lanes[lane].rows[place]
        pieces = draw_pieces(of, *window, pixels)
        table, ids = of.table[pieces.first], of.id[pieces.first]
        marked = None
        if marks is not None and self._lanes[lane].kind in SHOWN_LANES:
            first, last = find_within(of, *window)
            flags = _flag_events(of.table[first:last], of.id[first:last], marks)
            marked = np.bitwise_or.reduceat(flags, pieces.first - first) if len(flags) else np.empty(0, dtype=np.bool_)
        wide = LABEL_PIXELS * (window[1] - window[0]) // max(1, pixels)
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

    def _find_longest(
        self, table: npt.NDArray[np.uint8], ids: npt.NDArray[np.int64], length: npt.NDArray[np.int64]
    ) -> tuple[tuple[str, int, int], ...]:
        """Return (name, events, time in ns) of the names with most time."""
        sums = []
        for number in np.unique(table).tolist():
            chosen = table == number
            names = read_raw_names(self._analysis, LANE_TABLES[number]).gather(ids[chosen]).alias("name")
            timed = pl.DataFrame([names, pl.Series("ns", length[chosen])])
            grouped = timed.group_by("name").agg(pl.len().alias("count"), pl.col("ns").sum())
            top = grouped.with_columns(pl.col("name").cast(pl.String)).sort("ns", "name", descending=[True, False]).head(MOST_NAMES)
            sums += [
                (self._format_name(number, name), int(count), int(ns)) for name, count, ns in top.select("name", "count", "ns").iter_rows()
            ]
        return tuple(sorted(sums, key=lambda one: -one[2])[:MOST_NAMES])

    def _find_marks(self, op: str) -> dict[int, Flags]:
        kept, marks = self._op
        if kept == op:
            return marks
        trace = self._analysis.trace
        ops = _match_name(trace.ops["name"], op)
        call = trace.kernels.select(pl.coalesce("owner", "op").fill_null(-1)).to_series().to_numpy()
        alone = _match_name(trace.kernels["name"], op)
        kernels = np.where(call >= 0, np.append(ops, False)[call], alone)
        marks = {LANE_TABLES.index("ops"): ops, LANE_TABLES.index("kernels"): kernels}
        self._op = (op, marks)
        return marks

    def _build_title(self, lane: Lane) -> LaneTitle:
        notes = []
        shown = SHOWN_ROWS.get(lane.kind, 1)
        hint = f"{shown} of {len(lane.rows)} levels; choose the lane to see all" if len(lane.rows) > shown else ""
        if lane.kind == "path":
            path = self._analysis.critical_path
            numbers = [] if path is None else path["step"].unique().sort().to_list()
            names = [clean(str(self._analysis.steps["name"][number]), 40) for number in numbers]
            notes.append(", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} steps")
        if lane.deeper:
            notes.append(f"{lane.deeper:,} events nested deeper are not drawn")
        return LaneTitle(lane.key, self._name_lane(lane), "; ".join(notes), hint)

    def _name_lane(self, lane: Lane) -> str:
        if lane.kind == "stream":
            device = "" if self._analysis.device_index is None else f"device {self._analysis.device_index}, "
            return f"{device}stream {'not known' if lane.number == -1 else lane.number}"
        if lane.kind == "work":
            return f"work of {self._name_thread(lane.number).removeprefix('host ')}: each op without those inside it"
        if lane.kind == "thread":
            return self._name_thread(lane.number)
        fixed = {"steps": "steps", "idle": "idle time of the device by cause", "path": "longest path"}
        return fixed[lane.kind]

    def _name_thread(self, number: int | None) -> str:
        threads = self._analysis.trace.meta.threads
        thread = threads[number] if number is not None and 0 <= number < len(threads) else None
        if thread is None:
            return f"host thread {number}"
        name = clean(thread.name or thread.tid, 60)
        return f"host {name if name.startswith('thread') else f'thread {name}'}"


def _match_name(names: pl.Series, wanted: str) -> Flags:
    found: Flags = (names == wanted).fill_null(False).to_numpy()
    return found


def _flag_events(table: npt.NDArray[np.uint8], ids: npt.NDArray[np.int64], marks: dict[int, Flags]) -> Flags:
    found = np.zeros(len(ids), dtype=np.bool_)
    for number, flags in marks.items():
        chosen = table == number
        found[chosen] = flags[ids[chosen]]
    return found
