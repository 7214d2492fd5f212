"""All rules as one HTML file that needs no network, generated from their files; and those that a report speaks of."""

from __future__ import annotations

from itertools import groupby

from gpudiag.diagnosis.config import notes
from gpudiag.diagnosis.rule import RuleBase
from gpudiag.model.report import ReportData
from gpudiag.report.html.templating import asset, policy, template
from gpudiag.report.rulepages import RulePage, page_of


def render_rules(rules: RuleBase, tool: str) -> str:
    """Return the page: an index by category, then each rule with its id as anchor; `tool`: name and version."""
    pages = sorted(map(page_of, rules.all), key=lambda page: (page.category, page.id))
    return template("rules.html.j2").render(
        tool=tool,
        count=f"{len(rules.judged)} rules are judged, {len(rules.advisories)} are advice that no data could judge",
        notes=notes(rules.judged),
        categories=[(title, list(members)) for title, members in groupby(pages, key=lambda page: page.category)],
        css=asset("report.css"),
        csp=policy([]),
    )


def pages_of(report: ReportData, rules: RuleBase | None) -> tuple[RulePage, ...]:
    """Return the pages of the rules that the findings of `report` name, by id; none where the rules are not known."""
    if rules is None:
        return ()
    named = {rule for finding in report.findings for rule in (finding.rule, *finding.folded)}
    return tuple(page_of(rule) for rule in rules.all if rule.id in named)
