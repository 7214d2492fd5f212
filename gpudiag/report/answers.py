"""Answers to single questions about a report: a part of it, its findings, one rule, ops, idle time; each with what its figures rest on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from gpudiag.model.report import OpRow, ReportData
from gpudiag.report import brief, data_quality, document, findings, idle_time, labels, op_table, telemetry, whole_run
from gpudiag.report.blocks import DOCUMENT, PAGE, Amount, Block, Code, Document, Paragraph, Section, Table, Topics, say_all
from gpudiag.report.memory import HOW_TO_RECORD

Part = Literal["brief", "whole", "breakdown", "ranks", "experiments", "history", "telemetry", "memory", "quality", "environment", "rules"]
_ANCHORS: dict[Part, str] = {
    "breakdown": "goes", "ranks": "ranks-title", "experiments": "experiments", "history": "history-title", "telemetry": "telemetry-title",
    "memory": "memory-title", "quality": "trust", "environment": "recorded-title", "rules": "rules-title",
}  # fmt: skip
"""Part of a report -> the anchor of its section."""


def build_part(part: Part, report: ReportData, script: str = "") -> Document:
    """Return a part of the report; where there is none, why, and what to record. `script`: as of build_document."""
    if part == "brief":
        return brief.build_brief(report, script)
    made = document.build_document(report, DOCUMENT, script=script)
    if part == "whole":
        return made
    found = tuple(section for section in made.sections if section.anchor == _ANCHORS[part])
    said = "" if found else _explain_missing_part(part, report)
    return _answer(f"gpudiag report: {part}", report, found, say_all([said]))


def _explain_missing_part(part: Part, report: ReportData) -> str:
    reasons: dict[Part, str] = {
        "breakdown": "no time was analysed: the recording holds no complete step",
        "ranks": brief.ALONE,
        "experiments": "none was made in this bundle: gpudiag ab -o BUNDLE keeps its results there",
        "history": whole_run.explain_missing_history(report),
        "telemetry": telemetry.NOT_RECORDED,
        "memory": f"no memory was recorded: {HOW_TO_RECORD}",
        "environment": "a trace alone does not say what it was recorded with: gpudiag run and gpudiag.profile write it into the bundle",
    }
    return f"Not known: {reasons.get(part) or 'the report has no such part'}"


_LISTED = Amount(document=True, places=2, fixes=2)


def build_findings_answer(report: ReportData, script: str = "") -> Document:
    """Return the findings that matter with their evidence, the others by name, what was suppressed and why, and how many were judged."""
    full, rest = findings.split_findings(report)
    cards: list[Block] = [findings.build_finding_card(number, one, report, _LISTED, script) for number, one in enumerate(full, 1)]
    if not full:
        cards = [Paragraph(labels.format_nothing_found(report))]
    sections = [Section("Findings", (*cards, *say_all([findings.explain_gains(report), brief.BOUND_IS_NO_PROMISE])))]
    if rest:
        named = tuple(Paragraph(f"{number}. {findings.format_finding_brief(one)}") for number, one in enumerate(rest, len(full) + 1))
        sections.append(Section(f"And {len(rest)} more", named))
    others = say_all([labels.format_rule_counts(report), *data_quality.list_suppressed_rules(report, reasons=True)])
    sections.append(Section("Rules", tuple(others)))
    if command := findings.build_ab_command(report, script):
        sections.append(Section("Measure it before you change the code", (Code(command, output=True),)))
    return _answer("gpudiag report: findings", report, sections)


def build_rule_answer(report: ReportData, rule: str, title: str, why: str, script: str = "") -> Document:
    """Return all of the finding of `rule`; where it found nothing, its status and reason. `title`, `why`: those of the rule."""
    amount = msgspec.structs.replace(DOCUMENT, page=True, places=6)  # with why and references
    listed = enumerate(labels.select_findings(report), 1)
    found = next(((number, one) for number, one in listed if one.rule == rule), None)
    said: list[Block] = []
    if found is not None:
        number, one = found
        said.append(findings.build_finding_card(number, one, report, amount, script))
        said.append(Paragraph(brief.BOUND_IS_NO_PROMISE))
        tests = [findings.explain_test(fix, report, script) for fix in one.fixes]
        commands = "\n".join(test for test, _ in tests if test)
        said += [*([Code(commands, output=True)] if commands else []), *say_all(dict.fromkeys(note for _, note in tests))]
    else:
        outcome = next((one for one in report.rules if one.id == rule), None)
        status = data_quality.RULE_ORDER[outcome.status] if outcome else "not judged"
        cause = next((one for one in report.findings if rule in one.folded), None)
        under = f"a symptom of {cause.rule}, which explains it" if cause else ""
        reason = outcome.reason if outcome else "no recording of this kind of device holds its data"
        rows = (("rule", title), ("status", under or status), ("reason", reason), ("why", why))
        said.append(Topics(tuple((topic, " ".join(text.split())) for topic, text in rows if text)))
    return _answer(f"gpudiag report: {rule}", report, [Section(rule, tuple(said))])


def build_ops_answer(report: ReportData, table: op_table.OpTable, name: str = "") -> Document:
    """Return the groups of `table` whose name holds `name`."""
    groups = tuple(group for group in table.groups if name.lower() in group.name.lower())
    made = op_table.build_ops_document(msgspec.structs.replace(table, groups=groups), len(groups))
    span = labels.format_span(report) if report.steps.count == 1 else f"all {report.steps.count} analysed steps"
    return _answer("gpudiag ops", report, [Section(f"Ops, sums over {span}", made.leads)])


def build_signatures_answer(report: ReportData, rows: Sequence[OpRow], name: str = "") -> Document:
    """Return those of `rows` whose name holds `name`, by time, with the lines that call them."""
    chosen = [row for row in rows if name.lower() in row.name.lower()]
    section = op_table.build_ops_section(report, msgspec.structs.replace(PAGE, ops=len(chosen)), chosen)  # with where costs come from
    return _answer("gpudiag ops", report, [section] if section else [], say_all(["" if section else "No op passes these filters."]))


def build_idle_answer(report: ReportData) -> Document:
    """Return why the device was idle: causes with call sites, calls that synchronise, the launch queue, the critical path."""
    section = idle_time.build_idle_section(report, msgspec.structs.replace(DOCUMENT, places=6))
    note = labels.format_idle_note(report) or ("" if section else "No idle time was seen.")
    tables = [block for block in section.blocks if isinstance(block, Table)] if section else []
    meanings = [f"{column.title}: {column.help}" for table in tables for column in table.columns if column.help]
    legend = [Section("What the columns mean", (Paragraph(f"{'; '.join(meanings)}."),))] if meanings else []
    return _answer("gpudiag report: idle time", report, [*([section] if section else []), *legend], say_all([note]))


def _answer(name: str, report: ReportData, sections: Sequence[Section], leads: Sequence[Block] = ()) -> Document:
    basis = Paragraph(data_quality.format_basis(report), "quiet")
    return Document(name, labels.format_pace(report), (report.source.path,), tuple(leads), tuple(sections), (basis,))
