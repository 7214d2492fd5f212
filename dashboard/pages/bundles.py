"""The list of recordings, with what is known of each without opening it; it looks for new ones by itself."""

from __future__ import annotations

import dash
from dash import Input, Output, dcc, html
from dash.development.base_component import Component
from gpudiag_dashboard import components
from gpudiag_dashboard.components import Cell, Child, Column, View, clean_text
from gpudiag_dashboard.library import Library

from gpudiag.recordings.folder import MOST_ENTRIES, Entry
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
    columns = [
        Column("recording"),
        Column("status"),
        Column("steps", True, "of the whole run, also those that were not profiled"),
        Column("device"),
        Column("recorded"),
        Column("size", True),
    ]
    rows: list[list[Cell | Child]] = []
    for entry in entries:
        several = f"{entry.ranks} ranks" if entry.ranks > 1 else ""
        details = tuple(text for text in (_KINDS[entry.kind], several, clean_text(entry.note, 300)) if text)
        readable = entry.status != "unreadable"
        page = "/telemetry" if entry.status == "live" else "/overview"
        href = View().href(page, bundle=entry.name) if readable else ""
        name = clean_text(entry.name if entry.name != "." else "this folder", 200)
        rows.append(
            [
                Cell(name, details, href),
                components.build_status_badge(entry.status) if entry.kind == "bundle" or not readable else "",
                f"{entry.steps:,}" if entry.steps is not None else "",
                clean_text(entry.device, 80) if entry.device else (_UNKNOWN if entry.kind == "bundle" else ""),
                components.format_moment(entry.created_unix_ns),
                format_bytes(entry.size_bytes),
            ]
        )
    shown = [title, components.build_table(columns, rows, "Recordings, the newest first")]
    if len(entries) >= MOST_ENTRIES:
        shown.append(components.build_quiet(f"The first {MOST_ENTRIES:,} only; start the dashboard with a folder further down."))
    return shown


PAGE = Bundles()
