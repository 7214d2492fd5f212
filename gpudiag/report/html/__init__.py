"""A report as one HTML file that needs no network: scripts and styles inside, nothing fetched, nothing evaluated from the trace."""

from __future__ import annotations

from gpudiag.diagnosis.rule import RuleBase
from gpudiag.model.report import ReportData
from gpudiag.report.console import encode_script_json
from gpudiag.report.experiment.intervals import draw_intervals
from gpudiag.report.html.pages import build_page_context, build_policy, build_rule_page, load_plotly_js, load_template, read_asset
from gpudiag.report.html.ranks import draw_rank_bars, draw_traffic
from gpudiag.report.html.roofline import draw_roofline, format_roofline_note


def render_html(report: ReportData, rules: RuleBase | None = None) -> str:
    """Return the page, with what there is to read about the rules that found something, where `rules` holds those that were judged.

    plotly.js (about 5 MB) is inside only where there is a figure to draw.
    """
    values = build_page_context(report)
    named = {rule for finding in report.findings for rule in (finding.rule, *finding.folded)}
    drawn = {
        "intervals": draw_intervals(report.experiments),
        "rank-bars": draw_rank_bars(report),
        "traffic": draw_traffic(report.job),
        "roofline": draw_roofline(report),
    }
    figures = {name: figure for name, figure in drawn.items() if figure}
    data = {f"{name}-figure": figure for name, figure in figures.items()}
    data |= {f"{name}-data": table.data for name, table in values["tables"].items()}
    scripts = [read_asset("tables.js"), read_asset("report.js"), *([load_plotly_js()] if figures else [])]
    return load_template("report.html.j2").render(
        **values,
        pages=[build_rule_page(rule) for rule in (rules.all if rules else ()) if rule.id in named],
        csp=build_policy(scripts),
        css=read_asset("report.css"),
        scripts=scripts,
        figures={name: figure["layout"]["height"] for name, figure in figures.items()},
        data={name: encode_script_json(value) for name, value in data.items()},
        roofline_note=format_roofline_note(report),
    )
