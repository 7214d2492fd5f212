"""The list of recordings, with what is known of each without opening it; it looks for new ones by itself."""

from __future__ import annotations

import dash
from dash import Input, Output, dcc, html
from dash.development.base_component import Component
from gpudiag_dashboard import components
from gpudiag_dashboard.components import STATUS_WORDS, View, clean_text
from gpudiag_dashboard.library import Library

from gpudiag.recordings.folder import MOST_ENTRIES, Entry
from gpudiag.report.blocks import Cell, Column, Row, Table, build_row
from gpudiag.units import format_bytes

_KINDS = {"bundle": "", "trace": "a trace", "folder": "a folder of traces"}
_UNKNOWN = "not known"


class Bundles:
    """The first page."""

    path, title, needs_bundle, needs_analysis = "/", "Recordings", False, False

    def layout(self, view: View) -> Component:
        """Return the place of the list."""
        return html.Div([dcc.Interval(id="bundles-clock", interval=3_000), html.Div(id="bundles-list")])

    def register(self, app: dash.Dash, library: Library) -> None:
        """Fill the list, every few seconds anew."""

        @app.callback(Output("bundles-list", "children"), Input("bundles-clock", "n_intervals"))
        def fill(_: int | None) -> list[Component]:
            return build_content(library.bundles(), library.folder.name)


def build_content(entries: tuple[Entry, ...], folder: str) -> list[Component]:
    """Return the list of `entries` with its title."""
    title = html.H1(["Recordings ", html.Span(f"in {clean_text(folder, 120)}", className="quiet")])
    if not entries:
        do = "Record a training into this folder, and it shows up here while it runs:"
        command = components.build_code(f"gpudiag run -o {clean_text(folder, 120)}/first train.py")
        return [title, components.build_empty("Nothing is recorded here yet", do, command)]
    columns = (
        Column("recording"),
        Column("status"),
        Column("steps", "number", "of the whole run, also those that were not profiled"),
        Column("device"),
        Column("recorded"),
        Column("size", "number"),
    )
    rows: list[Row] = []
    for entry in entries:
        several = f"{entry.ranks} ranks" if entry.ranks > 1 else ""
        readable = entry.status != "unreadable"
        page = "/telemetry" if entry.status == "live" else "/overview"
        link = ("href", View().href(page, bundle=entry.name)) if readable else None
        name = Cell(entry.name if entry.name != "." else "this folder", None, (_KINDS[entry.kind], several, entry.note), link=link)
        badged = entry.kind == "bundle" or not readable
        status = Cell(STATUS_WORDS.get(entry.status, entry.status) if badged else "", css=f"badge {entry.status}" if badged else "")
        steps = f"{entry.steps:,}" if entry.steps is not None else ""
        device = entry.device or (_UNKNOWN if entry.kind == "bundle" else "")
        rows.append(build_row(name, status, steps, device, components.format_moment(entry.created_unix_ns), format_bytes(entry.size_bytes)))
    shown = [title, components.build_table(Table(columns, tuple(rows), "Recordings, the newest first"), View())]
    if len(entries) >= MOST_ENTRIES:
        shown.append(components.build_quiet(f"The first {MOST_ENTRIES:,} only; start the dashboard with a folder further down."))
    return shown


PAGE = Bundles()
