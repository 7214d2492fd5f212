"""Memory: what it was used for at its peak, where it was allocated, what the allocator holds, and how it went over the run."""

from __future__ import annotations

from html import escape as html_escape
from typing import Any

import dash
from dash import Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component
from gpudiag_dashboard import components, telemetry_figure
from gpudiag_dashboard.components import View, build_choices, clean_text
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.page import ADDRESS

from gpudiag.model.memory import MemoryReport
from gpudiag.report import memory

MOST_PLACES = 50

_TITLES = {"site": "call site", "module": "module", "op": "op"}
_BAR, _BAR_PX, _FRAME_PX = "#2f7fc1", 40, 30


class MemoryPage:
    """The peak by category and by place; the telemetry of memory below it."""

    path, title, needs_bundle, needs_analysis = "/memory", "Memory", True, True

    def layout(self, view: View) -> Component:
        """Return the places that the callbacks fill."""
        label = "Memory in use over the run; lowest, median and highest stand on the page Telemetry"
        strips = components.build_figure("memory-strips", {"data": [], "layout": {}}, label)
        inside = [html.H2("Memory over the run"), strips, html.Div(id="memory-strips-notes")]
        over_run = html.Div(inside, id="memory-run", style={"display": "none"})
        return html.Div(
            [html.H1("Memory"), dcc.Loading(html.Div(id="memory-peak"), **components.LOADING), html.Div(id="memory-places"), over_run]
        )

    def register(self, app: dash.Dash, library: Library) -> None:
        """Register the callbacks: the peak and the strips once, the places with each choice."""

        @app.callback(
            Output("memory-peak", "children"), Output("memory-strips", "figure"), Output("memory-run", "style"),
            Output("memory-strips-notes", "children"), Input("memory-run", "id"), State(ADDRESS, "pathname"), State(ADDRESS, "search"),
        )  # fmt: skip
        def fill(_: str, pathname: str | None, search: str | None) -> tuple[Any, ...]:
            view = View.parse(pathname, search)
            if view.page != self.path or view.bundle is None:
                return (no_update,) * 4
            peak = build_peak(library.report(view.bundle, view.rank).data.memory, view)
            hidden: tuple[Any, ...] = (peak, no_update, {"display": "none"}, [])
            if library.entry(view.bundle).kind != "bundle":
                return hidden
            growing = library.growing(view.bundle, view.rank)
            now, telemetry = growing.read(), growing.summarise().telemetry
            limits = telemetry.limits if telemetry else {}
            strips = telemetry_figure.draw_strips(now, "step", limits, telemetry_figure.MEMORY_STRIPS)
            if strips.figure is None:  # nothing was sampled
                return hidden
            more = html.P(components.build_link("All strips", view.href("/telemetry")))
            return peak, strips.figure, {}, [*map(components.build_quiet, strips.notes), more]

        @app.callback(Output("memory-places", "children"), Input(ADDRESS, "search"), State(ADDRESS, "pathname"))
        def places(search: str | None, pathname: str | None) -> Any:
            view = View.parse(pathname, search)
            if view.page != self.path or view.bundle is None:
                return no_update
            found = library.report(view.bundle, view.rank).data.memory
            return [] if found is None else build_places(found, view)


def build_peak(peak: MemoryReport | None, view: View) -> list[Component]:
    """Return the peak by category and, where a snapshot was taken, the segments of the allocator."""
    if peak is None:
        return [
            components.build_empty(
                "Memory use was not recorded",
                "Allocations are recorded on request, for they cost time. A trace of torch.profiler needs profile_memory=True.",
                components.build_code("gpudiag run --memory train.py"),
            )
        ]
    label = "Peak memory, by what it was used for; the same figures stand in the table"
    card = components.build_card(
        "At the peak",
        html.P(clean_text(memory.format_memory_headline(peak)), className="lead"),
        components.build_figure("memory-categories", draw_categories(peak), label),
        components.build_table(memory.build_categories_table(peak), view, css="few"),
        *(html.P(clean_text(line)) for line in memory.list_memory_lines(peak)),
        *(components.build_quiet(clean_text(note)) for note in peak.notes),
    )
    if not peak.pools:
        return [card]
    return [card, components.build_card("Allocator segments", components.build_table(memory.build_pools_table(peak), view))]


def draw_categories(peak: MemoryReport) -> dict[str, Any]:
    """Return a bar for each category, in the order of the report, as a plain plotly figure."""
    rows = [[cell.text for cell in row.cells[:3]] for row in memory.build_categories_table(peak).rows]
    sizes = list(peak.by_category.values())
    bars = {
        "type": "bar", "orientation": "h", "x": sizes, "y": list(range(len(rows))), "marker": {"color": _BAR},
        "text": [html_escape(", ".join(row)) for row in rows], "textposition": "none", "hovertemplate": "%{text}<extra></extra>",
    }  # fmt: skip
    # Each text stands on its bar: readable whatever the length of the bar
    place = {"x": 0, "xref": "x", "xanchor": "left", "yref": "y", "yanchor": "bottom", "showarrow": False, "font": {"size": 12}}
    texts = [html_escape(f"{name.partition(':')[0].partition(',')[0]}  {size}") for name, size, _ in rows]
    layout = {
        "xaxis": {"visible": False, "range": [0, max(sizes, default=0) * 1.02 or 1], "fixedrange": True},
        "yaxis": {"visible": False, "autorange": "reversed", "fixedrange": True},
        "annotations": [{**place, "y": number - 0.2, "text": text} for number, text in enumerate(texts)],
        "bargap": 0.62, "height": _FRAME_PX + _BAR_PX * len(rows), "margin": {"l": 4, "r": 4, "t": 18, "b": 4},
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "showlegend": False,
    }  # fmt: skip
    return {"data": [bars], "layout": layout}


def build_places(peak: MemoryReport, view: View) -> list[Component]:
    """Return the list that was chosen, with links to the others."""
    tables = {table.label.lower(): table for table in memory.build_place_tables(peak, MOST_PLACES)}
    known = {name: tables[title] for name, title in _TITLES.items() if title in tables}
    if not known:
        return []
    by = view.one_of("by", tuple(known))
    table = known[by]
    left_out = table.count - len(table.rows)
    return [
        components.build_card(
            "Call site",
            build_choices("By", [(_TITLES[name], view.href(by=name), name == by) for name in known], mark_current=True),
            components.build_table(table, view, css="few"),
            components.build_quiet(f"{left_out:,} smaller ones are not shown.") if left_out else None,
        )
    ]


PAGE = MemoryPage()
