"""What a recording says in short: figures, the parts of a step, the first findings, idle time, data quality."""

from __future__ import annotations

import msgspec
from dash import html
from dash.development.base_component import Component
from gpudiag_dashboard import components
from gpudiag_dashboard.components import Child, View, build_blocks, build_link, build_section, clean_long_text, clean_text
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.page import ContentPage
from gpudiag_dashboard.pages import findings

from gpudiag.pipeline import AnalysedRecording
from gpudiag.report import blocks, data_quality, environment, first_screen, idle_time, labels
from gpudiag.report.blocks import Cell, Column, Row
from gpudiag.report.findings import split_findings


class Overview(ContentPage):
    """The first page of a recording."""

    path, title = "/overview", "Overview"

    def content(self, view: View, library: Library) -> list[Child]:
        """Return the page."""
        opened = library.opened(view.bundle or "", view.rank)
        report = opened.report
        full, rest = split_findings(report)
        found = (
            findings.build_cards(opened, full, view, library) if full else [html.P(clean_long_text(labels.format_nothing_found(report)))]
        )
        more = html.P(build_link(f"And {len(rest)} more", view.href("/findings"))) if rest else None
        recorded = environment.build_environment_section(report)
        device = html.Span(clean_text(f"on {report.device.name}"), className="quiet") if report.device else ""
        return [
            html.H1([clean_text(view.bundle or "", 160), " ", device]),
            *build_blocks(first_screen.build_leads(report), view),
            *build_section(first_screen.build_breakdown_section(report), view),
            html.H2("Findings"),
            *found,
            more,
            *_build_idle(opened, view),
            *build_section(data_quality.build_quality_section(report, blocks.PAGE), view),
            html.Details([html.Summary("Environment"), *build_blocks(recorded.blocks, view)]) if recorded else None,
        ]


def _build_idle(opened: AnalysedRecording, view: View) -> list[Component]:
    causes = idle_time.list_idle_causes(opened.report, blocks.TERMINAL.places)
    if not causes:
        return []
    table = idle_time.build_causes_table(causes)
    rows: list[Row] = []
    for row in table.rows:
        longest = Cell("")
        if row.level == "group":
            span = findings.find_idle_span(opened.analysis, causes[sum(one.level == "group" for one in rows)].bucket)
            if span is not None:
                longest = Cell("longest", link=("href", view.href("/timeline", **{"from": span[0], "to": span[1]})))
        rows.append(msgspec.structs.replace(row, cells=(*row.cells, longest)))
    columns = (*table.columns, Column("timeline", help="the longest gap"))
    meanings = idle_time.format_cause_meanings(causes)
    return [
        html.H2(f"Why the {labels.name_device(opened.report)} was idle"),
        components.build_table(msgspec.structs.replace(table, columns=columns, rows=tuple(rows)), view),
        *([components.build_quiet(meanings)] if meanings else []),
    ]


PAGE = Overview()
