"""The self-contained HTML pages: report, rules, comparison, experiments; their templates and security policy."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec

from gpudiag.diagnosis.config import list_config_changes
from gpudiag.diagnosis.rule import ADVISORY, Advisory, Rule, RuleBase
from gpudiag.facts import find_fact
from gpudiag.fixes import FIX_BY_ID
from gpudiag.model.comparison import StepComparison
from gpudiag.model.experiment import ExperimentData
from gpudiag.model.report import ReportData
from gpudiag.report import comparison, data_quality, environment, findings, labels, whole_run
from gpudiag.report.console import clean, clean_prose, encode_script_json, join_units
from gpudiag.report.experiment import summary
from gpudiag.report.experiment.intervals import draw_intervals
from gpudiag.report.html import ranks, sections
from gpudiag.report.html.tables import build_tables
from gpudiag.units import format_ns, format_share

if TYPE_CHECKING:
    from jinja2 import Template


def build_policy(scripts: list[str]) -> str:
    """Return the Content-Security-Policy: these scripts by their hashes (CSP level 2), inline styles, no request of any kind."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts)
    allowed = hashes or "'none'"
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


@cache
def read_asset(name: str) -> str:
    """Return the text of a file beside the templates."""
    return (files("gpudiag.report.html") / "templates" / name).read_text(encoding="utf-8")


@cache
def load_plotly_js() -> str:
    """Return plotly's script, about 5 MB."""
    from plotly.offline import get_plotlyjs

    # An HTML parser turns CR LF into LF; the hash is of what it sees.
    return str(get_plotlyjs()).replace("\r\n", "\n").replace("\r", "\n")


@cache
def load_template(name: str) -> Template:
    """Return a template: values are escaped, a name that is not given is an error."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(read_asset)
    )
    return environment.get_template(name)


CATEGORY_TITLES = {
    "eff": "Efficiency and measurement",
    "ovh": "Overhead of the host",
    "syn": "Synchronisation",
    "inp": "Input",
    "cmp": "Compute",
    "mem": "Memory traffic",
    "cap": "Memory capacity",
    "dst": "Distributed training",
    "hw": "Hardware and system",
    "inf": "Inference",
    "gnn": "Graph networks",
}
"""Category -> title (rules.md); a category of the user's own is its own title."""


class RuleRow(msgspec.Struct, frozen=True):
    """One property of a rule."""

    label: str
    lines: tuple[str, ...]
    code: bool = False


class RulePage(msgspec.Struct, frozen=True):
    """One rule to read."""

    id: str
    title: str
    category: str
    state: str
    """stable, preview, advisory, or 'switched off (gpudiag.toml)'."""
    rows: tuple[RuleRow, ...]


def name_rule_state(rule: Rule | Advisory) -> str:
    """Return the maturity of `rule`, or that the user switched it off."""
    if isinstance(rule, Rule) and rule.disabled:
        return f"switched off ({rule.disabled})"
    return rule.file.maturity


def build_rule_page(rule: Rule | Advisory) -> RulePage:
    """Return the page of `rule`; properties that it does not have are left out."""
    file = rule.file
    fixes = [FIX_BY_ID[identifier] for identifier in file.fixes]
    common = [
        RuleRow("why", (_join_lines(file.why),)),
        RuleRow("explains", (", ".join(file.explains),), code=True),
        RuleRow("fixes", tuple(f"{fix.id}: {fix.title}" + (f", {_join_lines(fix.change)}" if fix.change else "") for fix in fixes)),
        RuleRow("device", (", ".join(file.device_kinds),)),
        RuleRow("maturity", (file.maturity if file.maturity != ADVISORY else "",)),
        RuleRow("references", file.references),
        RuleRow("file", (rule.source,)),
    ]
    if isinstance(rule, Advisory):
        rows = [RuleRow("judged", ("never: no recording holds the data",)), RuleRow("needs", (_join_lines(rule.file.needs),)), *common]
    else:
        # When it fires, what it says then, and the facts that it asks for
        judged = rule.file
        facts = [(name, fact) for name in sorted(rule.when.names) if (fact := find_fact(name)) is not None]
        levels = (level if when is True else f"{level} when {when}" for level, when in judged.severity.items())
        params = judged.params.items()
        suppressed = (f"{', '.join(item.rules)} while {_join_lines(item.when)}: {_join_lines(item.reason)}" for item in judged.withholds)
        bound = f"{judged.ceiling.time_ns}  (if {rule.what_if})" if judged.ceiling else "none of its own"
        if judged.ceiling and judged.ceiling.otherwise:
            bound += f", what_if_ns by {' and '.join(judged.what_ifs)}, else {_join_lines(judged.ceiling.otherwise)}"
        own_facts = (f"{name} ({own.unit}): {own.doc} = {_join_lines(own.sql)}" for name, own in judged.facts.items())
        rows = [
            RuleRow("fires when", (_join_lines(judged.when),), code=True),
            *(RuleRow(f"  {name}", (f"{one.value:g}{f' {one.unit}' if one.unit else ''}  ({one.origin})",)) for name, one in params),
            RuleRow("severity", tuple(levels), code=True),
            RuleRow("message", (_join_lines(judged.message),)),
            RuleRow("details", tuple(f"where {_join_lines(item.when)}: {_join_lines(item.text)}" for item in judged.details)),
            RuleRow("upper bound", (bound,)),
            RuleRow("own facts", tuple(own_facts)),
            RuleRow("facts", tuple(f"{name} ({fact.unit}): {fact.doc}" for name, fact in facts)),
            RuleRow("suppresses", tuple(suppressed)),
            *common,
            RuleRow("not suggested", tuple(f"{fix} while {_join_lines(when)}" for fix, when in judged.needless.items())),
            RuleRow("tests", tuple(f"{test.name or 'without a name'}: {test.expect}" for test in judged.tests)),
        ]
    shown = tuple(RuleRow(row.label, lines, row.code) for row in rows if (lines := tuple(text for text in row.lines if text)))
    return RulePage(rule.id, file.title, CATEGORY_TITLES.get(file.category, file.category), name_rule_state(rule), shown)


def _join_lines(text: str) -> str:
    return " ".join(text.split())


_WIDE_ENOUGH = 0.07
"""Share from which a segment of the bar has room for its percentage."""

_WIDE_ON_A_PHONE = 0.17

_SCALE_PARTS = 4


def build_page_context(report: ReportData) -> dict[str, Any]:
    """Return the values of the page template, without scripts and figures."""
    name = [part for part in clean(report.source.path).replace("\\", "/").split("/") if part]
    step_ns = labels.step_ns(report)
    references = report.mfu.references if report.mfu else ()
    trust = data_quality.list_quality_lines(report)
    if report.device is not None:  # where the peaks come from, and the notes of the device table; too much for the terminal
        said = {report.device.source, *report.trust.warnings}
        notes = " ".join(note for note in dict.fromkeys(report.device.notes) if note not in said)
        trust += [(topic, text) for topic, text in (("peaks from", report.device.source), ("device notes", notes)) if text]
    return {
        "tool": f"{report.tool.name} {clean(report.tool.version)}",
        "source": clean(report.source.path),
        "device": clean(report.device.name) if report.device else "unknown device",
        "verdict": clean_prose(labels.format_verdict(report)),
        "title": f"{name[-1] if name else 'report'} - {report.tool.name}",
        "span": labels.name_span(report),
        "span_phrase": labels.format_span(report),
        "total_time": format_ns(step_ns),
        "summed_over": f"the {report.steps.count} analysed steps" if report.steps.count > 1 else f"the {labels.name_span(report)}",
        "scale": [format_ns(step_ns * part / _SCALE_PARTS) if part else "0" for part in range(_SCALE_PARTS + 1)],
        "idle_note": labels.format_idle_note(report),
        "headlines": [clean_prose(text) for text in (*data_quality.format_headlines(report), data_quality.format_steps(report))],
        "references": [
            (clean(item.what), clean_prose(data_quality.format_mfu_reference(item)), sections.split_reference(item.source))
            for item in references
        ],
        "buckets": [
            {
                "id": row.bucket.replace("_", "-"),
                "label": row.label,
                "time": format_ns(row.ns),
                "share": format_share(row.share, 1),
                "percent": f"{row.share * 100:.4f}",
                "idle": row.idle,
                "inside": format_share(row.share) if row.share >= _WIDE_ENOUGH else "",
                "named": row.share >= 0.24,  # share from which it has room for its name as well, on a wide page
                "tight": row.share < _WIDE_ON_A_PHONE,
            }
            for row in labels.build_bucket_rows(report, limit=16)
        ],
        "findings": sections.build_cards(report),
        "program": sections.PROGRAM_PLACEHOLDER,
        "matter_most": len(findings.split_findings(report)[0]),
        "on_gains": findings.explain_gains(report),
        "nothing_found": clean_prose(labels.format_nothing_found(report)),
        "gauges": _build_gauges(report),
        "trust": [(topic, clean_prose(text)) for topic, text in trust],
        "warnings": [clean_prose(warning) for warning in data_quality.list_warnings(report)],
        "recorded": [(topic, clean(said, environment.LONGEST_ENVIRONMENT_TEXT)) for topic, said in environment.list_environment(report)],
        "op_legend": labels.format_op_legend(report.ops),
        "rules_line": labels.format_rule_counts(report),
        "tables": build_tables(report),
        "idleness": sections.build_idle_context(report),
        "experiments": sections.build_experiments_context(report.experiments),
        "history": whole_run.build_history_context(report),
        "memory": sections.build_memory_context(report.memory),
        "strip": sections.build_strip_context(report),
        "ranks": ranks.build_ranks_context(report),
    }


def _build_gauges(report: ReportData) -> list[dict[str, str]]:
    found, work = report.trust, labels.name_work(report, 1)
    gauges = []
    shares = [(f"of the {work} time that can be modelled has a cost model", found.modelled_share)]
    if not labels.is_on_cpu(report):  # its work is the ops themselves
        shares.append((f"of all {work} time is attributed to the op that launched it", found.linked_share))
    for label, share in shares:
        if share is None:
            gauges.append({"value": "unavailable", "label": f"how much {label}", "percent": ""})
        else:
            gauges.append({"value": labels.format_part(share), "label": label, "percent": f"{min(1.0, max(0.0, share)) * 100:.2f}"})
    if (slowdown := found.profiler_slowdown) is None:
        return [*gauges, {"value": "unavailable", "label": "how much the profiler slows a step down", "percent": ""}]
    cost = {"value": f"{slowdown:.2f} x", "label": "the time of an unprofiled step: that of a profiled one", "percent": ""}
    return [*gauges, cost]


def render_rules_page(rules: RuleBase, tool: str) -> str:
    """Return the page: an index by category, then each rule with its id as anchor; `tool`: name and version."""
    pages = sorted(map(build_rule_page, rules.all), key=lambda page: (page.category, page.id))
    return load_template("rules.html.j2").render(
        tool=tool,
        count=f"{len(rules.judged)} rules are judged, {len(rules.advisories)} are advice that no recording can judge",
        notes=list_config_changes(rules.judged),
        categories=[(title, list(members)) for title, members in groupby(pages, key=lambda page: page.category)],
        css=read_asset("report.css"),
        csp=build_policy([]),
    )


_NAME_COLUMNS = ("op", "run")
_DETAILED_COLUMNS = ("op", "finding")


def render_comparison_page(found: StepComparison) -> str:
    """Return the page, with the TOP ops that changed most."""
    tables = []
    for table in comparison.build_comparison_tables(found, 200):
        columns = [
            {
                "title": title,
                "number": side == "r",
                "name": title in _NAME_COLUMNS,
                "detail": title in _DETAILED_COLUMNS,
                "wide": title in (*_NAME_COLUMNS, *_DETAILED_COLUMNS, "device", "part of the profiled step"),
            }
            for title, side in table.columns
        ]
        rows = [
            {"cells": [{"text": join_units(clean(cell.text)), "tone": cell.tone} for cell in row], "detail": clean_prose(detail)}
            for row, detail in zip(table.rows, table.details or ("",) * len(table.rows), strict=True)
        ]
        tables.append({"title": table.title, "columns": columns, "rows": rows, "notes": [clean_prose(note) for note in table.notes]})
    return load_template("compare.html.j2").render(
        policy=build_policy([]),
        style=read_asset("report.css"),
        title=clean(f"gpudiag: {found.a.path} against {found.b.path}", 200),
        headline=clean_prose(comparison.format_comparison_headline(found)),
        gate=clean_prose(comparison.format_speed_gate(found)),
        gate_failed=found.gate is not None and found.gate.fails,
        warnings=[clean_prose(said) for said in found.warnings],
        tables=tables,
        meaning=clean_prose(comparison.format_interval_meaning(found)),
    )


def render_experiments_page(data: ExperimentData, *, bundle: str = "") -> str:
    """Return the page; plotly.js (about 5 MB) is inside only where there is a chart to draw. `bundle`: where experiments lie, if known."""
    figure = draw_intervals(data.experiments)
    scripts = [*([load_plotly_js()] if figure else []), read_asset("report.js")]
    recipe, rows = data.recipe, summary.build_baseline_rows(data.baseline)
    changes = [(item.fix, item.title, summary.split_code_lines(item.code)) for item in summary.list_recipe_changes(recipe)]
    return load_template("experiment.html.j2").render(
        device=clean(data.baseline.device if data.baseline else ""),
        headline=clean_prose(summary.format_experiments_headline(data)),
        leads=[clean_prose(said) for said in summary.list_leads(data, bundle)],
        baseline=[(topic, clean(said, 2_000), topic == "command") for topic, said in rows],
        as_is="Baseline",
        proved=recipe.proved,
        changes=[(clean(fix), clean(title), "\n".join(lines)) for fix, title, lines in changes],
        as_it_is=summary.build_recipe_command(data, bundle),
        further=["\n".join(summary.split_code_lines(text)) for text in summary.list_variant_changes(recipe)],
        experiments=sections.build_experiments_context(data.experiments),
        csp=build_policy(scripts),
        css=read_asset("report.css"),
        scripts=scripts,
        figure=encode_script_json(figure) if figure else "",
        height=figure["layout"]["height"] if figure else 0,
    )
