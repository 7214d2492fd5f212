"""From the address to the page: which one is shown, the head above it, and what stands there while a recording is analysed."""

from __future__ import annotations

from typing import Any

import dash
from dash import ClientsideFunction, Input, Output, State, ctx, html, no_update
from dash.development.base_component import Component
from gpudiag_dashboard import parts
from gpudiag_dashboard.library import Library, Progress
from gpudiag_dashboard.page import ADDRESS, Page
from gpudiag_dashboard.pages import PAGES
from gpudiag_dashboard.view import View

from gpudiag.errors import GpudiagError, InputError, nearest

SHOWN, POLL, HEAD, MAIN, ALERT = "shown", "poll", "head", "main", "alert"
"""Ids of the frame: what is shown, the clock while a recording is analysed, head, page, and the line about a failure."""

POLL_MS = 500

WHOLE = ("/ranks", "/experiments")
"""Pages about all ranks, whichever is looked at on the others."""

_OPENING = "opening"


def register(app: dash.Dash, library: Library) -> None:
    """Register the callbacks of the frame."""

    @app.callback(
        Output(MAIN, "children"), Output(HEAD, "children"), Output(POLL, "disabled"), Output(SHOWN, "data"), Output(ALERT, "children"),
        Input(ADDRESS, "pathname"), Input(ADDRESS, "search"), Input(POLL, "n_intervals"), State(SHOWN, "data"),
    )  # fmt: skip
    def route(pathname: str | None, search: str | None, _: int | None, told_before: Any) -> tuple[Any, ...]:
        shown = told_before if isinstance(told_before, dict) else None
        view = View.parse(pathname, search)
        page = next((page for page in PAGES if page.path == view.page), None)
        key = [view.page, view.bundle, view.other, view.rank]
        state = (shown or {}).get("state")
        if (shown or {}).get("key") == key and state != _OPENING:
            return no_update, head(view, page, library), True, no_update, no_update
        waiting, content = _content(view, page, library)
        again = waiting and state == _OPENING and ctx.triggered_id == POLL  # the head has not changed since half a second ago
        told = {"key": key, "state": _OPENING if waiting else "shown", "title": _title(view, page), "moved": shown is not None}
        return content, no_update if again else head(view, page, library), not waiting, told, ""

    app.clientside_callback(ClientsideFunction("gpudiag", "arrived"), Output(SHOWN, "id"), Input(SHOWN, "data"), prevent_initial_call=True)


def failure(error: Exception) -> Component:
    """Return the line about a callback that failed: what the error says where it is one of ours, else its kind alone."""
    if isinstance(error, GpudiagError):
        return parts.error(error.message, error.hint or "")
    return parts.error(f"internal error ({type(error).__name__})", "this is a bug; the terminal of gpudiag dashboard shows more")


def _title(view: View, page: Page | None) -> str:
    name = page.title if page else "not found"
    return f"{name} - {parts.text(view.bundle, 80)} - gpudiag" if view.bundle else f"{name} - gpudiag"


def _content(view: View, page: Page | None, library: Library) -> tuple[bool, Component]:
    """Return (whether it is still analysed, what stands in the page)."""
    if page is None:
        known = [page.path for page in PAGES]
        return False, _missing(f"no page is named {view.page[:100]!r}{nearest(view.page, known)}")
    try:
        if page.needs_bundle and view.bundle is None:
            return False, parts.empty("No recording is chosen", "Choose one of the list.", parts.link("To the list", "/"))
        waiting = _waiting(view, page, library) if page.needs_bundle else None
        return waiting or (False, page.layout(view))
    except InputError as error:
        return False, _missing(error.message, error.hint or "")


def _missing(message: str, hint: str = "") -> Component:
    return html.Section([html.H1("Not found"), parts.error(message, hint), parts.link("To the list of recordings", "/")])


def _waiting(view: View, page: Page, library: Library) -> tuple[bool, Component] | None:
    """Return what stands in the page while a recording that it needs is not analysed, and whether it may be soon; None where all are.

    Raises InputError where the library holds no such recording.
    """
    names = [name for name in (view.bundle, view.other if page.path == "/compare" else None) if name is not None]
    for name in names:
        entry = library.entry(name)
        if not page.needs_analysis:
            continue
        found = library.progress(name, view.rank if name == view.bundle and page.path not in WHOLE else None)
        if found.state == "failed":
            live = entry.status == "live"  # its first window may come any moment
            return live, _not_yet(view, found.error) if live else _unreadable(name, found.error)
        if found.state == "running":
            return True, _running(name, found)
    return None


def _running(name: str, found: Progress) -> Component:
    said = html.P(f"{found.doing} ... {found.seconds:.0f} s", role="status")
    return html.Section([html.H1(f"Analysing {parts.text(name, 120)}"), said, html.Div(className="running")], className="empty")


def _not_yet(view: View, why: str) -> Component:
    link = parts.link("Watch it: telemetry", view.href("/telemetry"))
    title = "This run has recorded no window yet"
    return html.Section(
        [html.H1(title), html.P("This page appears by itself as soon as it has."), link, parts.quiet(parts.text(why))], className="empty"
    )


def _unreadable(name: str, why: str) -> Component:
    back = parts.link("To the list of recordings", "/")
    return html.Section([html.H1(f"{parts.text(name, 120)} cannot be analysed"), parts.error(why), back])


def head(view: View, page: Page | None, library: Library) -> list[Component]:
    """Return the head of the page: the tool, the recording with its status, and the pages about it."""
    inside = [parts.link("gpudiag", "/", css="brand")]
    if view.bundle is None:
        return [html.Div(inside, className="top")]
    name = next((entry for entry in library.bundles() if entry.name == view.bundle), None)
    inside += [html.Span(parts.text(view.bundle, 160), className="where"), *([parts.status_badge(name.status)] if name else [])]
    if name is None:
        return [html.Div(inside, className="top")]
    inside += _rank(view) if name.ranks > 1 and view.page not in WHOLE else []
    links = [_tab(other, view, page) for other in PAGES if other.needs_bundle]
    return [html.Div(inside, className="top"), html.Nav(links, **{"aria-label": "Pages about this recording"})]


def _rank(view: View) -> list[parts.Child]:
    """Return which rank alone is looked at, with the way back to all of them."""
    if view.rank is None:
        return []
    return [html.Span(f"rank {view.rank} alone", className="where"), parts.link("All ranks", view.href(rank=None))]


def _tab(other: Page, view: View, page: Page | None) -> Component:
    current = other is page
    href = view.bare.href() if current else view.href(other.path)
    label: list[parts.Child] = [other.title, *([html.Span(" (this page)", className="hidden")] if current else [])]
    return html.Span(parts.link(label, href), className="to on" if current else "to")
