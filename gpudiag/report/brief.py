"""A report on one page, for people and for prompts: the same blocks, fewer of them, and what is not known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from gpudiag.model.notices import UNSEEN, NoticeCode
from gpudiag.model.report import ReportData
from gpudiag.report import data_quality, findings, first_screen, idle_time, labels, op_table, ranks, telemetry, whole_run
from gpudiag.report.blocks import (
    Amount,
    BarPart,
    Bars,
    Block,
    Code,
    Column,
    Document,
    Listing,
    Paragraph,
    Section,
    Table,
    Topics,
    build_row,
    build_section,
    build_share_cell,
    build_time_cell,
    say,
    say_all,
)
from gpudiag.report.memory import HOW_TO_RECORD

BRIEF = Amount(ops=3, places=1, fixes=1, what_ifs=1)
WORTH_A_LINE = 0.01
"""Share of the step below which a part of it has no line of its own."""
_CAUSES, _WARNINGS, _NAMED, _REASONS = 2, 2, 3, 1
TRACE_ALONE = "settings, other steps, clocks and power do not stand in a trace: gpudiag run and gpudiag.profile record them"
ALONE = "one rank alone was read: give the folder with the traces of all ranks to compare them"
BOUND_IS_NO_PROMISE = (
    "An upper bound is what a change cannot exceed, not what it will give, and it says nothing of what the model learns: "
    "gpudiag ab measures both."
)


def build_brief(report: ReportData, script: str | None = "") -> Document:
    """Return verdict, parts of a step, findings, what-ifs, idle causes and longest ops in short, how sure they are, and what is not known.

    `script`: the recorded program and its arguments, for the command that tries the fixes ('': not known).
    """
    device, what_ifs = report.device.name if report.device else "an unknown device", idle_time.build_what_if_section(report, BRIEF)
    causes = [cause for cause in idle_time.list_idle_causes(report, BRIEF.places)[:_CAUSES] if cause.share >= WORTH_A_LINE]
    sections = (
        _build_parts_section(report),
        _build_findings_section(report, script),
        build_section(f"{what_ifs.title}, gain at most", what_ifs.blocks[:1]) if what_ifs else None,
        _build_trust_section(report),
        build_section("Not known", [Topics(tuple(list_unknowns(report)))]),
        build_section(f"Why the {labels.name_device(report)} was idle", [idle_time.build_causes_table(causes)] if causes else []),
        _build_ops_section(report),
    )
    return Document(
        "gpudiag report",
        labels.format_verdict(report),
        (f"{report.tool.name} {report.tool.version} on {device}", report.source.path),
        tuple(say_all([*data_quality.format_headlines(report), ranks.format_straggler(report)], "lead")),
        tuple(section for section in sections if section is not None),
        (Paragraph(BOUND_IS_NO_PROMISE, "quiet"),),
    )


def _build_parts_section(report: ReportData) -> Section | None:
    bars = first_screen.build_bars(report)
    if bars is None:
        return None
    small = [part for part in bars.parts if part.share < WORTH_A_LINE]
    rest = BarPart("unknown", f"{len(small)} parts below 1 %", sum(part.ns or 0 for part in small), sum(part.share for part in small))
    parts = (*(part for part in bars.parts if part.share >= WORTH_A_LINE), *([rest] if len(small) > 1 else small))
    shown = Bars(parts, bars.total, bars.total_ns)
    return build_section(first_screen.title_breakdown(report), (shown, say(labels.format_idle_note(report), "quiet")))


def _build_findings_section(report: ReportData, script: str | None) -> Section:
    """Return the first finding in full; of the others that matter bound, place and fix, and of the rest the name."""
    full, rest = findings.split_findings(report)
    if not full:
        return Section("Findings", (Paragraph(labels.format_nothing_found(report)),))
    shown: list[Block] = [msgspec.structs.replace(findings.build_finding_card(1, full[0], report, BRIEF), symptoms=())]
    for number, one in enumerate(full[1:], 2):
        places = [labels.format_place(place, report) for place in one.where[:1]]
        fixes = [f"try: {title}" for title, _, _ in labels.list_fix_lines(one)[:1]]
        shown.append(Paragraph("; ".join([f"{number}. {findings.format_finding_brief(one)}", *places, *fixes])))
    if rest:
        more = f"; {len(rest) - _NAMED} more" if len(rest) > _NAMED else ""
        shown.append(Paragraph(f"Also: {'; '.join(map(findings.format_finding_brief, rest[:_NAMED]))}{more}"))
    gains, command = findings.explain_gains(report), findings.build_ab_command(report, script or "")
    measure = (Paragraph("Measure it before you change the code:"), Code(command, output=True)) if command else ()
    return Section("Findings", (*shown, *say_all([gains], "quiet"), *measure))


def _build_ops_section(report: ReportData) -> Section | None:
    groups = op_table.build_op_table(report).groups
    rows = [
        build_row(
            group.name, build_time_cell(group.kernel_ns), build_share_cell(group.share), group.bound,
            op_table.format_group_efficiency(group), group.provenance or "mixed",
        )
        for group in groups[: BRIEF.ops]
    ]  # fmt: skip
    columns = (
        Column("op", "name"), Column("time", "number"), Column("share", "number"), Column("bound"), Column("of roofline", "number"),
        Column("cost model"),
    )  # fmt: skip
    span = "1 step" if report.steps.count == 1 else f"{report.steps.count} steps"
    return build_section(f"Longest of {len(groups)} ops, over {span}", [Table(columns, tuple(rows))] if rows else [])


def _build_trust_section(report: ReportData) -> Section | None:
    wanted = ("measurement", "steps", "device", "profiler")
    shown: list[Block] = [Topics(tuple(line for line in data_quality.list_quality_lines(report) if line[0] in wanted))]
    warnings = data_quality.list_warnings(report, but={NoticeCode.NO_MFU})
    if warnings:
        rest = len(warnings) - _WARNINGS
        more = (f"{rest} more {labels.pluralize(rest, 'warning')} in the whole report",) if rest > 0 else ()
        shown.append(Listing((*warnings[:_WARNINGS], *more), "warning"))
    return build_section("How sure", shown)


def list_unknowns(report: ReportData) -> Iterator[tuple[str, str]]:
    """Yield (topic, why it is not known and what to record) of what this report cannot say."""
    figure, why = data_quality.split_mfu(report)
    if not figure:
        yield "MFU", why or "see data quality"
    if report.recorded is None:
        yield "the rest of the run", TRACE_ALONE
    elif missing := whole_run.explain_missing_history(report):
        yield "whole run", missing
    if report.recorded is not None and report.telemetry is None:
        yield "clocks, power", telemetry.NOT_RECORDED
    if report.memory is None:
        yield "peak memory", f"not recorded: {HOW_TO_RECORD}"
    if report.job is None and report.collectives:
        yield "other ranks", ALONE
    reasons = Counter(rule.reason for rule in report.rules if rule.notice is not None and rule.notice.code in UNSEEN)
    if reasons:
        most = "; ".join(f"{reason.rstrip('.')} ({count})" for reason, count in reasons.most_common(_REASONS))
        yield "rules", f"{reasons.total()} could not be judged, which is no all-clear; most often: {most}"
