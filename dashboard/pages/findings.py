"""What was found: each as a card with its evidence, the most it can give, what to change, how to test it, and where to see it."""

from __future__ import annotations

from typing import Any

from dash import html
from dash.development.base_component import Component
from gpudiag_dashboard import parts, spots
from gpudiag_dashboard.content import ContentPage
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.view import View

from gpudiag.api.opened import Opened
from gpudiag.model.finding import Finding
from gpudiag.model.report import ReportData
from gpudiag.report import chosen, words
from gpudiag.report.html import cards


class Findings(ContentPage):
    """The findings of a recording, those that matter first; `rule` in the query opens one of the others."""

    path, title = "/findings", "Findings"

    def content(self, view: View, library: Library) -> list[Component]:
        """Return the page."""
        opened = library.opened(view.bundle or "", view.rank)
        report = opened.report
        full, rest = chosen.findings(report)
        shown = [_card(values, finding, opened, view) for values, finding in zip(cards.cards(report), (*full, *rest), strict=True)]
        gains = chosen.on_gains(report)
        page: list[Component] = [html.H1("What was found"), *([parts.quiet(gains)] if gains else []), *shown[: len(full)]]
        if not shown:
            page = [html.H1("Nothing was found"), html.P(parts.prose(words.nothing_found(report)))]
        if rest:
            asked = view.query.get("rule") in {finding.rule for finding in rest}
            page.append(html.Details([html.Summary(f"{len(rest)} more, of less weight"), *shown[len(full) :]], open=asked))
        return [*page, html.H2("Rules"), html.P(words.rules_line(report)), *_rules(report)]


def _card(values: dict[str, Any], finding: Finding, opened: Opened, view: View) -> Component:
    places = [parts.link(label, href) for label, href in spots.links(finding, opened.report.ops, opened.analysis, view)]
    tags = [
        html.Span(finding.severity, className="tag"),
        html.Span(f"{values['rule']}, {finding.confidence} confidence", className="quiet"),
    ]
    return html.Article(
        [
            html.H2([values["title"], " ", *tags]),
            html.P(values["message"]),
            *_gain(values),
            *_places(values, view),
            *_fixes(values, finding, view),
            html.Div(places, className="links"),
            html.Details([html.Summary("Why, and the figures behind it"), *_behind(values)]),
        ],
        className=f"card {finding.severity}",
        id=f"finding-{values['rule']}",
        tabIndex=-1,  # the script moves there when the address names the rule
    )


def _gain(values: dict[str, Any]) -> list[Component]:
    line = [html.P(values["gain"])] if values["gain"] else []
    if values["gain_percent"] is None:
        return line
    return [*line, html.Div(html.Span(style={"width": f"{values['gain_percent']}%"}), className="gain-bar", **{"aria-hidden": "true"})]


def _places(values: dict[str, Any], view: View) -> list[Component]:
    """Return where it is; what names an op leads to it."""
    if not values["where"]:
        return []
    items = [html.Li(parts.link(html.Code(said), view.href("/ops", op=op)) if op else html.Code(said)) for said, op in values["where"]]
    return [html.H3("Where"), html.Ul(items)]


def _fixes(values: dict[str, Any], finding: Finding, view: View) -> list[Component]:
    if not values["fixes"]:
        return []
    rows = [part for fix, told in zip(finding.fixes, values["fixes"], strict=True) for part in _fix(fix, told, view)]
    return [html.H3("What to change, and how to test it"), html.Dl(rows, className="fixes")]


def _fix(fix: str, told: dict[str, str], view: View) -> list[Component]:
    effect = [html.Span(f" {told['effect']}", className="quiet")] if told["effect"] else []
    test = [html.Span([" ", parts.link("Test it", view.href("/experiments", fix=fix))])] if told["test"] else []
    change = [html.Dd(html.Code(told["change"]))] if told["change"] else []
    command = [html.Dd(html.Code(told["test"]), className="test")] if told["test"] else []
    return [html.Dt([told["title"], *effect, *test]), *change, *command]


def _behind(values: dict[str, Any]) -> list[Component]:
    evidence = [html.Tr([html.Th(fact, scope="row"), html.Td([value, html.Small(meaning)])]) for fact, value, meaning in values["evidence"]]
    folded = [html.Li(f"{rule}: {said}" if said else rule) for rule, said in values["folded"]]
    references = [
        html.Li(html.A(text, href=link, rel="noopener noreferrer", target="_blank") if link else text)
        for text, link in values["references"]
    ]
    return [
        *([html.P(values["why"])] if values["why"] else []),
        *([html.Table(html.Tbody(evidence), className="facts")] if evidence else []),
        *([html.P("Explains also:"), html.Ul(folded)] if folded else []),
        *([html.P("References:"), html.Ul(references)] if references else []),
    ]


_STATUS = {
    "fired": "fired",
    "error": "failed",
    "suppressed": "withheld",
    "not_applicable": "could not be judged",
    "passed": "passed",
}
"""Status of a rule -> as it is shown, in this order."""


def _rules(report: ReportData) -> list[Component]:
    """Return every rule with its status and the reason, folded."""
    if not report.rules:
        return []
    order = list(_STATUS)
    ranked = sorted(report.rules, key=lambda rule: (order.index(rule.status), rule.id))
    rows = [[parts.text(rule.id, 60), _STATUS[rule.status], parts.text(rule.reason, 400)] for rule in ranked]
    table = parts.table([parts.Column("rule"), parts.Column("status"), parts.Column("reason")], rows, "Rules")
    return [html.Details([html.Summary("Every rule, its status and the reason"), table])]


PAGE = Findings()
