"""Memory: what it was used for at its peak, where it was allocated, what the allocator holds, and how it went over the run."""

from __future__ import annotations

from typing import Any

import dash
from dash import Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component
from gpudiag_dashboard import components, telemetry_figure
from gpudiag_dashboard.components import View, build_blocks
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.page import ADDRESS

from gpudiag.model.memory import MemoryReport
from gpudiag.report import blocks, memory
from gpudiag.report.memory_chart import CHART

MOMENT = "memory-moment"
_CLICK = "A click on the figure shows what was held at that moment, and the line of code that holds most of it."


class MemoryPage:
    """The peak by category and by place; the telemetry of memory below it."""

    path, title, needs_bundle, needs_analysis = "/memory", "Memory", True, True

    def layout(self, view: View) -> Component:
        """Return the places that the callbacks fill."""
        label = "Memory in use over the run; lowest, median and highest stand on the page Telemetry"
        strips = components.build_figure("memory-strips", {"data": [], "layout": {}}, label)
        inside = [html.H2("Memory over the run"), html.Div(id="memory-strips-key"), strips, html.Div(id="memory-strips-notes")]
        over_run = html.Div(inside, id="memory-run", style={"display": "none"})
        return html.Div([html.H1("Memory"), dcc.Loading(html.Div(id="memory-peak"), **components.LOADING), over_run])

    def register(self, app: dash.Dash, library: Library) -> None:
        """Register the callback of the peak and the strips."""

        @app.callback(
            Output("memory-peak", "children"), Output("memory-strips", "figure"), Output("memory-strips", "style"),
            Output("memory-run", "style"), Output("memory-strips-key", "children"), Output("memory-strips-notes", "children"),
            Input("memory-run", "id"), State(ADDRESS, "pathname"), State(ADDRESS, "search"),
        )  # fmt: skip
        def fill(_: str, pathname: str | None, search: str | None) -> tuple[Any, ...]:
            view = View.parse(pathname, search)
            if view.page != self.path or view.bundle is None:
                return (no_update,) * 6
            peak = build_peak(library.report(view.bundle, view.rank).data.memory, view)
            hidden: tuple[Any, ...] = (peak, no_update, no_update, {"display": "none"}, [], [])
            if library.entry(view.bundle).kind != "bundle":
                return hidden
            growing = library.growing(view.bundle, view.rank)
            now, telemetry = growing.read(), growing.summarise().telemetry
            limits = telemetry.limits if telemetry else {}
            strips = telemetry_figure.draw_strips(now, "step", limits, telemetry_figure.MEMORY_STRIPS)
            if strips.figure is None:  # nothing was sampled
                return hidden
            more = html.P(components.build_link("All strips", view.href("/telemetry")))
            height, notes = components.measure_figure(strips.height), [*map(components.build_quiet, strips.notes), more]
            return peak, strips.figure, height, {}, components.build_key(strips.key), notes

        @app.callback(
            Output(MOMENT, "children"), Input(CHART, "clickData"), State(ADDRESS, "pathname"), State(ADDRESS, "search"),
            prevent_initial_call=True,
        )  # fmt: skip
        def show_moment(click: Any, pathname: str | None, search: str | None) -> Any:
            view = View.parse(pathname, search)
            if view.page != self.path or view.bundle is None:
                return no_update
            peak = library.report(view.bundle, view.rank).data.memory
            points = click.get("points") if isinstance(click, dict) else None
            point = points[0].get("pointNumber") if isinstance(points, list) and points and isinstance(points[0], dict) else None
            if peak is None or peak.timeline is None or type(point) is not int or not 0 <= point < len(peak.timeline.t_ns):
                return no_update
            return build_blocks(memory.build_moment_blocks(peak.timeline, point), view)


def build_peak(peak: MemoryReport | None, view: View) -> list[Component]:
    """Return the peak by category and place and, where a snapshot was taken, the segments of the allocator."""
    if peak is None:
        return [
            components.build_empty(
                "Allocations were not recorded",
                "They are recorded on request, for they cost time. A trace of torch.profiler needs profile_memory=True.",
                components.build_code("gpudiag run --memory train.py"),
            )
        ]
    section = memory.build_memory_section(peak, blocks.PAGE)
    shown: list[Component] = []
    for block in section.blocks if section else ():
        shown += build_blocks([block], view)
        if isinstance(block, blocks.Chart):
            shown.append(html.Div(components.build_quiet(_CLICK), id=MOMENT, **{"aria-live": "polite"}))
    return shown


PAGE = MemoryPage()
