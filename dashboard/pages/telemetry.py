"""Step times, clocks, power, temperature, load and memory over the run; live while it records."""

from __future__ import annotations

import time
from typing import Any

import dash
from dash import Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component
from gpudiag_dashboard import components, telemetry_figure
from gpudiag_dashboard.components import View, build_choices
from gpudiag_dashboard.library import Library, Recordings
from gpudiag_dashboard.page import ADDRESS

from gpudiag.api.live_recording import GrowingRecording, RecordedSoFar, RunSummary, measure_silence_s
from gpudiag.api.telemetry_chart import AxisKind
from gpudiag.report import whole_run
from gpudiag.report.labels import pluralize

LIVE_MS, SILENT_MS = 2_000, 15_000
"""How often a run that records is looked at, and one that has fallen silent."""

MOST_RANKS = 32

_KINDS: dict[AxisKind, str] = {"step": "by step", "time": "by time"}
_NOTHING = components.build_empty(
    "Nothing was sampled yet",
    "A run writes its first samples and steps after about ten seconds. Where this stays empty, telemetry was off (telemetry_hz=0).",
)
_NO_BUNDLE = components.build_empty(
    "A trace holds no telemetry",
    "Only a recording made by gpudiag samples clocks, power and memory beside the training:",
    components.build_code("gpudiag run train.py"),
)


class TelemetryPage:
    """The strips; they follow a run until its recording is finished."""

    path, title, needs_bundle, needs_analysis = "/telemetry", "Telemetry", True, False

    def layout(self, view: View) -> Component:
        """Return the places that the callback fills."""
        # The place of the strips, hidden until there are any. It shows no sign of loading: it is filled anew every few seconds
        label = "Step times and samples over the run; the same figures stand in the table below"
        graph = components.build_figure("telemetry-strips", {"data": [], "layout": {}}, label)
        return html.Div(
            [
                html.H1("Telemetry"),
                dcc.Store(id="telemetry-shown"),
                dcc.Interval(id="telemetry-clock", interval=LIVE_MS),
                html.Div(components.build_quiet("Reading ..."), id="telemetry-state"),
                html.Div([graph, html.Div(id="telemetry-notes")], id="telemetry-box", style={"display": "none"}),
                html.Div(id="telemetry-words"),
            ],
        )

    def register(self, app: dash.Dash, library: Library) -> None:
        """Register the one callback of the page."""
        recordings = Recordings(library)

        @app.callback(
            Output("telemetry-state", "children"), Output("telemetry-strips", "figure"), Output("telemetry-box", "style"),
            Output("telemetry-notes", "children"), Output("telemetry-words", "children"), Output("telemetry-shown", "data"),
            Output("telemetry-clock", "disabled"), Output("telemetry-clock", "interval"),
            Input("telemetry-clock", "n_intervals"), Input(ADDRESS, "search"),
            State(ADDRESS, "pathname"), State("telemetry-shown", "data"),
        )  # fmt: skip
        def follow(_: int | None, search: str | None, pathname: str | None, shown: Any) -> tuple[Any, ...]:
            view = View.parse(pathname, search)
            if view.page != self.path or view.bundle is None:
                return (no_update,) * 8
            if library.entry(view.bundle).kind != "bundle":
                return ("", no_update, {"display": "none"}, "", _NO_BUNDLE, None, True, LIVE_MS)
            return _follow_run(view, recordings.growing(view.bundle, view.rank), shown)


def _follow_run(view: View, growing: GrowingRecording, shown: Any) -> tuple[Any, ...]:
    """Return the values of the outputs; only the state where nothing was written since."""
    now = growing.read()
    kind: AxisKind = "time" if view.query.get("axis") == "time" or now.steps.is_empty() else "step"
    silent = measure_silence_s(now, time.time_ns())
    state = _build_state(now, silent, view, kind)
    clock = (now.manifest.finished, LIVE_MS if silent is None else SILENT_MS)
    drawn = [view.bundle, growing.rank, kind, now.version]
    if shown == drawn:
        return (state, *(no_update,) * 5, *clock)
    told = growing.summarise()
    made = telemetry_figure.draw_strips(now, kind, told.telemetry.limits if told.telemetry else {})
    words = _build_words(told, now)
    if made.figure is None:
        return (state, no_update, {"display": "none"}, "", [_NOTHING, *words], drawn, *clock)
    return (state, made.figure, {}, [components.build_quiet(note) for note in made.notes], words, drawn, *clock)


# -- what is said -----------------------------------------------------------------------------------------------------------


def _build_state(now: RecordedSoFar, silent: float | None, view: View, kind: AxisKind) -> list[Component]:
    steps = (
        f"{now.steps.height:,} {pluralize(now.steps.height, 'step')}, {now.telemetry.height:,} {pluralize(now.telemetry.height, 'sample')}"
    )
    if now.manifest.finished:
        line = [components.build_status_badge("finished"), f" {steps}."]
    elif silent is None:
        ago_s = max(0.0, time.time() - now.changed_unix_ns / 1e9)
        said = f" {steps} so far; the last were written {_format_seconds(ago_s)} ago. This page follows."
        line = [components.build_status_badge("live"), said]
    else:
        line = [
            components.build_status_badge("damaged"),
            f" {steps}; nothing was written for {_format_seconds(silent)}: the run was killed, or is in a very long step.",
        ]
    links = (
        [build_choices("Axis", [(label, view.href(axis=value), value == kind) for value, label in _KINDS.items()])]
        if now.steps.height
        else []
    )
    return [html.P(line), *links, *_build_rank_choices(now, view)]


def _build_rank_choices(now: RecordedSoFar, view: View) -> list[Component]:
    """Return the ranks to choose from, where there are several."""
    if len(now.ranks) < 2:
        return []
    chosen = now.ranks[0] if view.rank is None else view.rank
    return [build_choices("Rank", [(str(rank), view.href(rank=rank), rank == chosen) for rank in now.ranks[:MOST_RANKS]])]


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 6_000 else f"{seconds / 3600:.1f} h"


def _build_words(told: RunSummary, now: RecordedSoFar) -> list[Component]:
    """Return what the strips come to: the pace of the run, energy and clocks, the ranges of all columns, what is not known and why."""
    made: list[Component] = []
    lines = [] if told.history is None else whole_run.list_history(told.history)
    if lines:
        made.append(components.build_card(whole_run.WHOLE_RUN_TITLE, *(html.P(components.clean_text(line)) for line in lines)))
    found = told.telemetry
    if found is not None:
        said = [(topic, components.clean_text(text)) for topic, text in whole_run.list_telemetry(found, told.energy)]
        rows = [list(row) for row in whole_run.build_telemetry_rows(found)]
        columns = [components.Column("sampled"), *(components.Column(title, numeric=True) for title in ("lowest", "median", "highest"))]
        inside = [components.build_terms(said)] if said else []
        inside += (
            [components.build_table(columns, rows, "Lowest, median and highest value of what was sampled during the steps", css="few")]
            if rows
            else []
        )
        if inside:
            made.append(components.build_card("Clocks, power and load", *inside))
        made += _build_missing(found.missing)
    return made + [components.build_quiet(components.clean_text(warning)) for warning in now.warnings]


def _build_missing(missing: dict[str, str]) -> list[Component]:
    """Return what was not sampled, and why, in NVML's words."""
    if not missing:
        return []
    by_reason: dict[str, list[str]] = {}
    for column, why in missing.items():
        by_reason.setdefault(why, []).append(whole_run.TELEMETRY_LABELS.get(column, column))
    rows = [(components.clean_text(why, 300), ", ".join(names)) for why, names in by_reason.items()]
    return [html.Details([html.Summary(f"Not sampled: {len(missing)} {pluralize(len(missing), 'column')}"), components.build_terms(rows)])]


PAGE = TelemetryPage()
