"""Memory: what it was used for at its peak, where it was allocated, what the allocator holds, and how it went over the run."""

from __future__ import annotations

from html import escape as html_escape
from typing import Any

import dash
from dash import Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component
from gpudiag_dashboard import components, telemetry_figure
from gpudiag_dashboard.components import Column, View, build_choices, clean_text
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.page import ADDRESS

from gpudiag.model.memory import MemoryReport
from gpudiag.report import memory
from gpudiag.units import format_bytes

MOST_PLACES = 50

_TITLES = {"site": "call site", "module": "module", "op": "op"}
_BAR, _BAR_PX, _FRAME_PX = "#2f7fc1", 40, 30
_LONGEST = 400


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
            peak = build_peak(library.report(view.bundle, view.rank).data.memory)
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


def build_peak(peak: MemoryReport | None) -> list[Component]:
    """Return the peak by category and, where a snapshot was taken, the segments of the allocator."""
    if peak is None:
        return [
            components.build_empty(
                "Memory use was not recorded",
                "Allocations are recorded on request, for they cost time. A trace of torch.profiler needs profile_memory=True.",
                components.build_code("gpudiag run --memory train.py"),
            )
        ]
    columns = [Column("used for"), Column("size", numeric=True), Column("share", numeric=True)]
    rows = [list(row) for row in memory.build_category_rows(peak)]
    label = "Peak memory, by what it was used for; the same figures stand in the table"
    card = components.build_card(
        "At the peak",
        html.P(memory.format_memory_headline(peak), className="lead"),
        components.build_figure("memory-categories", draw_categories(peak), label),
        components.build_table(columns, rows, "Peak memory, by what it was used for", css="few"),
        *(html.P(clean_text(line)) for line in memory.list_memory_lines(peak)),
        *(components.build_quiet(clean_text(note)) for note in peak.notes),
    )
    if not peak.pools:
        return [card]
    titles = ("segments", "reserved", "in use", "largest free block")
    columns = [Column("allocations"), *(Column(title, numeric=True) for title in titles)]
    rows = []
    for pool in peak.pools:
        sizes = map(format_bytes, (pool.reserved_bytes, pool.allocated_bytes, pool.largest_free_bytes))
        rows.append([f"{clean_text(pool.size_class, 20)}, stream {pool.stream}", f"{pool.segments:,}", *sizes])
    table = components.build_table(columns, rows, "Allocator segments by size class and stream")
    return [card, components.build_card("Allocator segments", table)]


def draw_categories(peak: MemoryReport) -> dict[str, Any]:
    """Return a bar for each category, in the order of the report, as a plain plotly figure."""
    rows = memory.build_category_rows(peak)
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
    lists = dict(zip(_TITLES, (rows for _, rows in memory.list_memory_places(peak)), strict=True))
    filled = tuple(name for name in _TITLES if lists[name])
    if not filled:
        return []
    by = view.one_of("by", filled)
    rows = lists[by]
    columns = [Column(_TITLES[by]), Column("used for"), Column("size", numeric=True), Column("share", numeric=True)]
    cells = [[clean_text(name, _LONGEST), kind, size, share] for name, kind, size, share in rows[:MOST_PLACES]]
    return [
        components.build_card(
            "Call site",
            build_choices("By", [(_TITLES[name], view.href(by=name), name == by) for name in filled], mark_current=True),
            components.build_table(columns, cells, f"Peak memory, by {_TITLES[by]}", css="few"),
            components.build_quiet(f"{len(rows) - MOST_PLACES:,} smaller ones are not shown.") if len(rows) > MOST_PLACES else None,
        )
    ]


PAGE = MemoryPage()
