"""A report as one HTML file that needs no network: scripts and styles inside, nothing fetched, nothing evaluated from the trace."""

from __future__ import annotations

from gpudiag.diagnosis.rule import RuleBase
from gpudiag.model.report import ReportData
from gpudiag.report.escape import json_for_script
from gpudiag.report.experiment.figures import intervals
from gpudiag.report.html.figures import roofline, roofline_note
from gpudiag.report.html.page import context
from gpudiag.report.html.rankfigures import bars, traffic
from gpudiag.report.html.rulebook import pages_of
from gpudiag.report.html.templating import asset, plotly_js, policy, template


def render(report: ReportData, rules: RuleBase | None = None) -> str:
    """Return the page, with what there is to read about the rules that found something, where `rules` holds those that were judged.

    plotly.js (about 5 MB) is inside only where there is a figure to draw.
    """
    values = context(report)
    drawn = {
        "intervals": intervals(report.experiments), "rank-bars": bars(report), "traffic": traffic(report.job), "roofline": roofline(report),
    }  # fmt: skip
    figures = {name: figure for name, figure in drawn.items() if figure}
    data = {f"{name}-figure": figure for name, figure in figures.items()}
    data |= {f"{name}-data": table.data for name, table in values["tables"].items()}
    scripts = [asset("tables.js"), asset("report.js"), *([plotly_js()] if figures else [])]
    return template("report.html.j2").render(
        **values,
        pages=pages_of(report, rules),
        csp=policy(scripts),
        css=asset("report.css"),
        scripts=scripts,
        figures={name: figure["layout"]["height"] for name, figure in figures.items()},
        data={name: json_for_script(value) for name, value in data.items()},
        roofline_note=roofline_note(report),
    )
