"""The time line: lanes drawn by assets/timeline.js, what the page asks, and the columns of the answers.

A canvas and not a plotly figure: with 2,000 bars plotly took 0.34 s for a frame while panning and with 12,000 bars 2 s, where the canvas
took 0.02 s and 0.08 s (headless Chromium, two busy cores).
"""

from __future__ import annotations

import base64
from typing import Any, Literal, TypeVar

import dash
import msgspec
import numpy as np
from dash import ClientsideFunction, Input, Output, State, dcc, html
from dash.development.base_component import Component
from gpudiag_dashboard import components
from gpudiag_dashboard.components import MOST_CHARACTERS, View
from gpudiag_dashboard.library import Library, RecentCache
from gpudiag_dashboard.page import ADDRESS

from gpudiag.errors import InputError
from gpudiag.report.lanes import LANE_TABLES, STYLES, EventBlock, LaneBoard, LaneRow
from gpudiag.units import format_ns, format_share

LEAST_NS = 100

AROUND = 12
"""An event that is looked for is shown in a window of so many times its length."""

_FAR_NS = 2**62


class Ask(msgspec.Struct, frozen=True):
    """A window that the page wants to draw; without a window the whole recording, or the surroundings of `event`."""

    number: int
    pixels: int
    from_ns: float | None = None
    to_ns: float | None = None
    lane: str | None = None
    op: str | None = None
    event: str | None = None
    setup: bool = False


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


def parse_event(text: str) -> tuple[str, int]:
    """Return (table, row) of an event's name such as 'kernels-12'. Raises InputError for another text."""
    table, _, digits = text.partition("-")
    if table not in LANE_TABLES or not (digits.isascii() and digits.isdigit() and len(digits) < 16):
        raise InputError(f"{text[:40]!r} names no event", "an event is named like kernels-12")
    return table, int(digits)


def build_answer(board: LaneBoard, ask: Ask) -> dict[str, Any]:
    """Return what the page draws. Raises InputError for a lane or event that is not there."""
    if ask.event is not None:
        from_ns, to_ns = find_surroundings(board, ask.event)
    elif ask.from_ns is None or ask.to_ns is None:
        from_ns, to_ns = board.from_ns, board.to_ns
    else:
        from_ns, to_ns = (round(min(max(value, -_FAR_NS), _FAR_NS)) for value in (ask.from_ns, ask.to_ns))
    to_ns = max(to_ns, from_ns + LEAST_NS)
    # Two screens of 8,000 pixels: beside the window itself the page asks for half of it on either side
    pixels = min(max(1, ask.pixels), 16_000)
    drawing = board.draw(from_ns, to_ns, pixels, lane=ask.lane, op=ask.op)
    answer: dict[str, Any] = {
        "number": ask.number,
        "from": from_ns,
        "to": to_ns,
        "pixels": pixels,
        "events": drawing.events,
        "joined": drawing.joined,
        "marked": drawing.marked,
        "rows": [_encode_row(row) for row in drawing.rows],
    }
    if ask.setup:  # what does not change with the window
        strip = board.strip(1_000)  # resolution of the whole recording in small; it is stretched to the page
        answer["setup"] = {
            "from": board.from_ns,
            "to": max(board.to_ns, board.from_ns + LEAST_NS),
            "lanes": [{"key": title.key, "title": title.title, "note": title.note, "hint": title.hint} for title in board.titles],
            "styles": list(STYLES),
            "words": [board.words[style] for style in STYLES],
            "tables": list(LANE_TABLES),
            "strip": None if strip is None else _encode_row(strip),
        }
    return answer


def find_surroundings(board: LaneBoard, event: str) -> tuple[int, int]:
    """Return the window in which an event is looked at. Raises InputError where there is none."""
    card = board.card(*parse_event(event))
    margin = max(LEAST_NS, (AROUND - 1) * (card.end_ns - card.start_ns)) // 2
    return card.start_ns - margin, card.end_ns + margin


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

KEYS = (
    ("drag, or \u2190 \u2192", "move"),
    ("wheel, or + \u2212", "zoom; with Shift the wheel moves"),
    ("Shift and drag", "zoom into what is drawn over"),
    ("0", "show the whole recording"),
    ("\u2191 \u2193", "choose a row"),
    ("N P", "next or previous event of the row; Enter zooms to it, Esc deselects it"),
    ("M, Shift and M", "next or previous work of the marked op"),
)

_NOTHING_CHOSEN = [html.H2("Chosen event"), components.build_quiet("Click an event, or choose one with the arrow keys and N.")]

_Request = TypeVar("_Request", Ask, Point, Search)


class Timeline:
    """The page; its state (from, to, lane, op, event) lives in the address, which the script keeps up to date."""

    path, title, needs_bundle, needs_analysis = "/timeline", "Timeline", True, True

    def layout(self, view: View) -> Component:
        """Return the place for the drawing, the panel beside it, and the stores by which script and server talk."""
        panel = html.Aside(_NOTHING_CHOSEN, id=PANEL, **{"aria-label": "Chosen event", "aria-live": "polite"})
        return html.Div(
            [
                html.H1("Timeline"),
                html.Div([html.Div(id="timeline-root"), panel], className="timeline"),
                html.Details([html.Summary("Keys and mouse"), components.build_terms(KEYS)], className="timeline-keys"),
                *(dcc.Store(id=store) for store in (ASK, GOT, POINT, POINTED, PICK, SEARCH, FOUND)),
            ]
        )

    def register(self, app: dash.Dash, library: Library) -> None:
        """Register the callbacks: four that the server answers, and the script's own."""
        answers = _Answers(library)
        search = State(ADDRESS, "search")
        for asked, answer, act in (
            (ASK, Output(GOT, "data"), answers.draw),
            (POINT, Output(POINTED, "data"), answers.point),
            (PICK, Output(PANEL, "children"), answers.pick),
            (SEARCH, Output(FOUND, "data"), answers.search),
        ):
            app.callback(answer, Input(asked, "data"), search, prevent_initial_call=True)(act)
        for name, heard in (("address", ADDRESS), ("got", GOT), ("pointed", POINTED), ("found", FOUND)):
            first = name == "address"
            app.clientside_callback(
                ClientsideFunction("gpudiagTimeline", name),
                Output("timeline-root", f"data-{name}"),
                Input(heard, "search" if first else "data"),
                prevent_initial_call=not first,
            )


class _Answers:
    def __init__(self, library: Library) -> None:
        self._library = library
        self._boards: RecentCache[LaneBoard] = RecentCache(4)

    def _open_board(self, search: str | None) -> LaneBoard:
        view = View.parse("/timeline", search)
        if view.bundle is None:
            raise InputError("no recording is chosen", "choose one of the list")
        opened = self._library.opened(view.bundle, view.rank)
        return self._boards.get((view.bundle, view.rank), lambda: LaneBoard(opened.analysis, opened.report), opened)

    def draw(self, asked: Any, search: str | None) -> dict[str, Any]:
        ask = _parse_request(asked, Ask)
        try:
            return build_answer(self._open_board(search), ask)
        except InputError as error:
            return {"number": ask.number, "error": f"{error.message} ({error.hint})" if error.hint else error.message}

    def point(self, asked: Any, search: str | None) -> dict[str, Any]:
        point = _parse_request(asked, Point)
        board = self._open_board(search)
        if point.event is not None:
            card = board.card(*parse_event(point.event))
            return {"number": point.number, "title": card.title, "lines": card.lines}
        title, lines = _describe_block(board.block(point.lane, point.row, point.first, point.count))
        return {"number": point.number, "title": title, "lines": lines}

    def pick(self, asked: Any, search: str | None) -> list[Component]:
        if not asked:
            return _NOTHING_CHOSEN
        point = _parse_request(asked, Point)
        board = self._open_board(search)
        if point.event is None:
            title, lines = _describe_block(board.block(point.lane, point.row, point.first, point.count))
            note = components.build_quiet("They are too short to be drawn one by one at this zoom.")
            return [html.H2(title), note, components.build_terms(lines)]
        card = board.card(*parse_event(point.event))
        view = View.parse("/timeline", search)
        links = []
        for what, table, row in (("it", card.table, card.row), *card.related):
            event = f"{table}-{row}"  # the script follows it without leaving the lane and op that are looked at
            href = view.href(**{"event": event, "from": None, "to": None})
            links.append(html.A(f"zoom to {what}", href=href, **{"data-event": event}))
        if card.op and len(card.op) < MOST_CHARACTERS // 2:  # else no address can hold it
            name = components.clean_text(card.op, 60)
            links.append(components.build_link(f"{name} in the op table", view.href("/ops", op=card.op)))
            links.append(html.A(f"mark all work of {name}", href=view.href(op=card.op), **{"data-op": card.op}))
        items = html.Ul([html.Li(link) for link in links], className="plain")
        return [html.H2(card.title), components.build_terms(card.lines), items]

    def search(self, asked: Any, search: str | None) -> dict[str, Any]:
        question = _parse_request(asked, Search)
        board = self._open_board(search)
        marked = board.next_marked(question.op, round(question.at_ns), question.direction)
        if marked is None:
            return {"event": None}
        event = f"{marked[0]}-{marked[1]}"
        from_ns, to_ns = find_surroundings(board, event)
        return {"event": event, "from": from_ns, "to": to_ns}


def _parse_request(value: Any, kind: type[_Request]) -> _Request:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InputError(f"the time line was asked something malformed: {error}", "load the page again") from None


def _describe_block(block: EventBlock) -> tuple[str, tuple[tuple[str, str], ...]]:
    length = block.end_ns - block.start_ns
    share = f" ({format_share(block.busy_ns / length)})" if length else ""
    names = tuple((name, f"{count:,} \u00d7, {format_ns(ns)}") for name, count, ns in block.names)
    return f"{block.events:,} events, zoom in", (("together", f"{format_ns(block.busy_ns)} of {format_ns(length)}{share}"), *names)


PAGE = Timeline()
