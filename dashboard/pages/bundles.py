"""The list of recordings: what is known of each, sorted and filtered, two of them to compare; it looks for new ones by itself."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import dash
from dash import Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component
from gpudiag_dashboard import components
from gpudiag_dashboard.components import View, build_choices, clean_text, name_status
from gpudiag_dashboard.digests import Digest
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.page import ADDRESS, build_filter, follow_filter

from gpudiag.recordings.folder import MOST_ENTRIES, Entry
from gpudiag.recordings.live import Pace
from gpudiag.report.blocks import Cell, Column, Row, Table, build_count_cell, build_row
from gpudiag.report.experiment import verdicts
from gpudiag.report.labels import pluralize
from gpudiag.units import format_bytes, format_ns, format_share

FIND, ANALYSE = "bundles-find", "bundles-analyse"
PICKS = ("first", "second")
"""Keys of the address for the two recordings that are to be compared, in the order in which they were chosen."""

ON_A_PAGE = 200
READING_S = 1.0
"""How long one look at the list may read what was kept of recordings."""

LEAST_SHOWN = 0.0005
"""A share below it would read 0.0 %."""

MOST_LIVE = 8
"""Runs whose pace is read while they record; more of them would push each other out of the library's memory."""

_KINDS = {"bundle": "", "trace": "a trace", "folder": "a folder of traces", "experiments": "experiments alone"}
_UNKNOWN, _NOT_YET = "not known", "not analysed yet"
_COLUMNS = (
    Column("recording"),
    Column("program"),
    Column("status"),
    Column("device"),
    Column("ranks", "number"),
    Column("steps", "number", "of the whole run, also those that were not profiled"),
    Column("step time", "number", "median: of the unprofiled steps where they were recorded, else of those that were analysed"),
    Column("MFU", "number", "model FLOPs utilisation of the analysed steps"),
    Column("top finding", "words", "the first finding, with the most that removing its cause can give"),
    Column("recorded", "number"),
    Column("size", "number"),
)


class Listed(NamedTuple):
    """One recording of the list."""

    entry: Entry
    digest: Digest | None
    waiting: bool
    """Whether it is to be analysed for the list."""
    pace: Pace | None = None
    """Of a run that is being recorded."""
    verdict: str = ""
    """Of experiments without a recording: on the first change, what is proved first."""

    @property
    def device(self) -> str:
        """Return the name of its device; '' where it is not known."""
        return (self.digest.device if self.digest else "") or self.entry.device or ""

    @property
    def status(self) -> str:
        """Return its status in a word or a few; '' for traces."""
        return name_status(self.entry.kind, self.entry.status)


class Bundles:
    """The first page. Query: sort (title of a column, '-' before it: from the largest), find, device, status, first, second, sheet."""

    path, title, needs_bundle, needs_analysis = "/", "Recordings", False, False

    def layout(self, view: View) -> Component:
        """Return the filter, which stays while the list is made anew, and the place of the list."""
        return html.Div(
            [
                dcc.Interval(id="bundles-clock", interval=3_000),
                dcc.Store(id="bundles-shown"),
                html.Div(id="bundles-title"),
                html.Div(
                    [build_filter(FIND, view), html.Button("", id=ANALYSE, className="button", style={"display": "none"})],
                    className="tools",
                ),
                html.Div(id="bundles-asked"),
                html.Div(id="bundles-list"),
            ]
        )

    def register(self, app: dash.Dash, library: Library) -> None:
        """Fill the list, every few seconds anew where anything has changed; follow filter and button."""

        @app.callback(
            Output("bundles-title", "children"), Output("bundles-list", "children"), Output(ANALYSE, "children"), Output(ANALYSE, "style"),
            Output("bundles-shown", "data"),
            Input("bundles-clock", "n_intervals"), Input(ADDRESS, "search"), Input("bundles-asked", "children"),
            State(ADDRESS, "pathname"), State("bundles-shown", "data"),
        )  # fmt: skip
        def fill(_: int | None, search: str | None, _asked: Any, pathname: str | None, shown: Any) -> tuple[Any, ...]:
            view = View.parse(pathname, search)
            if view.page != self.path:
                return (no_update,) * 5
            listed = list_recordings(library)
            now = zlib.crc32(repr((listed, sorted(view.query.items()))).encode("utf-8", "surrogatepass"))
            if shown == now:
                return (no_update,) * 5
            unknown = list_unknown(listed)
            button = (
                f"Analyse the {len(unknown):,} that were not analysed yet"
                if len(unknown) > 1
                else "Analyse the one that was not analysed yet"
            )
            style = {} if unknown else {"display": "none"}
            return build_title(library.folder.name), build_list(listed, view, library.folder.name), button, style, now

        self._follow(app, library)

    def _follow(self, app: dash.Dash, library: Library) -> None:
        follow_filter(app, self.path, FIND)

        @app.callback(Output("bundles-asked", "children"), Input(ANALYSE, "n_clicks"), prevent_initial_call=True)
        def analyse(clicks: int | None) -> object:
            if not clicks:
                return no_update
            library.analyse_all(one.entry.name for one in list_unknown(list_recordings(library)))
            return components.build_quiet("They are analysed one after the other; the list fills by itself.")


def list_recordings(library: Library) -> list[Listed]:
    """Return the recordings with what is known of them; of a thousand the figures come from disk over several calls."""
    until, listed, entries = time.monotonic() + READING_S, [], library.bundles()
    live = {entry.name for entry in [entry for entry in entries if entry.status == "live"][:MOST_LIVE]}
    for entry in entries:
        digest = library.digest(entry, load=time.monotonic() < until)
        pace = library.measure_pace(entry) if entry.name in live else None
        verdict = _read_verdict(library, entry) if entry.kind == "experiments" and time.monotonic() < until else ""
        listed.append(Listed(entry, digest, library.is_waiting(entry.name), pace, verdict))
    return listed


def _read_verdict(library: Library, entry: Entry) -> str:
    series, _ = library.trials(entry.name).read()
    measured, *_ = verdicts.group_outcomes([trial.outcome for one in series if one.ended for trial in one.trials])
    return clean_text(verdicts.format_outcome_sentence(measured[0]), 200) if measured else ""


def list_picks(view: View) -> list[str]:
    """Return the names of the recordings that are chosen to be compared, in the order of their choice."""
    return [name for name in map(view.query.get, PICKS) if name]


def list_unknown(listed: Sequence[Listed]) -> list[Listed]:
    """Return the recordings of which an analysis would tell more."""
    return [
        one for one in listed
        if one.digest is None and not one.waiting and one.entry.kind != "experiments" and one.entry.status in ("finished", "damaged")
    ]  # fmt: skip


def build_title(folder: str) -> Component:
    """Return the title of the page."""
    return html.H1(["Recordings ", html.Span(f"in {clean_text(folder, 120)}", className="quiet")])


def build_list(listed: Sequence[Listed], view: View, folder: str) -> list[Component]:
    """Return the choices and the table of the recordings that they leave."""
    if not listed:
        do = "Record a training into this folder, and it shows up here while it runs:"
        command = components.build_code(f"gpudiag run -o {clean_text(folder, 120)}/first train.py")
        return [components.build_empty("Nothing is recorded here yet", do, command)]
    rows = [(one, build_listed_row(one)) for one in listed]
    wanted, device, status = (view.query.get(key, "") for key in ("find", "device", "status"))
    if device:
        rows = [(one, row) for one, row in rows if one.device == device]
    if status:
        rows = [(one, row) for one, row in rows if one.status == status]
    if wanted:
        rows = [(one, row) for one, row in rows if wanted.lower() in _join_texts(row)]
    choices = _build_filters(listed, view)
    if not rows:
        return [
            *choices,
            components.build_empty("No recording matches", "Remove a filter.", components.build_link("All recordings", view.bare.href())),
        ]
    table = Table(_COLUMNS, tuple(row for _, row in rows), "Recordings, the newest first")
    ordered = components.sort_rows(table, view)
    places = {id(row): one for one, row in rows}
    shown, number, pages = components.choose_page(view, ordered.rows, ON_A_PAGE)
    picks = list_picks(view)
    boxes = [_build_box(places[id(row)].entry, picks, view) for row in shown]
    page = Table(_COLUMNS, tuple(shown), ordered.caption)
    made = components.build_table(
        page, view, sorts=components.list_sorts(table, view), lead=("compare", boxes), css="recordings", whole=True
    )
    return [*choices, *_build_comparison(listed, picks, view), made, *components.build_pager(view, number, pages), *_note_cut(listed)]


def _note_cut(listed: Sequence[Listed]) -> list[Component]:
    if len(listed) < MOST_ENTRIES:
        return []
    return [components.build_quiet(f"The first {MOST_ENTRIES:,} only; start the dashboard with a folder further down.")]


def build_listed_row(one: Listed) -> Row:
    """Return the row of one recording."""
    entry = one.entry
    page = {"live": "/telemetry"}.get(entry.status, "/overview") if entry.kind != "experiments" else "/experiments"
    link = ("href", View().href(page, bundle=entry.name)) if entry.status != "unreadable" else None
    name = Cell(entry.name if entry.name != "." else "this folder", None, (_KINDS[entry.kind], entry.note), link=link)
    device = one.device or (_UNKNOWN if entry.kind == "bundle" else "")
    step, mfu, finding = _build_figures(one)
    moment = components.format_moment(entry.created_unix_ns)
    known = entry.kind in ("bundle", "experiments")
    return build_row(
        name, entry.program, Cell(one.status, css=f"badge {entry.status}" if one.status else ""), device,
        build_count_cell(entry.ranks) if entry.ranks > 1 or entry.kind == "bundle" else Cell(""),
        build_count_cell(entry.steps) if entry.steps is not None else Cell(""),
        step, mfu, finding,
        Cell(moment if known else f"file: {moment}", entry.created_unix_ns),
        Cell(format_bytes(entry.size_bytes), entry.size_bytes),
    )  # fmt: skip


def _build_figures(one: Listed) -> tuple[Cell, Cell, Cell]:
    """Return step time, MFU and top finding: what is not known is said."""
    digest = one.digest
    if digest is None:
        said = "waits for its analysis" if one.waiting else _NOT_YET
        told = one.entry.kind != "experiments" and one.entry.status in ("finished", "damaged")
        if one.pace is not None:
            over = f"now: the last {one.pace.over:,} unprofiled {pluralize(one.pace.over, 'step')}"
            return Cell(format_ns(one.pace.step_ns), one.pace.step_ns, (over,)), Cell(""), Cell("")
        return Cell(""), Cell(""), Cell(said, tone="weak") if told else Cell(one.verdict)
    if digest.error:
        return Cell(""), Cell(""), Cell("cannot be analysed", None, (digest.error,))
    step = Cell("?" if digest.step_ns is None else format_ns(digest.step_ns), digest.step_ns, (digest.step_of,) if digest.step_ns else ())
    mfu = Cell("?" if digest.mfu is None else "<0.1 %" if digest.mfu < LEAST_SHOWN else format_share(digest.mfu, 1), digest.mfu)
    if not digest.finding:
        return step, mfu, Cell("none")
    bound = f"up to {format_share(digest.bound)} of the step" if digest.bound is not None else ""
    address = View().href("/findings", bundle=one.entry.name, rule=digest.rule)
    return step, mfu, Cell(digest.finding, digest.bound, (bound,), link=("href", address))


def _join_texts(row: Row) -> str:
    return "\n".join(text for cell in row.cells for text in (cell.text, *cell.details)).lower()


def _build_filters(listed: Sequence[Listed], view: View) -> list[Component]:
    made = []
    for name, key, values in (
        ("Device", "device", {one.device for one in listed if one.device}),
        (
            "Status",
            "status",
            {one.status for one in listed if one.status},
        ),
    ):
        if len(values) > 1:
            chosen = view.query.get(key, "")
            links = [("all", view.href(**{key: None}, sheet=None), not chosen)]
            links += [(value, view.href(**{key: value}, sheet=None), value == chosen) for value in sorted(values)[:12]]
            made.append(build_choices(name, links, mark_current=True))
    return made


def _build_box(entry: Entry, picks: Sequence[str], view: View) -> Component | None:
    """Return the check of one recording, a link to the list with and without it; None where it cannot be compared, or two are chosen."""
    on = entry.name in picks
    if entry.kind == "experiments" or entry.status in ("unreadable", "live") or (len(picks) >= len(PICKS) and not on):
        return None
    after = [name for name in picks if name != entry.name] if on else [*picks, entry.name]
    href = view.href(**dict(zip(PICKS, [*after, None, None][: len(PICKS)], strict=True)))
    name = clean_text(entry.name, 120)
    said = f"compare {name} no longer" if on else f"compare {name}"
    sign = html.Span("\N{BALLOT BOX WITH CHECK}" if on else "\N{BALLOT BOX}", **{"aria-hidden": "true"})
    return components.build_link([sign, html.Span(said, className="hidden")], href, css="pick", title=said)


def _build_comparison(listed: Sequence[Listed], picks: Sequence[str], view: View) -> list[Component]:
    """Return what to do with the recordings that are chosen: the older one is what the newer is compared with."""
    if not picks:
        return []
    none = components.build_link("Choose none", view.href(**dict.fromkeys(PICKS)))
    recorded = {one.entry.name: one.entry.created_unix_ns or 0 for one in listed}
    names = sorted(picks, key=lambda name: recorded.get(name, 0))
    if len(names) < len(PICKS):
        return [html.P([html.B(clean_text(names[0], 160)), " is chosen: check another one to compare them. ", none], className="picked")]
    older, newer = names
    link = components.build_link(
        ["Compare ", html.B(clean_text(older, 160)), " with ", html.B(clean_text(newer, 160))],
        View("/compare", older, newer).href(),
        css="button",
    )
    return [html.P([link, " ", none], className="picked")]


PAGE = Bundles()
