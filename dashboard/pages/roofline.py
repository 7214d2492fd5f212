"""The roofline: how far each op is from what the device allows; a click on a point leads to the op."""

from __future__ import annotations

from typing import Any

from dash import html
from dash.development.base_component import Component
from gpudiag_dashboard import components
from gpudiag_dashboard.components import View
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.page import ContentPage

from gpudiag.model.report import OpRow, ReportData
from gpudiag.report import labels
from gpudiag.report.html.roofline import Figure, draw_roofline, format_roofline_note, select_roofline_rows, sort_ops_by_time
from gpudiag.units import format_ns

GRAPH = "roofline-figure"
FARTHEST = 10
"""Ops listed below the figure: those from whose roof there is most time to gain."""


class Roofline(ContentPage):
    """The roofline of a recording. Query: op (its points stand out, the others fade)."""

    path, title = "/roofline", "Roofline"
    figure = GRAPH

    def target(self, click: Any, view: View, library: Library) -> str | None:
        """Return the address of the op of a point."""
        # The op of a point that was clicked; None for a roof, or for what no figure of ours sends
        report = library.report(view.bundle or "", view.rank).data
        points = click.get("points") if isinstance(click, dict) else None
        place = points[0].get("customdata") if isinstance(points, list) and points and isinstance(points[0], dict) else None
        rows = sort_ops_by_time(report)
        row = rows[place] if isinstance(place, int) and not isinstance(place, bool) and 0 <= place < len(rows) else None
        return None if row is None else view.href("/ops", op=row.name)

    def content(self, view: View, library: Library) -> list[Component]:
        """Return the figure with what it leaves out, and the ops from which there is most to gain."""
        report = library.report(view.bundle or "", view.rank).data
        figure = draw_roofline(report)
        note = format_roofline_note(report)
        if figure is None:
            return [html.H1("Roofline"), components.build_empty("No roofline", note)]
        label = "Roofline: achieved rate of each op against its arithmetic intensity; the ops stand in the table below and on the page Ops"
        chosen = view.query.get("op")
        shown = (
            [
                html.P(
                    [
                        "Standing out: ",
                        html.Code(components.clean_text(chosen, 160)),
                        " ",
                        components.build_link("All ops", view.href(op=None)),
                    ]
                )
            ]
            if chosen
            else []
        )
        return [
            html.H1("Roofline"),
            *shown,
            components.build_figure(GRAPH, _mark_op(figure, report, chosen), label),
            components.build_quiet(note),
            *_build_farthest(report, view),
        ]


def _mark_op(figure: Figure, report: ReportData, op: str | None) -> Figure:
    """Return the figure in which the points of one op stand out."""
    if op is None:
        return figure
    rows = sort_ops_by_time(report)
    faded = {"selected": {"marker": {"opacity": 0.95}}, "unselected": {"marker": {"opacity": 0.12}}}
    data = [
        {**trace, **faded, "selectedpoints": [k for k, place in enumerate(trace["customdata"]) if rows[place].name == op]}
        if "customdata" in trace
        else trace
        for trace in figure["data"]
    ]
    return {**figure, "data": data}


def _build_farthest(report: ReportData, view: View) -> list[Component]:
    """Return the ops that lose most time against their roof, for those who read rather than point."""
    ranked = sorted(select_roofline_rows(report), key=lambda row: -_above_roof_ns(row))[:FARTHEST]
    ranked = [row for row in ranked if _above_roof_ns(row) > 0]
    if not ranked:
        return []
    columns = [
        components.Column("op"),
        components.Column("time", True),
        components.Column("gap to roofline", True, "measured time less roofline time"),
        components.Column("of roofline", True),
        components.Column("FLOP/B", True),
        components.Column("bound"),
    ]
    rows = [
        [
            components.Cell(
                components.clean_text(row.name, 160),
                (components.clean_text(row.signature, 160),) if row.signature else (),
                view.href("/ops", op=row.name),
            ),
            format_ns(row.kernel_ns),
            format_ns(_above_roof_ns(row)),
            labels.format_efficiency(row),
            labels.format_number(labels.compute_intensity(row)),
            row.bound,
        ]
        for row in ranked
    ]
    return [html.H2("Farthest below the roofline"), components.build_table(columns, rows, "Ops that lose most time against the roofline")]


def _above_roof_ns(row: OpRow) -> float:
    return row.kernel_ns - row.t_roof_ns if row.t_roof_ns is not None else 0.0


PAGE = Roofline()
