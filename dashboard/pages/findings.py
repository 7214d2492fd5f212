"""Findings as cards: evidence, upper bound, what to change, how to test it, where to see it on the time line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import polars as pl
from dash import html
from dash.development.base_component import Component
from gpudiag_dashboard import components
from gpudiag_dashboard.components import View
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.page import ContentPage

from gpudiag.api.pipeline import AnalysedRecording
from gpudiag.model.analysis import Analysis
from gpudiag.model.finding import Finding, Where
from gpudiag.model.ops import BOUNDS
from gpudiag.model.report import OpRow, ReportData
from gpudiag.model.timeline import IDLE_BUCKETS
from gpudiag.report import findings, labels
from gpudiag.report.html import sections

AROUND = 4.0
"""A spot is shown with this many times its length on both sides, so that what leads to it is seen."""

LEAST_NS = 20_000
"""Shortest stretch to show on each side: less than a kernel's launch tells nothing."""

Span = tuple[int, int]
_SITE = re.compile(r"^(.*)\((\d+)\): ")


def build_finding_links(finding: Finding, ops: Iterable[OpRow], analysis: Analysis, view: View) -> list[tuple[str, str]]:
    """Return (label, address) of where a finding can be checked: the op that it is about, and the time line where it is seen best."""
    known = {row.name for row in ops}
    name = find_named_op(finding.where, known)
    waiting = find_idle_op(analysis, finding.bound, known) if name is None and finding.bound in IDLE_BUCKETS else None
    found = []
    if name is not None:
        found.append((f"Op {name}", view.href("/ops", op=name)))
    elif waiting is not None:
        found.append((f"Op with the longest wait: {waiting}", view.href("/ops", op=waiting)))
    elif finding.bound in BOUNDS:
        found.append((f"Ops bound by {finding.bound}", view.href("/ops", bound=finding.bound)))
    span = _find_span(finding, name, analysis)
    if span is not None:
        found.append(("On the timeline", view.href("/timeline", **{"from": span[0], "to": span[1], "op": name})))
    return found


def find_named_op(places: Iterable[Where], known: set[str]) -> str | None:
    """Return the op that the first of `places` names ('aten::mm [64, 64] x ...', 'aten::mul, aten::add on [8]'); None where none does."""
    first = next(iter(places), None)
    names = [] if first is None else first.what.partition(" [")[0].removesuffix(" on").split(", ")
    return names[0] if names and names[0] in known else None


def _find_span(finding: Finding, name: str | None, analysis: Analysis) -> Span | None:
    if finding.bound in IDLE_BUCKETS:
        return find_idle_span(analysis, finding.bound, finding.where[0] if finding.where else None)
    if name is not None:
        return find_op_span(analysis, name)
    return find_kernel_span(analysis, finding.bound) if finding.bound in BOUNDS else None


def find_idle_span(analysis: Analysis, cause: str, place: Where | None = None) -> Span | None:
    """Return the stretch around the longest idle time of a cause, at `place` where any of it has that line of code; None: there is none."""
    pieces = analysis.idle.filter(pl.col("cause") == cause)
    if place is not None and place.file is not None and place.line is not None:
        # Whether a site ('path/file.py(12): function') is that line of a file; reports keep the end of a path alone
        there = pieces.filter(pl.col("site").str.contains(f"{place.file}({place.line}): ", literal=True))
        pieces = there if there.height else pieces
    return _widen_span(_find_longest(pieces), analysis)


def find_idle_op(analysis: Analysis, cause: str, known: set[str]) -> str | None:
    """Return the op among `known` whose kernels the device waited for longest with this cause; None where no gap names one."""
    pieces = analysis.idle.filter(pl.col("cause") == cause).with_columns(ns=pl.col("end_ns") - pl.col("start_ns"))
    launched = analysis.trace.kernels.select(pl.col("id").alias("kernel"), pl.coalesce("owner", "op").alias("asked"))
    names = analysis.trace.ops.select(pl.col("id").alias("asked"), pl.col("name").cast(pl.String))
    found = pieces.join(launched, on="kernel").join(names, on="asked").filter(pl.col("name").is_in(sorted(known)))
    ranked = found.group_by("name").agg(pl.col("ns").sum()).sort(["ns", "name"], descending=[True, False])
    return str(ranked["name"][0]) if ranked.height else None


def find_op_span(analysis: Analysis, name: str) -> Span | None:
    """Return the stretch around the longest kernel that the op of this name launched in the analysed steps; None where it launched none."""
    trace = analysis.trace
    ids = trace.ops.filter(pl.col("name").cast(pl.String) == name)["id"]
    launched = trace.kernels.filter(pl.col("op").is_in(ids.implode()) | pl.col("owner").is_in(ids.implode()))
    return _widen_span(_find_longest(_select_analysed(launched, analysis)), analysis)


def find_kernel_span(analysis: Analysis, bound: str) -> Span | None:
    """Return the stretch around the longest kernel with this bound in the analysed steps; None where there is none."""
    return _widen_span(_find_longest(_select_analysed(analysis.trace.kernels.filter(pl.col("bound") == bound), analysis)), analysis)


def _select_analysed(kernels: pl.DataFrame, analysis: Analysis) -> pl.DataFrame:
    """Return the kernels launched in analysed steps, all where none is."""
    steps = analysis.steps.filter("analysed")["id"]
    inside = kernels.filter(pl.col("step").is_in(steps.implode()))
    return inside if inside.height else kernels


def _find_longest(pieces: pl.DataFrame) -> Span | None:
    if not pieces.height:
        return None
    start, end = pieces.select("start_ns", "end_ns").row(int((pieces["end_ns"] - pieces["start_ns"]).arg_max() or 0))
    return int(start), int(end)


def _widen_span(span: Span | None, analysis: Analysis) -> Span | None:
    """Return the stretch with what is around it, within the analysed steps as far as the stretch itself is."""
    if span is None:
        return None
    margin = max(LEAST_NS, int(AROUND * (span[1] - span[0])))
    steps = analysis.steps.filter("analysed")
    first = min(int(steps["start_ns"].min() or 0), span[0]) if steps.height else 0  # type: ignore[arg-type]
    last = max(int(steps["end_ns"].max() or 0), span[1]) if steps.height else span[1] + margin  # type: ignore[arg-type]
    return max(first, span[0] - margin), min(last, span[1] + margin)


class Findings(ContentPage):
    """The findings of a recording, those that matter first; `rule` in the query opens one of the others."""

    path, title = "/findings", "Findings"

    def content(self, view: View, library: Library) -> list[Component]:
        """Return the page."""
        opened = library.opened(view.bundle or "", view.rank)
        report = opened.report
        full, rest = findings.split_findings(report)
        shown = [
            _build_card(values, finding, opened, view) for values, finding in zip(sections.build_cards(report), (*full, *rest), strict=True)
        ]
        gains = findings.explain_gains(report)
        page: list[Component] = [html.H1("Findings"), *([components.build_quiet(gains)] if gains else []), *shown[: len(full)]]
        if not shown:
            page = [html.H1("No findings"), html.P(components.clean_long_text(labels.format_nothing_found(report)))]
        if rest:
            asked = view.query.get("rule") in {finding.rule for finding in rest}
            page.append(html.Details([html.Summary(f"{len(rest)} more, of less weight"), *shown[len(full) :]], open=asked))
        return [*page, html.H2("Rules"), html.P(labels.format_rule_counts(report)), *_build_rules(report)]


def _build_card(values: dict[str, Any], finding: Finding, opened: AnalysedRecording, view: View) -> Component:
    places = [components.build_link(label, href) for label, href in build_finding_links(finding, opened.report.ops, opened.analysis, view)]
    tags = [
        html.Span(finding.severity, className="tag"),
        html.Span(f"{values['rule']}, {finding.confidence} confidence", className="quiet"),
    ]
    return html.Article(
        [
            html.H2([values["title"], " ", *tags]),
            html.P(values["message"]),
            *_build_gain(values),
            *_build_places(values, view),
            *_build_fixes(values, finding, view),
            html.Div(places, className="links"),
            html.Details([html.Summary("Why, and the figures behind it"), *_build_details(values)]),
        ],
        className=f"card {finding.severity}",
        id=f"finding-{values['rule']}",
        tabIndex=-1,  # the script moves there when the address names the rule
    )


def _build_gain(values: dict[str, Any]) -> list[Component]:
    line = [html.P(values["gain"])] if values["gain"] else []
    if values["gain_percent"] is None:
        return line
    return [*line, html.Div(html.Span(style={"width": f"{values['gain_percent']}%"}), className="gain-bar", **{"aria-hidden": "true"})]


def _build_places(values: dict[str, Any], view: View) -> list[Component]:
    """Return where it is; what names an op leads to it."""
    if not values["where"]:
        return []
    items = [
        html.Li(components.build_link(html.Code(said), view.href("/ops", op=op)) if op else html.Code(said)) for said, op in values["where"]
    ]
    return [html.H3("Where"), html.Ul(items)]


def _build_fixes(values: dict[str, Any], finding: Finding, view: View) -> list[Component]:
    if not values["fixes"]:
        return []
    rows = [part for fix, told in zip(finding.fixes, values["fixes"], strict=True) for part in _build_fix(fix, told, view)]
    return [html.H3("Fixes, and how to test them"), html.Dl(rows, className="fixes")]


def _build_fix(fix: str, told: dict[str, str], view: View) -> list[Component]:
    effect = [html.Span(f" {told['effect']}", className="quiet")] if told["effect"] else []
    test = [html.Span([" ", components.build_link("Test it", view.href("/experiments", fix=fix))])] if told["test"] else []
    change = [html.Dd(html.Code(told["change"]))] if told["change"] else []
    command = [html.Dd(html.Code(told["test"]), className="test")] if told["test"] else []
    return [html.Dt([told["title"], *effect, *test]), *change, *command]


def _build_details(values: dict[str, Any]) -> list[Component]:
    evidence = [html.Tr([html.Th(fact, scope="row"), html.Td([value, html.Small(meaning)])]) for fact, value, meaning in values["evidence"]]
    folded = [html.Li(f"{rule}: {said}" if said else rule) for rule, said in values["folded"]]
    references = [
        html.Li(html.A(text, href=link, rel="noopener noreferrer", target="_blank") if link else text)
        for text, link in values["references"]
    ]
    return [
        *([html.P(values["why"])] if values["why"] else []),
        *([html.Table(html.Tbody(evidence), className="facts")] if evidence else []),
        *([html.P("Also explains:"), html.Ul(folded)] if folded else []),
        *([html.P("References:"), html.Ul(references)] if references else []),
    ]


_STATUS_WORDS = {
    "fired": "fired",
    "error": "failed",
    "suppressed": "withheld",
    "not_applicable": "not applicable",
    "passed": "passed",
}
"""Status of a rule -> as it is shown, in this order."""


def _build_rules(report: ReportData) -> list[Component]:
    """Return every rule with its status and the reason, folded."""
    if not report.rules:
        return []
    order = list(_STATUS_WORDS)
    ranked = sorted(report.rules, key=lambda rule: (order.index(rule.status), rule.id))
    rows = [[components.clean_text(rule.id, 60), _STATUS_WORDS[rule.status], components.clean_text(rule.reason, 400)] for rule in ranked]
    table = components.build_table([components.Column("rule"), components.Column("status"), components.Column("reason")], rows, "Rules")
    return [html.Details([html.Summary("Every rule, its status and the reason"), table])]


PAGE = Findings()
