"""The time line: lanes drawn by assets/timeline.js, what the page asks, and the columns of the answers.

A canvas and not a plotly figure: with 2,000 bars plotly took 0.34 s for a frame while panning and with 12,000 bars 2 s, where the canvas
took 0.02 s and 0.08 s (headless Chromium, two busy cores).
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from concurrent import futures
from functools import partial
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
from gpudiag.report.lane_sums import TableSum
from gpudiag.report.lanes import LANE_TABLES, STYLES, EventArrow, EventBlock, EventPlace, LaneBoard, LaneRow, Wanted
from gpudiag.units import format_ns, format_share

LEAST_NS = 100

WAIT_S = 0.1
"""How long the first question waits for the lanes of a recording; the page then asks again."""

AROUND = 12
"""An event that is looked for is shown in a window of so many times its length."""

_FAR_NS = 2**62
_ENDS = ("its forward op", "its backward op")
_MOST_ENDS = 6


class Ask(msgspec.Struct, frozen=True):
    """A window that the page wants to draw; without a window the whole recording, or the surroundings of `event`."""

    number: int
    pixels: int
    from_ns: float | None = None
    to_ns: float | None = None
    rows: list[tuple[int, int]] | None = None
    """(lane, row) of what is in sight; None: the first ones."""
    op: str | None = None
    find: str | None = None
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


class Area(msgspec.Struct, frozen=True):
    """What was dragged over: a time and (lane, row) of the rows."""

    number: int
    from_ns: float
    to_ns: float
    rows: list[tuple[int, int]]


class Found(msgspec.Struct, frozen=True):
    """All events whose name holds a text."""

    number: int
    find: str


class Search(msgspec.Struct, frozen=True):
    """The next work of an op, or the next event whose name holds a text, seen from a moment."""

    at_ns: float
    direction: Literal[-1, 1]
    op: str | None = None
    find: str | None = None


def parse_event(text: str) -> tuple[str, int]:
    """Return (table, row) of an event's name such as 'kernels-12'. Raises InputError for another text."""
    table, _, digits = text.partition("-")
    if table not in LANE_TABLES or not (digits.isascii() and digits.isdigit() and len(digits) < 16):
        raise InputError(f"{text[:40]!r} names no event", "an event is named like kernels-12")
    return table, int(digits)


def build_answer(board: LaneBoard, ask: Ask) -> dict[str, Any]:
    """Return what the page draws. Raises InputError for an event that is not there."""
    if ask.event is not None:
        from_ns, to_ns = find_surroundings(board, ask.event)
    elif ask.from_ns is None or ask.to_ns is None:
        from_ns, to_ns = board.from_ns, board.to_ns
    else:
        from_ns, to_ns = _round_window(ask.from_ns, ask.to_ns)
    to_ns = max(to_ns, from_ns + LEAST_NS)
    # Two screens of 8,000 pixels: beside the window itself the page asks for half of it on either side
    pixels = min(max(1, ask.pixels), 16_000)
    drawing = board.draw(from_ns, to_ns, pixels, ask.rows, wanted=Wanted(ask.op or "", ask.find or ""))
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
    if ask.event is not None:
        answer["place"] = _list_place(board.find_place(*parse_event(ask.event)))
    if ask.setup:  # what does not change with the window
        strip = board.strip(1_000)  # resolution of the whole recording in small; it is stretched to the page
        answer["setup"] = {
            "from": board.from_ns,
            "to": max(board.to_ns, board.from_ns + LEAST_NS),
            "lanes": [{"key": title.key, "title": title.title, "note": title.note, "levels": title.levels} for title in board.titles],
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


def _round_window(from_ns: float, to_ns: float) -> tuple[int, int]:
    low, high = (round(min(max(value, -_FAR_NS), _FAR_NS)) for value in (from_ns, to_ns))
    return low, high


def _list_place(place: EventPlace | None) -> list[int] | None:
    """Return lane, row, start and end of an event as the page reads them."""
    return None if place is None else list(place)


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
PICK, PANEL, ARROWS = "timeline-pick", "timeline-panel", "timeline-arrows"
SEARCH, FOUND = "timeline-search", "timeline-found"

KEYS = (
    ("W S, or Ctrl and wheel", "zoom in and out, at the pointer"),
    ("A D, or Shift and wheel", "move left and right; the wheel alone scrolls through the lanes"),
    ("drag", "choose an area: its time by name and bound; over the ruler of all lanes"),
    ("Shift and drag", "move; over the strip at the top the window goes there"),
    ("click on an event", "what it is, with its launch and its backward op; a double click, F or Enter zooms to it, Esc deselects it"),
    ("click on the name of a lane", "fold it to one level, or unfold it"),
    ("/", "search by name; M or Enter goes to the next one, Shift and M or Enter to the one before"),
    ("\u2190 \u2192 + \u2212 0", "move, zoom, show the whole recording"),
    ("\u2191 \u2193 N P", "choose a row; the next or previous event of it"),
)

_NOTHING_CHOSEN = [
    html.H2("Nothing chosen"),
    components.build_quiet("Click an event, drag over an area to sum it up, or search by name."),
    html.Div(components.build_terms(KEYS), className="timeline-keys"),
]

_Request = TypeVar("_Request", Ask, Point, Area, Found, Search)


class Timeline:
    """The page; its state (from, to, lane, op, find, event, area) lives in the address, which the script keeps up to date."""

    path, title, needs_bundle, needs_analysis = "/timeline", "Timeline", True, True

    def layout(self, view: View) -> Component:
        """Return the place for the drawing, the panel below it, and the stores by which script and server talk."""
        panel = html.Section(_NOTHING_CHOSEN, id=PANEL, tabIndex=0, **{"aria-label": "What is chosen", "aria-live": "polite"})
        stores = (dcc.Store(id=store) for store in (ASK, GOT, POINT, POINTED, PICK, ARROWS, SEARCH, FOUND))
        return html.Div([html.H1("Timeline", className="hidden"), html.Div(id="timeline-root"), panel, *stores], className="timeline")

    def register(self, app: dash.Dash, library: Library) -> None:
        """Register the callbacks: those that the server answers, and the script's own."""
        answers = _Answers(library)
        search = State(ADDRESS, "search")
        for asked, answer, act in (
            (ASK, Output(GOT, "data"), answers.draw),
            (POINT, Output(POINTED, "data"), answers.point),
            (SEARCH, Output(FOUND, "data"), answers.search),
        ):
            app.callback(answer, Input(asked, "data"), search, prevent_initial_call=True)(act)
        both = (Output(PANEL, "children"), Output(ARROWS, "data"))
        app.callback(*both, Input(PICK, "data"), search, prevent_initial_call=True)(answers.pick)
        for name, heard in (("address", ADDRESS), ("got", GOT), ("pointed", POINTED), ("arrows", ARROWS), ("found", FOUND)):
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
        self._boards: RecentCache[futures.Future[LaneBoard]] = RecentCache(4)
        self._makers = futures.ThreadPoolExecutor(1, "lanes")

    def _open_board(self, search: str | None, wait_s: float | None = None) -> LaneBoard:
        """Return the lanes of a recording. Raises TimeoutError where it takes longer than `wait_s` to arrange those of a large one."""
        view = View.parse("/timeline", search)
        if view.bundle is None:
            raise InputError("no recording is chosen", "choose one of the list")
        opened = self._library.opened(view.bundle, view.rank)
        arrange = partial(self._makers.submit, LaneBoard, opened.analysis, opened.report)
        return self._boards.get((view.bundle, view.rank), arrange, opened).result(wait_s)

    def draw(self, asked: Any, search: str | None) -> dict[str, Any]:
        ask = _parse_request(asked, Ask)
        try:
            return build_answer(self._open_board(search, WAIT_S), ask)
        except futures.TimeoutError:
            return {"number": ask.number, "wait": True}
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

    def pick(self, asked: Any, search: str | None) -> tuple[list[Component], dict[str, Any] | None]:
        if not isinstance(asked, dict):
            return _NOTHING_CHOSEN, None
        board = self._open_board(search)
        if "rows" in asked:
            return _describe_area(board, _parse_request(asked, Area), View.parse("/timeline", search)), None
        if "find" in asked:
            return _describe_found(board, _parse_request(asked, Found), View.parse("/timeline", search)), None
        point = _parse_request(asked, Point)
        if point.event is None:
            title, lines = _describe_block(board.block(point.lane, point.row, point.first, point.count))
            note = components.build_quiet("They are too short to be drawn one by one at this zoom.")
            return [html.H2(title), note, components.build_terms(lines)], None
        table, row = parse_event(point.event)
        arrows = board.find_arrows(table, row)
        drawn = [{"kind": arrow.link.kind, "source": list(arrow.source), "target": list(arrow.target)} for arrow in arrows]
        place = _list_place(board.find_place(table, row))
        panel = _describe_event(board, table, row, arrows, View.parse("/timeline", search))
        return panel, {"number": point.number, "place": place, "arrows": drawn}

    def search(self, asked: Any, search: str | None) -> dict[str, Any]:
        question = _parse_request(asked, Search)
        board = self._open_board(search)
        marked = board.next_marked(Wanted(question.op or "", question.find or ""), round(question.at_ns), question.direction)
        if marked is None:
            return {"event": None}
        event = f"{marked[0]}-{marked[1]}"
        from_ns, to_ns = find_surroundings(board, event)
        return {"event": event, "from": from_ns, "to": to_ns, "place": _list_place(board.find_place(*marked))}


def _describe_event(board: LaneBoard, table: str, row: int, arrows: Sequence[EventArrow], view: View) -> list[Component]:
    """Return what is told of one event, with links to what belongs to it."""
    card = board.card(table, row)
    related = [("it", table, row), *card.related]
    ends = [end for arrow in arrows if arrow.link.kind == "backward" for end in zip(_ENDS, arrow.link[1:], strict=True)]
    others = {event: what for what, event in ends if event != (table, row)}
    related += [(f"{what}, {board.card(*event).title}", *event) for event, what in list(others.items())[:_MOST_ENDS]]
    links = []
    for what, other, number in related:
        links.append(html.A(f"zoom to {what}", href=components.find_address(("event", f"{other}-{number}"), view)))
    if card.op and len(card.op) < MOST_CHARACTERS // 2:  # else no address can hold it
        name = components.clean_text(card.op, 60)
        links.append(components.build_link(f"{name} in the op table", view.href("/ops", op=card.op)))
        links.append(html.A(f"mark all work of {name}", href=view.href(op=card.op), **{"data-op": card.op}))
    items = html.Ul([html.Li(link) for link in links], className="plain")
    return [html.H2(card.title), html.Div([components.build_terms(card.lines), items], className="timeline-card")]


def _describe_area(board: LaneBoard, area: Area, view: View) -> list[Component]:
    """Return the time of an area by name and bound."""
    from_ns, to_ns = _round_window(*sorted((area.from_ns, area.to_ns)))
    sums = board.sum_area(from_ns, to_ns, area.rows)
    where = f"{format_ns(to_ns - from_ns)} chosen, from {format_ns(from_ns)} on"
    return [html.H2(where), *_build_sums(board, sums, view, to_ns - from_ns)]


def _describe_found(board: LaneBoard, found: Found, view: View) -> list[Component]:
    """Return how often and how long the events ran whose name holds a text."""
    title = f"Names that hold \u201c{components.clean_text(found.find, 60)}\u201d"
    return [html.H2(title), *_build_sums(board, board.sum_found(Wanted(text=found.find)) if found.find else (), view)]


def _build_sums(board: LaneBoard, sums: Sequence[TableSum], view: View, span_ns: int | None = None) -> list[Component]:
    if not sums:
        return [components.build_quiet("No event here.")]
    return components.build_blocks(board.build_blocks(sums, span_ns), view)


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
