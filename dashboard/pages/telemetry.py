"""Step times, clocks, power, temperature, load and memory over the run; live while it records."""

from __future__ import annotations

import time
from typing import Any

import dash
from dash import Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component
from gpudiag_dashboard import components, telemetry_figure
from gpudiag_dashboard.components import View, build_choices, clean_text
from gpudiag_dashboard.library import MOST_READERS, Library, RecentCache
from gpudiag_dashboard.page import ADDRESS
from gpudiag_dashboard.telemetry_figure import StripFigure

from gpudiag.recordings.live import RecordedSoFar, RunSummary, measure_silence_s
from gpudiag.report import telemetry as sampled
from gpudiag.report import whole_run
from gpudiag.report.labels import pluralize
from gpudiag.report.telemetry_chart import AxisKind

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
                html.Div(
                    [html.Div(id="telemetry-key"), graph, html.Div(id="telemetry-notes")], id="telemetry-box", style={"display": "none"}
                ),
                html.Div(id="telemetry-words"),
            ],
        )

    def register(self, app: dash.Dash, library: Library) -> None:
        """Register the one callback of the page."""
        known: RecentCache[tuple[StripFigure, list[Component]]] = RecentCache(MOST_READERS)

        @app.callback(
            Output("telemetry-state", "children"), Output("telemetry-strips", "figure"), Output("telemetry-strips", "style"),
            Output("telemetry-box", "style"), Output("telemetry-key", "children"), Output("telemetry-notes", "children"),
            Output("telemetry-words", "children"), Output("telemetry-shown", "data"),
            Output("telemetry-clock", "disabled"), Output("telemetry-clock", "interval"),
            Input("telemetry-clock", "n_intervals"), Input(ADDRESS, "search"),
            State(ADDRESS, "pathname"), State("telemetry-shown", "data"),
        )  # fmt: skip
        def follow(_: int | None, search: str | None, pathname: str | None, shown: Any) -> tuple[Any, ...]:
            view = View.parse(pathname, search)
            if view.page != self.path or view.bundle is None:
                return (no_update,) * 10
            if library.entry(view.bundle).kind != "bundle":
                return ("", no_update, no_update, {"display": "none"}, "", "", _NO_BUNDLE, None, True, LIVE_MS)
            growing = library.growing(view.bundle, view.rank)
            now = growing.read()
            kind: AxisKind = "time" if view.query.get("axis") == "time" or now.steps.is_empty() else "step"
            silent_s = measure_silence_s(now, time.time_ns())
            state = _build_state(now, silent_s, view, kind)
            clock = (now.manifest.finished, LIVE_MS if silent_s is None else SILENT_MS)
            key = (view.bundle, growing.rank, kind)
            drawn = [*key, now.version]
            if shown == drawn:  # nothing was written since
                return (state, *(no_update,) * 7, *clock)
            made = (now.manifest, now.steps, now.telemetry, now.marks)  # the same objects until more is written
            strips, words = known.get(key, lambda: _draw(growing.summarise(), now, kind), *made)
            if strips.figure is None:
                return (state, no_update, no_update, {"display": "none"}, "", "", [_NOTHING, *words], drawn, *clock)
            colours, notes = components.build_key(strips.key), [components.build_quiet(note) for note in strips.notes]
            return (state, strips.figure, components.measure_figure(strips.height), {}, colours, notes, words, drawn, *clock)


def _draw(summary: RunSummary, now: RecordedSoFar, kind: AxisKind) -> tuple[StripFigure, list[Component]]:
    limits = summary.telemetry.limits if summary.telemetry else {}
    return telemetry_figure.draw_strips(now, kind, limits), _build_words(summary, now)


def _build_state(now: RecordedSoFar, silent_s: float | None, view: View, kind: AxisKind) -> list[Component]:
    count, samples = now.steps.height, now.telemetry.height
    recorded = f" {count:,} {pluralize(count, 'step')}, {samples:,} {pluralize(samples, 'sample')}"
    if now.manifest.finished:
        status, line = "finished", f"{recorded}."
    elif silent_s is None:
        ago = _format_seconds(max(0.0, time.time() - now.changed_unix_ns / 1e9))
        status, line = "live", f"{recorded} so far; the last were written {ago} ago. This page follows."
    else:
        silence = f"nothing was written for {_format_seconds(silent_s)}: the run was killed, or is in a very long step."
        status, line = "damaged", f"{recorded}; {silence}"
    inside = [html.P([components.build_status_badge(status), line])]
    if count:
        axes = [(label, view.href(axis=value), value == kind) for value, label in _KINDS.items()]
        inside.append(build_choices("Axis", axes, mark_current=True))
    if len(now.ranks) > 1:
        chosen = now.ranks[0] if view.rank is None else view.rank
        ranks = [(str(rank), view.href(rank=rank), rank == chosen) for rank in now.ranks[:MOST_RANKS]]
        inside.append(build_choices("Rank", ranks, mark_current=True))
    return inside


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 6_000 else f"{seconds / 3600:.1f} h"


def _build_words(summary: RunSummary, now: RecordedSoFar) -> list[Component]:
    made: list[Component] = []
    lines = [] if summary.history is None else whole_run.list_history(summary.history)
    if lines:
        made.append(components.build_card(whole_run.WHOLE_RUN_TITLE, *(html.P(clean_text(line)) for line in lines)))
    telemetry = summary.telemetry
    if telemetry is not None:
        terms = [(topic, clean_text(text)) for topic, text in sampled.list_telemetry(telemetry, summary.energy)]
        table = sampled.build_telemetry_table(telemetry)
        inside = [components.build_terms(terms)] if terms else []
        inside += [components.build_table(table, View(), css="few")] if table else []
        if inside:
            made.append(components.build_card(sampled.TELEMETRY_TITLE, *inside))
        if telemetry.missing:  # in NVML's words
            by_reason: dict[str, list[str]] = {}
            for column, why in telemetry.missing.items():
                by_reason.setdefault(why, []).append(sampled.TELEMETRY_LABELS.get(column, column))
            missing, count = [(clean_text(why, 300), ", ".join(names)) for why, names in by_reason.items()], len(telemetry.missing)
            title = html.Summary(f"Not sampled: {count} {pluralize(count, 'column')}")
            made.append(html.Details([title, components.build_terms(missing)]))
    return made + [components.build_quiet(clean_text(warning)) for warning in now.warnings]


PAGE = TelemetryPage()
