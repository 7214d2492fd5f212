"""What a recording says in short: the verdict, where a step goes, what to do first, why the device was idle, how far to trust it."""

from __future__ import annotations

from dash import html
from dash.development.base_component import Component
from gpudiag_dashboard import breakdown, parts, spots
from gpudiag_dashboard.content import ContentPage
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.view import View

from gpudiag.api.opened import Opened
from gpudiag.model.finding import Finding
from gpudiag.model.report import ReportData
from gpudiag.report import chosen, recorded, trust, waiting, words
from gpudiag.units import format_ns, format_share


class Overview(ContentPage):
    """The first page of a recording."""

    path, title = "/overview", "Overview"

    def content(self, view: View, library: Library) -> list[Component]:
        """Return the page."""
        opened = library.opened(view.bundle or "", view.rank)
        report = opened.report
        return [
            html.H1(parts.prose(words.verdict(report))),
            *(html.P(parts.prose(line), className="lead") for line in _headlines(report)),
            html.H2(f"Where {words.span_phrase(report)} goes"),
            *breakdown.of_step(report),
            html.Div([html.Div(_findings(report, view)), html.Div(_idle(opened, view))], className="columns"),
            html.H2("How far to trust this"),
            parts.terms([(topic, parts.prose(said)) for topic, said in trust.trust_lines(report)]),
            *_warnings(report),
            *_recorded(report),
        ]


def _headlines(report: ReportData) -> list[str]:
    device = [f"Measured on {report.device.name}."] if report.device else []
    return [*device, *trust.headlines(report), trust.step_line(report)]


def _findings(report: ReportData, view: View) -> list[Component]:
    """Return the findings that matter, in one line each."""
    full, rest = chosen.findings(report)
    title = html.H2("What to do first")
    if not full:
        return [title, html.P(parts.prose(words.nothing_found(report)))]
    more = [html.P(parts.link(f"{len(rest)} more, of less weight", view.href("/findings")))] if rest else []
    return [title, html.Ul([_finding(finding, report, view) for finding in full], className="plain first"), *more]


def _finding(finding: Finding, report: ReportData, view: View) -> Component:
    link = parts.link(parts.text(finding.title), view.href("/findings", rule=finding.rule))
    gain = parts.prose(words.ceiling_line(finding, report))
    return html.Li([html.Span(finding.severity, className="tag"), link, html.P(gain, className="quiet")], className=finding.severity)


def _idle(opened: Opened, view: View) -> list[Component]:
    """Return why the device was idle, each cause with a link to where it is longest."""
    causes = waiting.causes(opened.report)
    if not causes:
        return []
    columns = [
        parts.Column("cause"),
        parts.Column("time", True, f"mean of {words.span_phrase(opened.report)}"),
        parts.Column("share", True),
        parts.Column("timeline", False, "where it is longest"),
    ]
    rows = [[_cause(cause), format_ns(cause.ns), format_share(cause.share, 1), _longest(cause, view, opened)] for cause in causes]
    meanings = waiting.meanings(causes)
    title = html.H2(f"Why the {words.device_word(opened.report)} was idle")
    return [title, parts.table(columns, rows, "Causes of idle time"), *([parts.quiet(meanings)] if meanings else [])]


def _cause(cause: waiting.Cause) -> Component:
    """Return a cause with its largest place."""
    swatch = html.Span(className=f"swatch {breakdown.css(cause.bucket)}")
    where = [html.Small(parts.text(cause.places[0].detail, 240))] if cause.places else []
    return html.Span([swatch, parts.text(cause.label), *where])


def _longest(cause: waiting.Cause, view: View, opened: Opened) -> parts.Cell:
    span = spots.idle_span(opened.analysis, cause.bucket)
    if span is None:
        return parts.Cell("")
    return parts.Cell("longest", href=view.href("/timeline", **{"from": span[0], "to": span[1]}))


def _warnings(report: ReportData) -> list[Component]:
    lines = trust.warning_lines(report)
    return [html.H3("Warnings"), html.Ul([html.Li(parts.prose(line)) for line in lines], className="warnings")] if lines else []


def _recorded(report: ReportData) -> list[Component]:
    rows = [(topic, parts.text(said, recorded.LONGEST)) for topic, said in recorded.lines(report)]
    return [html.Details([html.Summary("Recorded with"), parts.terms(rows)])] if rows else []


PAGE = Overview()
