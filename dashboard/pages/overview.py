"""What a recording says in short: verdict, breakdown of a step, top findings, idle time, data quality."""

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
from gpudiag.report import blocks, data_quality, document, environment, idle_time, labels
from gpudiag.report.blocks import Cell, Column, Row
from gpudiag.report.findings import split_findings


class Overview(ContentPage):
    """The first page of a recording."""

    path, title = "/overview", "Overview"

    def content(self, view: View, library: Library) -> list[Child]:
        """Return the page."""
        opened = library.opened(view.bundle or "", view.rank)
        report = opened.report
        lead = [f"Measured on {report.device.name}."] if report.device else []
        lead += [*data_quality.format_headlines(report), data_quality.format_steps(report)]
        full, rest = split_findings(report)
        found: list[Component] = [] if full else [html.P(clean_long_text(labels.format_nothing_found(report)))]
        if full:
            items = []
            for finding in full:
                link = build_link(clean_text(finding.title), view.href("/findings", rule=finding.rule))
                gain = html.P(clean_long_text(labels.format_upper_bound(finding, report)), className="quiet")
                items.append(html.Li([html.Span(finding.severity, className="tag"), link, gain], className=finding.severity))
            found.append(html.Ul(items, className="plain first"))
            found += [html.P(build_link(f"{len(rest)} more, of less weight", view.href("/findings")))] if rest else []
        recorded = environment.build_environment_section(report)
        return [
            html.H1(clean_long_text(labels.format_verdict(report))),
            *(html.P(clean_long_text(line), className="lead") for line in lead),
            *build_section(document.build_breakdown_section(report), view),
            html.Div([html.Div([html.H2("Top findings"), *found]), html.Div(_build_idle(opened, view))], className="columns"),
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
