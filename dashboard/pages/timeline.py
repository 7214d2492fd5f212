"""The time line: lanes of streams and threads, drawn by assets/timeline.js from windows that the server sums up.

A canvas and not a plotly figure: with 2,000 bars plotly took 0.34 s for a frame while panning and with 12,000 bars 2 s, where the canvas
took 0.02 s and 0.08 s (headless Chromium, two busy cores).
"""

from __future__ import annotations

from typing import Any, TypeVar

import dash
import msgspec
from dash import ClientsideFunction, Input, Output, State, dcc, html
from dash.development.base_component import Component
from gpudiag_dashboard import parts
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.page import ADDRESS
from gpudiag_dashboard.timeline import Ask, Boards, Point, Search, answer, around, event_of
from gpudiag_dashboard.view import MOST_CHARACTERS, View

from gpudiag.api.lanes import Block, Card
from gpudiag.errors import InputError
from gpudiag.units import format_ns, format_share

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
    ("N P", "next or previous event of the row; Enter zooms to it, Esc lets go of it"),
    ("M, Shift and M", "next or previous work of the marked op"),
)

_Asked = TypeVar("_Asked", Ask, Point, Search)


class Timeline:
    """The page; its state (from, to, lane, op, event) lives in the address, which the script keeps up to date."""

    path, title, needs_bundle, needs_analysis = "/timeline", "Timeline", True, True

    def layout(self, view: View) -> Component:
        """Return the place for the drawing, the panel beside it, and the stores by which script and server talk."""
        panel = html.Aside(_nothing(), id=PANEL, **{"aria-label": "Chosen event", "aria-live": "polite"})
        return html.Div(
            [
                html.H1("Timeline"),
                html.Div([html.Div(id="timeline-root"), panel], className="timeline"),
                html.Details([html.Summary("Keys and mouse"), parts.terms(KEYS)], className="timeline-keys"),
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
        ask = _asked(asked, Ask)
        try:
            return answer(self._boards.of(*_looked_at(search)), ask)
        except InputError as error:
            return {"number": ask.number, "error": f"{error.message} ({error.hint})" if error.hint else error.message}

    def point(self, asked: Any, search: str | None) -> dict[str, Any]:
        """Return what is told of the piece under the pointer."""
        wanted = _asked(asked, Point)
        board = self._boards.of(*_looked_at(search))
        if wanted.event is not None:
            card = board.card(*event_of(wanted.event))
            return {"number": wanted.number, "title": card.title, "lines": card.lines}
        block = board.block(wanted.lane, wanted.row, wanted.first, wanted.count)
        return {"number": wanted.number, "title": _block_title(block), "lines": _block_lines(block)}

    def pick(self, asked: Any, search: str | None) -> list[Component]:
        """Return the panel about what was chosen."""
        if not asked:
            return _nothing()
        wanted = _asked(asked, Point)
        board = self._boards.of(*_looked_at(search))
        if wanted.event is not None:
            return _card(board.card(*event_of(wanted.event)), View.parse("/timeline", search))
        return _block(board.block(wanted.lane, wanted.row, wanted.first, wanted.count))

    def search(self, asked: Any, search: str | None) -> dict[str, Any]:
        """Return the next work of an op and the window in which it is seen."""
        wanted = _asked(asked, Search)
        board = self._boards.of(*_looked_at(search))
        found = board.next_marked(wanted.op, round(wanted.at_ns), wanted.direction)
        if found is None:
            return {"event": None}
        event = f"{found[0]}-{found[1]}"
        from_ns, to_ns = around(board, event)
        return {"event": event, "from": from_ns, "to": to_ns}


def _asked(value: Any, kind: type[_Asked]) -> _Asked:
    """Return what the script sent. Raises InputError where it cannot have sent it."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InputError(f"the time line was asked something malformed: {error}", "load the page again") from None


def _looked_at(search: str | None) -> tuple[str, int | None]:
    """Return the recording and the rank that the address names."""
    view = View.parse("/timeline", search)
    if view.bundle is None:
        raise InputError("no recording is chosen", "choose one of the list")
    return view.bundle, view.rank


def _nothing() -> list[Component]:
    return [html.H2("Chosen event"), parts.quiet("Click an event, or choose one with the arrow keys and N.")]


def _card(found: Card, view: View) -> list[Component]:
    """Return what is told of an event, with links to its op and to what belongs to it."""
    links = [_jump(f"zoom to {what}", f"{table}-{row}", view) for what, table, row in (("it", found.table, found.row), *found.related)]
    if found.op and len(found.op) < MOST_CHARACTERS // 2:  # else no address can hold it
        links.append(parts.link(f"{parts.text(found.op, 60)} in the op table", view.href("/ops", op=found.op)))
        links.append(html.A(f"mark all work of {parts.text(found.op, 60)}", href=view.href(op=found.op), **{"data-op": found.op}))
    return [html.H2(found.title), parts.terms(found.lines), html.Ul([html.Li(link) for link in links], className="plain")]


def _jump(label: str, event: str, view: View) -> Component:
    """Return a link to an event of this time line; the script follows it without leaving the lane and op that are looked at."""
    href = view.href(**{"event": event, "from": None, "to": None})
    return html.A(label, href=href, **{"data-event": event})


def _block(found: Block) -> list[Component]:
    said = "They are too short to be drawn one by one at this zoom."
    return [html.H2(_block_title(found)), parts.quiet(said), parts.terms(_block_lines(found))]


def _block_title(found: Block) -> str:
    return f"{found.events:,} events, zoom in"


def _block_lines(found: Block) -> tuple[tuple[str, str], ...]:
    length = found.end_ns - found.start_ns
    share = f" ({format_share(found.busy_ns / length)})" if length else ""
    names = tuple((name, f"{count:,} \u00d7, {format_ns(ns)}") for name, count, ns in found.names)
    return (("together", f"{format_ns(found.busy_ns)} of {format_ns(length)}{share}"), *names)


PAGE = Timeline()
