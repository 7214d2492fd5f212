"""What a recording says in short: verdict, breakdown of a step, top findings, idle time, data quality."""

from __future__ import annotations

from dash import html
from dash.development.base_component import Component
from gpudiag_dashboard import components
from gpudiag_dashboard.components import Cell, Child, Column, View, build_link, clean_long_text, clean_text
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.page import ContentPage
from gpudiag_dashboard.pages import findings

from gpudiag.model.report import ReportData
from gpudiag.pipeline import AnalysedRecording
from gpudiag.report import data_quality, environment, idle_time, labels
from gpudiag.report.findings import split_findings
from gpudiag.units import format_ns, format_share

_WIDE_ENOUGH = 0.07
"""Share from which a segment of the bar has room for its percentage."""


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
        quality = [(topic, clean_long_text(text)) for topic, text in data_quality.list_quality_lines(report)]
        warnings = [html.Li(clean_long_text(line)) for line in data_quality.list_warnings(report)]
        longest = environment.LONGEST_ENVIRONMENT_TEXT
        rows = [(topic, clean_text(text, longest)) for topic, text in environment.list_environment(report)]
        return [
            html.H1(clean_long_text(labels.format_verdict(report))),
            *(html.P(clean_long_text(line), className="lead") for line in lead),
            html.H2(f"Where {labels.format_span(report)} goes"),
            *_build_breakdown(report),
            html.Div([html.Div([html.H2("Top findings"), *found]), html.Div(_build_idle(opened, view))], className="columns"),
            html.H2("Data quality"),
            components.build_terms(quality),
            *([html.H3("Warnings"), html.Ul(warnings, className="warnings")] if warnings else []),
            html.Details([html.Summary("Environment"), components.build_terms(rows)]) if rows else None,
        ]


def _build_breakdown(report: ReportData) -> list[Child]:
    segments, rows = [], []
    for row in labels.build_bucket_rows(report, limit=16):
        css = labels.name_css_classes(row.bucket)
        segments.append(
            html.Span(
                html.B(format_share(row.share)) if row.share >= _WIDE_ENOUGH else None,
                className=f"segment {css}",
                style={"flexGrow": f"{row.share * 100:.4f}"},
                title=f"{row.label}: {format_ns(row.ns)} ({format_share(row.share, 1)})",
            )
        )
        rows.append(([html.Span(className=f"swatch {css}"), row.label], row.ns, format_share(row.share, 1)))
    *lines, total = (
        html.Tr([html.Th(label, scope="row"), html.Td(format_ns(ns), className="number"), html.Td(share, className="number")])
        for label, ns, share in (*rows, (f"sum: the {labels.name_span(report)}", labels.step_ns(report), "100.0 %"))
    )
    head = html.Thead(html.Tr([html.Th(name, scope="col") for name in ("part", "time", "share")]), className="hidden")
    caption = html.Caption("Time and share of each part", className="hidden")
    note = labels.format_idle_note(report)
    return [
        html.Div(segments, className="bar", **{"aria-hidden": "true"}),
        html.Table([caption, head, html.Tbody(lines), html.Tfoot(total)], className="legend"),
        components.build_quiet(note) if note else None,
    ]


def _build_idle(opened: AnalysedRecording, view: View) -> list[Component]:
    causes = idle_time.list_idle_causes(opened.report)
    if not causes:
        return []
    columns = [
        Column("cause"),
        Column("time", True, f"mean of {labels.format_span(opened.report)}"),
        Column("share", True),
        Column("timeline", False, "the longest gap"),
    ]
    rows: list[list[Cell | Child]] = []
    for cause in causes:
        swatch = html.Span(className=f"swatch {labels.name_css_classes(cause.bucket)}")
        where = [html.Small(clean_text(cause.places[0].detail, 240))] if cause.places else []
        span = findings.find_idle_span(opened.analysis, cause.bucket)
        longest = Cell("") if span is None else Cell("longest", href=view.href("/timeline", **{"from": span[0], "to": span[1]}))
        name = html.Span([swatch, clean_text(cause.label), *where])
        rows.append([name, format_ns(cause.ns), format_share(cause.share, 1), longest])
    meanings = idle_time.format_cause_meanings(causes)
    title = html.H2(f"Why the {labels.name_device(opened.report)} was idle")
    return [title, components.build_table(columns, rows, "Causes of idle time"), *([components.build_quiet(meanings)] if meanings else [])]


PAGE = Overview()
