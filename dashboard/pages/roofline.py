"""The roofline: how far each op is from what the device allows; a click on a point leads to the op."""

from __future__ import annotations

from dash import html
from dash.development.base_component import Component
from gpudiag_dashboard import components
from gpudiag_dashboard.components import Child, View, clean_text
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.page import ContentPage

from gpudiag.model.report import ReportData
from gpudiag.report import labels
from gpudiag.report.blocks import Cell, Column, Table, build_row, build_time_cell
from gpudiag.report.op_table import sort_ops_by_time
from gpudiag.report.roofline import DUST, draw_roofline, format_roofline_note, select_roofline_rows

GRAPH = "roofline-figure"


class Roofline(ContentPage):
    """The roofline of a recording. Query: op (its points stand out, the others fade)."""

    path, title = "/roofline", "Roofline"
    figure = GRAPH

    def target(self, number: int, view: View, library: Library) -> str | None:
        """Return the address of the op of a point."""
        if number == DUST:
            return view.href("/ops", bound="overhead")
        rows = sort_ops_by_time(library.report(view.bundle or "", view.rank).data)
        return view.href("/ops", op=rows[number].name) if 0 <= number < len(rows) else None

    def content(self, view: View, library: Library) -> list[Child]:
        """Return the figure with what it leaves out, and the ops from which there is most to gain."""
        report = library.report(view.bundle or "", view.rank).data
        figure, note = draw_roofline(report), format_roofline_note(report)
        if figure is None:
            return [html.H1("Roofline"), components.build_empty("No roofline", note)]
        op = view.query.get("op")
        chosen = None
        if op is not None:  # its points stand out
            rows = sort_ops_by_time(report)
            faded = {"selected": {"marker": {"opacity": 0.95}}, "unselected": {"marker": {"opacity": 0.12}}}
            for k, trace in enumerate(figure["data"]):
                if "customdata" in trace:
                    points = [point for point, place in enumerate(trace["customdata"]) if place != DUST and rows[place].name == op]
                    figure["data"][k] = {**trace, **faded, "selectedpoints": points}
        if op:
            link = components.build_link("All ops", view.href(op=None))
            chosen = html.P(["Standing out: ", html.Code(clean_text(op, 160)), " ", link])
        label = "Roofline: achieved rate of each op against its arithmetic intensity; the ops stand in the table below and on the page Ops"
        return [
            html.H1("Roofline"),
            chosen,
            components.build_figure(GRAPH, figure, label),
            components.build_quiet(note),
            *_build_farthest(report, view),
        ]


def _build_farthest(report: ReportData, view: View) -> list[Component]:
    gaps = [(row.kernel_ns - row.t_roof_ns, row) for row in select_roofline_rows(report) if row.t_roof_ns is not None]
    # Ops listed below the figure: those from whose roof there is most time to gain
    ranked = sorted((pair for pair in gaps if pair[0] > 0), key=lambda pair: -pair[0])[:10]
    if not ranked:
        return []
    columns = (
        Column("op"),
        Column("time", "number"),
        Column("gap to roofline", "number", "measured time less roofline time"),
        Column("of roofline", "number"),
        Column("FLOP/B", "number"),
        Column("bound"),
    )
    rows = tuple(
        build_row(
            Cell(row.name, link=("href", view.href("/ops", op=row.name))),
            build_time_cell(row.kernel_ns),
            build_time_cell(gap_ns),
            labels.format_efficiency(row),
            labels.format_number(labels.compute_intensity(row)),
            row.bound,
            detail=row.signature or "",
        )
        for gap_ns, row in ranked
    )
    table = Table(columns, rows, "Ops that lose most time against the roofline")
    return [html.H2("Farthest below the roofline"), components.build_table(table, view)]


PAGE = Roofline()
