"""What a recording says in short: verdict, breakdown of a step, top findings, idle time, data quality."""

from __future__ import annotations

from dash import html
from dash.development.base_component import Component
from gpudiag_dashboard import components
from gpudiag_dashboard.components import View
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.page import ContentPage
from gpudiag_dashboard.pages import findings

from gpudiag.api.pipeline import AnalysedRecording
from gpudiag.model.finding import Finding
from gpudiag.model.report import ReportData
from gpudiag.report import data_quality, environment, idle_time, labels
from gpudiag.report.findings import split_findings
from gpudiag.units import format_ns, format_share

_WIDE_ENOUGH = 0.07
"""Share from which a segment of the bar has room for its percentage."""


def build_breakdown(report: ReportData) -> list[Component]:
    """Return where a step goes: the bar, its legend with times, and a note on idle time."""
    rows = labels.build_bucket_rows(report, limit=16)
    note = labels.format_idle_note(report)
    # The bar; not for screen readers, for the legend says the same
    inside = [
        html.Span(
            html.B(format_share(row.share)) if row.share >= _WIDE_ENOUGH else None,
            className=f"segment {name_css_classes(row.bucket)}",
            style={"flexGrow": f"{row.share * 100:.4f}"},
            title=f"{row.label}: {format_ns(row.ns)} ({format_share(row.share, 1)})",
        )
        for row in rows
    ]
    head = html.Thead(html.Tr([html.Th(name, scope="col") for name in ("part", "time", "share")]), className="hidden")
    lines = [
        _build_legend_line([html.Span(className=f"swatch {name_css_classes(row.bucket)}"), row.label], row.ns, format_share(row.share, 1))
        for row in rows
    ]
    total = _build_legend_line(f"sum: the {labels.name_span(report)}", labels.step_ns(report), "100.0 %")
    caption = html.Caption("Time and share of each part", className="hidden")
    return [
        html.Div(inside, className="bar", **{"aria-hidden": "true"}),
        html.Table([caption, head, html.Tbody(lines), html.Tfoot(total)], className="legend"),
        *([components.build_quiet(note)] if note else []),
    ]


def name_css_classes(bucket: str) -> str:
    """Return the classes that colour a part of the step, and hatch it where nothing is done in it."""
    return f"{'idle ' if bucket.startswith('idle') else ''}{bucket.replace('_', '-')}"


def _build_legend_line(label: components.Child | list[components.Child], ns: float, share: str) -> Component:
    return html.Tr([html.Th(label, scope="row"), html.Td(format_ns(ns), className="number"), html.Td(share, className="number")])


class Overview(ContentPage):
    """The first page of a recording."""

    path, title = "/overview", "Overview"

    def content(self, view: View, library: Library) -> list[Component]:
        """Return the page."""
        opened = library.opened(view.bundle or "", view.rank)
        report = opened.report
        rows = [
            (topic, components.clean_text(said, environment.LONGEST_ENVIRONMENT_TEXT))
            for topic, said in environment.list_environment(report)
        ]
        return [
            html.H1(components.clean_long_text(labels.format_verdict(report))),
            *(html.P(components.clean_long_text(line), className="lead") for line in _build_headlines(report)),
            html.H2(f"Where {labels.format_span(report)} goes"),
            *build_breakdown(report),
            html.Div([html.Div(_build_findings(report, view)), html.Div(_build_idle(opened, view))], className="columns"),
            html.H2("Data quality"),
            components.build_terms([(topic, components.clean_long_text(said)) for topic, said in data_quality.list_quality_lines(report)]),
            *_build_warnings(report),
            *([html.Details([html.Summary("Environment"), components.build_terms(rows)])] if rows else []),
        ]


def _build_headlines(report: ReportData) -> list[str]:
    device = [f"Measured on {report.device.name}."] if report.device else []
    return [*device, *data_quality.format_headlines(report), data_quality.format_steps(report)]


def _build_findings(report: ReportData, view: View) -> list[Component]:
    """Return the findings that matter, in one line each."""
    full, rest = split_findings(report)
    title = html.H2("Top findings")
    if not full:
        return [title, html.P(components.clean_long_text(labels.format_nothing_found(report)))]
    more = [html.P(components.build_link(f"{len(rest)} more, of less weight", view.href("/findings")))] if rest else []
    return [title, html.Ul([_build_finding(finding, report, view) for finding in full], className="plain first"), *more]


def _build_finding(finding: Finding, report: ReportData, view: View) -> Component:
    link = components.build_link(components.clean_text(finding.title), view.href("/findings", rule=finding.rule))
    gain = components.clean_long_text(labels.format_upper_bound(finding, report))
    return html.Li([html.Span(finding.severity, className="tag"), link, html.P(gain, className="quiet")], className=finding.severity)


def _build_idle(opened: AnalysedRecording, view: View) -> list[Component]:
    """Return why the device was idle, each cause with a link to its longest gap."""
    causes = idle_time.list_idle_causes(opened.report)
    if not causes:
        return []
    columns = [
        components.Column("cause"),
        components.Column("time", True, f"mean of {labels.format_span(opened.report)}"),
        components.Column("share", True),
        components.Column("timeline", False, "the longest gap"),
    ]
    rows = [
        [_build_cause(cause), format_ns(cause.ns), format_share(cause.share, 1), _link_longest(cause, view, opened)] for cause in causes
    ]
    meanings = idle_time.format_cause_meanings(causes)
    title = html.H2(f"Why the {labels.name_device(opened.report)} was idle")
    return [title, components.build_table(columns, rows, "Causes of idle time"), *([components.build_quiet(meanings)] if meanings else [])]


def _build_cause(cause: idle_time.IdleCause) -> Component:
    """Return a cause with its largest place."""
    swatch = html.Span(className=f"swatch {name_css_classes(cause.bucket)}")
    where = [html.Small(components.clean_text(cause.places[0].detail, 240))] if cause.places else []
    return html.Span([swatch, components.clean_text(cause.label), *where])


def _link_longest(cause: idle_time.IdleCause, view: View, opened: AnalysedRecording) -> components.Cell:
    span = findings.find_idle_span(opened.analysis, cause.bucket)
    if span is None:
        return components.Cell("")
    return components.Cell("longest", href=view.href("/timeline", **{"from": span[0], "to": span[1]}))


def _build_warnings(report: ReportData) -> list[Component]:
    lines = data_quality.list_warnings(report)
    return (
        [html.H3("Warnings"), html.Ul([html.Li(components.clean_long_text(line)) for line in lines], className="warnings")] if lines else []
    )


PAGE = Overview()
