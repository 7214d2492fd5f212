"""The time line: lanes drawn by assets/timeline.js, what the page asks, and the columns of the answers.

A canvas and not a plotly figure: with 2,000 bars plotly took 0.34 s for a frame while panning and with 12,000 bars 2 s, where the canvas
took 0.02 s and 0.08 s (headless Chromium, two busy cores).
"""

from __future__ import annotations

import base64
import threading
from collections import OrderedDict
from typing import Any, Literal, TypeVar

import dash
import msgspec
import numpy as np
from dash import ClientsideFunction, Input, Output, State, dcc, html
from dash.development.base_component import Component
from gpudiag_dashboard import components
from gpudiag_dashboard.components import MOST_CHARACTERS, View
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.page import ADDRESS

from gpudiag.api.lanes import LANE_TABLES, STYLES, EventBlock, LaneBoard, LaneRow
from gpudiag.errors import InputError
from gpudiag.units import format_ns, format_share

MOST_PIXELS = 16_000
"""Two screens of 8,000 pixels: beside the window itself the page asks for half of it on either side."""

LEAST_NS = 100
"""Narrowest window: no device has events as short."""

AROUND = 12
"""An event that is looked for is shown in a window of so many times its length."""

STRIP_PIXELS = 1_000
"""Resolution of the whole recording in small; it is stretched to the page."""

_MOST_BOARDS = 4
_FAR_NS = 2**62


class Ask(msgspec.Struct, frozen=True):
    """A window that the page wants to draw; without a window the whole recording, or the surroundings of `event`."""

    number: int
    """Counts the questions: answers to old ones are left aside."""
    pixels: int
    from_ns: float | None = None
    to_ns: float | None = None
    lane: str | None = None
    op: str | None = None
    event: str | None = None
    """Such as 'kernels-12'."""
    setup: bool = False
    """Whether the page does not know the lanes yet."""


class Point(msgspec.Struct, frozen=True):
    """A piece under the pointer: an event, or `count` joined events of a row from its `first` on."""

    number: int
    event: str | None = None
    lane: int = 0
    row: int = 0
    first: int = 0
    count: int = 0


class Search(msgspec.Struct, frozen=True):
    """The next work of an op, seen from a moment."""

    op: str
    at_ns: float
    direction: Literal[-1, 1]


class Boards:
    """The time lines of the recordings that were looked at last, each made once."""

    def __init__(self, library: Library) -> None:
        self._library, self._lock = library, threading.Lock()
        self._kept: OrderedDict[tuple[str, int | None], tuple[object, LaneBoard]] = OrderedDict()

    def of(self, name: str, rank: int | None = None) -> LaneBoard:
        """Return the time line of a recording. Raises InputError where there is none of this name or it cannot be read."""
        opened, key = self._library.opened(name, rank), (name, rank)
        with self._lock:
            kept = self._kept.get(key)
            if kept is None or kept[0] is not opened:
                kept = self._kept[key] = (opened, LaneBoard(opened))
            self._kept.move_to_end(key)
            while len(self._kept) > _MOST_BOARDS:
                self._kept.popitem(last=False)
            return kept[1]


def parse_event(text: str) -> tuple[str, int]:
    """Return (table, row) of an event's name such as 'kernels-12'. Raises InputError for another text."""
    table, _, digits = text.partition("-")
    if table not in LANE_TABLES or not (digits.isascii() and digits.isdigit() and len(digits) < 16):
        raise InputError(f"{text[:40]!r} names no event", "an event is named like kernels-12")
    return table, int(digits)


def build_answer(board: LaneBoard, ask: Ask) -> dict[str, Any]:
    """Return what the page draws. Raises InputError for a lane or event that is not there."""
    from_ns, to_ns = _choose_window(board, ask)
    pixels = min(max(1, ask.pixels), MOST_PIXELS)
    drawing = board.draw(from_ns, to_ns, pixels, lane=ask.lane, op=ask.op)
    found: dict[str, Any] = {
        "number": ask.number,
        "from": from_ns,
        "to": to_ns,
        "pixels": pixels,
        "events": drawing.events,
        "joined": drawing.joined,
        "marked": drawing.marked,
        "rows": [_encode_row(row) for row in drawing.rows],
    }
    return {**found, "setup": _build_setup(board)} if ask.setup else found


def find_surroundings(board: LaneBoard, event: str) -> tuple[int, int]:
    """Return the window in which an event is looked at. Raises InputError where there is none."""
    found = board.card(*parse_event(event))
    margin = max(LEAST_NS, (AROUND - 1) * (found.end_ns - found.start_ns)) // 2
    return found.start_ns - margin, found.end_ns + margin


def _choose_window(board: LaneBoard, ask: Ask) -> tuple[int, int]:
    """Return the window asked for as whole ns, at least LEAST_NS long."""
    if ask.event is not None:
        from_ns, to_ns = find_surroundings(board, ask.event)
    elif ask.from_ns is None or ask.to_ns is None:
        from_ns, to_ns = board.from_ns, board.to_ns
    else:
        from_ns, to_ns = (round(min(max(value, -_FAR_NS), _FAR_NS)) for value in (ask.from_ns, ask.to_ns))
    return from_ns, max(to_ns, from_ns + LEAST_NS)


def _build_setup(board: LaneBoard) -> dict[str, Any]:
    """Return what does not change with the window."""
    strip = board.strip(STRIP_PIXELS)
    return {
        "from": board.from_ns,
        "to": max(board.to_ns, board.from_ns + LEAST_NS),
        "lanes": [{"key": title.key, "title": title.title, "note": title.note, "hint": title.hint} for title in board.titles],
        "styles": list(STYLES),
        "words": [board.words[style] for style in STYLES],
        "tables": list(LANE_TABLES),
        "strip": None if strip is None else _encode_row(strip),
    }


def _encode_row(row: LaneRow) -> dict[str, Any]:
    """Return one row: its columns as base64 of little-endian numbers, which neither side has to parse one by one."""
    of = row.pieces
    length = np.maximum(of.end_ns - of.start_ns, 1)
    return {
        "lane": row.lane,
        "row": row.row,
        "start": _pack_column(of.start_ns, "<f8"),
        "length": _pack_column(of.end_ns - of.start_ns, "<f8"),
        "code": _pack_column(of.code, "u1"),
        "count": _pack_column(of.events, "<i4"),
        "busy": _pack_column(np.clip(np.ceil(100 * of.busy_ns / length), 0, 100), "u1"),
        "first": _pack_column(of.first, "<i4"),
        "table": _pack_column(row.table, "u1"),
        "id": _pack_column(row.id, "<i4"),
        "marked": None if row.marked is None else _pack_column(row.marked, "u1"),
        "names": {str(place): name for place, name in row.names.items()},
    }


def _pack_column(column: Any, form: str) -> str:
    return base64.b64encode(np.ascontiguousarray(column, dtype=form).tobytes()).decode("ascii")


ASK, GOT = "timeline-ask", "timeline-got"
POINT, POINTED = "timeline-point", "timeline-pointed"
PICK, PANEL = "timeline-pick", "timeline-panel"
SEARCH, FOUND = "timeline-search", "timeline-found"
STORES = (ASK, GOT, POINT, POINTED, PICK, SEARCH, FOUND)

KEYS = (
    ("drag, or \u2190 \u2192", "move"),
    ("wheel, or + \u2212", "zoom; with Shift the wheel moves"),
    ("Shift and drag", "zoom into what is drawn over"),
    ("0", "show the whole recording"),
    ("\u2191 \u2193", "choose a row"),
    ("N P", "next or previous event of the row; Enter zooms to it, Esc deselects it"),
    ("M, Shift and M", "next or previous work of the marked op"),
)

_Request = TypeVar("_Asked", Ask, Point, Search)


class Timeline:
    """The page; its state (from, to, lane, op, event) lives in the address, which the script keeps up to date."""

    path, title, needs_bundle, needs_analysis = "/timeline", "Timeline", True, True

    def layout(self, view: View) -> Component:
        """Return the place for the drawing, the panel beside it, and the stores by which script and server talk."""
        panel = html.Aside(_build_nothing(), id=PANEL, **{"aria-label": "Chosen event", "aria-live": "polite"})
        return html.Div(
            [
                html.H1("Timeline"),
                html.Div([html.Div(id="timeline-root"), panel], className="timeline"),
                html.Details([html.Summary("Keys and mouse"), components.build_terms(KEYS)], className="timeline-keys"),
                *(dcc.Store(id=store) for store in STORES),
            ]
        )

    def register(self, app: dash.Dash, library: Library) -> None:
        """Register the callbacks: four that the server answers, and the script's own."""
        answers = _Answers(library)
        search = State(ADDRESS, "search")
        for asked, told, act in (
            (ASK, Output(GOT, "data"), answers.draw),
            (POINT, Output(POINTED, "data"), answers.point),
            (PICK, Output(PANEL, "children"), answers.pick),
            (SEARCH, Output(FOUND, "data"), answers.search),
        ):
            app.callback(told, Input(asked, "data"), search, prevent_initial_call=True)(act)
        for name, heard in (("address", ADDRESS), ("got", GOT), ("pointed", POINTED), ("found", FOUND)):
            first = name == "address"
            app.clientside_callback(
                ClientsideFunction("gpudiagTimeline", name),
                Output("timeline-root", f"data-{name}"),
                Input(heard, "search" if first else "data"),
                prevent_initial_call=not first,
            )


class _Answers:
    """What the server answers; every question may be malformed."""

    def __init__(self, library: Library) -> None:
        self._boards = Boards(library)

    def draw(self, asked: Any, search: str | None) -> dict[str, Any]:
        """Return a window, or why there is none."""
        ask = _parse_request(asked, Ask)
        try:
            return build_answer(self._boards.of(*_parse_address(search)), ask)
        except InputError as error:
            return {"number": ask.number, "error": f"{error.message} ({error.hint})" if error.hint else error.message}

    def point(self, asked: Any, search: str | None) -> dict[str, Any]:
        """Return what is told of the piece under the pointer."""
        wanted = _parse_request(asked, Point)
        board = self._boards.of(*_parse_address(search))
        if wanted.event is not None:
            card = board.card(*parse_event(wanted.event))
            return {"number": wanted.number, "title": card.title, "lines": card.lines}
        block = board.block(wanted.lane, wanted.row, wanted.first, wanted.count)
        return {"number": wanted.number, "title": _format_block_title(block), "lines": _list_block_lines(block)}

    def pick(self, asked: Any, search: str | None) -> list[Component]:
        """Return the panel about what was chosen."""
        if not asked:
            return _build_nothing()
        wanted = _parse_request(asked, Point)
        board = self._boards.of(*_parse_address(search))
        if wanted.event is not None:
            # What is told of an event, with links to its op and to what belongs to it
            found = board.card(*parse_event(wanted.event))
            view = View.parse("/timeline", search)
            links = [
                _build_event_link(f"zoom to {what}", f"{table}-{row}", view)
                for what, table, row in (("it", found.table, found.row), *found.related)
            ]
            if found.op and len(found.op) < MOST_CHARACTERS // 2:  # else no address can hold it
                links.append(
                    components.build_link(f"{components.clean_text(found.op, 60)} in the op table", view.href("/ops", op=found.op))
                )
                links.append(
                    html.A(f"mark all work of {components.clean_text(found.op, 60)}", href=view.href(op=found.op), **{"data-op": found.op})
                )
            return [
                html.H2(found.title),
                components.build_terms(found.lines),
                html.Ul([html.Li(link) for link in links], className="plain"),
            ]
        return _build_block(board.block(wanted.lane, wanted.row, wanted.first, wanted.count))

    def search(self, asked: Any, search: str | None) -> dict[str, Any]:
        """Return the next work of an op and the window in which it is seen."""
        wanted = _parse_request(asked, Search)
        board = self._boards.of(*_parse_address(search))
        found = board.next_marked(wanted.op, round(wanted.at_ns), wanted.direction)
        if found is None:
            return {"event": None}
        event = f"{found[0]}-{found[1]}"
        from_ns, to_ns = find_surroundings(board, event)
        return {"event": event, "from": from_ns, "to": to_ns}


def _parse_request(value: Any, kind: type[_Request]) -> _Request:
    """Return what the script sent. Raises InputError where it cannot have sent it."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InputError(f"the time line was asked something malformed: {error}", "load the page again") from None


def _parse_address(search: str | None) -> tuple[str, int | None]:
    """Return the recording and the rank that the address names."""
    view = View.parse("/timeline", search)
    if view.bundle is None:
        raise InputError("no recording is chosen", "choose one of the list")
    return view.bundle, view.rank


def _build_nothing() -> list[Component]:
    return [html.H2("Chosen event"), components.build_quiet("Click an event, or choose one with the arrow keys and N.")]


def _build_event_link(label: str, event: str, view: View) -> Component:
    """Return a link to an event of this time line; the script follows it without leaving the lane and op that are looked at."""
    href = view.href(**{"event": event, "from": None, "to": None})
    return html.A(label, href=href, **{"data-event": event})


def _build_block(found: EventBlock) -> list[Component]:
    said = "They are too short to be drawn one by one at this zoom."
    return [html.H2(_format_block_title(found)), components.build_quiet(said), components.build_terms(_list_block_lines(found))]


def _format_block_title(found: EventBlock) -> str:
    return f"{found.events:,} events, zoom in"


def _list_block_lines(found: EventBlock) -> tuple[tuple[str, str], ...]:
    length = found.end_ns - found.start_ns
    share = f" ({format_share(found.busy_ns / length)})" if length else ""
    names = tuple((name, f"{count:,} \u00d7, {format_ns(ns)}") for name, count, ns in found.names)
    return (("together", f"{format_ns(found.busy_ns)} of {format_ns(length)}{share}"), *names)


PAGE = Timeline()
