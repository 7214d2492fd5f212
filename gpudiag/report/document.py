"""A report as a document: verdict and headlines, then each section once, in the order of every format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from gpudiag.model.report import ReportData
from gpudiag.report import (
    compilation,
    data_quality,
    environment,
    findings,
    first_screen,
    idle_time,
    labels,
    memory,
    op_table,
    rank_tables,
    roofline,
    telemetry,
)
from gpudiag.report import whole_run as run
from gpudiag.report.blocks import Amount, Block, Chart, Document, Fold, Paragraph, Section, Table, build_section, say, say_all

if TYPE_CHECKING:
    from gpudiag.diagnosis.rule import RuleBase


def build_document(report: ReportData, amount: Amount, *, script: str | None = None, rules: RuleBase | None = None) -> Document:
    """Return the report as far as a format tells it; a page begins with figures, and says the verdict beside the parts of a step.

    `script`: the recorded program and its arguments, for the commands that try fixes ('': not known, None: no command is named);
    `rules`: those that were judged, of which a page shows what there is to read on those that found something.
    """
    device = report.device.name if report.device else "an unknown device"
    names = [part for part in report.source.path.replace("\\", "/").split("/") if part]
    name = names[-1] if names else "report"
    tables: list[Section | None] = []
    if amount.page:
        tables = [
            _wrap_table("All idle time", idle_time.build_idle_table(report), "idle-title", "over all analysed steps"),
            _wrap_table("Collectives", op_table.build_collectives_table(report), "collectives-title"),
            _wrap_table("Kernels", op_table.build_kernels_table(report), "kernels-title"),
        ]
    pages: tuple[Fold, ...] = ()
    if rules is not None:
        from gpudiag.report import rule_pages  # it loads the rule engine, which printing a kept report does not need

        told = labels.list_fired_rules(report)
        pages = tuple(rule_pages.build_rule_fold(rule, "rule-") for rule in rules.all if rule.id in told)
    sections = [
        first_screen.build_breakdown_section(report) if amount.page else build_breakdown_section(report),
        None if amount.page else rank_tables.build_ranks_section(report, amount),
        findings.build_findings_section(report, amount, script),
        rank_tables.build_ranks_section(report, amount) if amount.page else None,
        build_experiments_section(report, amount),
        idle_time.build_what_if_section(report, amount),
        idle_time.build_idle_section(report, amount),
        compilation.build_compilation_section(report, amount),
        build_roofline_section(report) if amount.page else None,
        run.build_history_section(report, amount),
        telemetry.build_telemetry_section(report, amount),
        memory.build_memory_section(report.memory, amount),
        data_quality.build_quality_section(report, amount),
        op_table.build_ops_section(report, amount),
        environment.build_environment_section(report),
        *tables,
        data_quality.build_rules_section(report, amount, pages) if amount.document else None,
    ]
    leads = first_screen.build_leads(report) if amount.page else say_all(data_quality.format_headlines(report), "lead")
    return Document(
        "gpudiag report",
        labels.format_verdict(report),
        (f"{report.tool.name} {report.tool.version} on {device}", report.source.path),
        tuple(leads),
        tuple(section for section in sections if section is not None),
        () if amount.document else tuple(_list_foot(report, amount)),
        title=f"{name} - {report.tool.name}",
        heading=name if amount.page else "",
    )


def _list_foot(report: ReportData, amount: Amount) -> list[Paragraph]:
    more = "A rule in full: gpudiag rules show ID. Everything as one page: gpudiag report PATH -o report.html"
    suppressed = data_quality.list_suppressed_rules(report, reasons=amount.everything)
    return say_all([labels.format_rule_counts(report), *suppressed, more], "quiet")


def _wrap_table(title: str, table: Table, anchor: str, note: str = "") -> Section | None:
    return Section(title, (table,), anchor, note) if table.rows else None


def build_experiments_section(report: ReportData, amount: Amount) -> Section | None:
    """Return the experiments of a recording, None where there are none: what words them is loaded for those that have some."""
    if not report.experiments:
        return None
    from gpudiag.report.experiment import summary

    section = summary.build_outcomes_section(report.experiments, amount)
    if section is None or not amount.page:
        return section
    return msgspec.structs.replace(section, blocks=(*summary.build_verdicts(report.experiments), *section.blocks))


def build_breakdown_section(report: ReportData) -> Section | None:
    """Return where a step goes, None where no time was analysed."""
    bars = first_screen.build_bars(report)
    return (
        build_section(first_screen.title_breakdown(report), (bars, say(labels.format_idle_note(report), "quiet")), "goes") if bars else None
    )


def build_roofline_section(report: ReportData) -> Section:
    """Return the roofline, or why there is none."""
    figure = roofline.draw_roofline(report)
    label = "Roofline: achieved rate of each op against its arithmetic intensity; the same figures stand in the table of ops"
    charts: list[Block] = [Chart("roofline", figure, label)] if figure else []
    return Section("Roofline", (*charts, Paragraph(roofline.format_roofline_note(report), "quiet")), "roofline-title", nav="Roofline")


def build_notebook_document(report: ReportData, amount: Amount) -> Document:
    """Return what a notebook shows of a report: verdict, breakdown, findings, experiments, and folded ops and data quality."""

    ops = op_table.build_ops_section(report, amount)
    quality = data_quality.build_quality_section(report, amount)
    folds = tuple(Fold(f"{one.title} {f'({one.note})' if one.note else ''}", one.blocks) for one in (ops, quality) if one)
    sections = (
        build_breakdown_section(report), findings.build_findings_section(report, amount),
        build_experiments_section(report, amount),
    )  # fmt: skip
    device = report.device.name if report.device else "an unknown device"
    tool = f'{report.tool.name} {report.tool.version} on {device}. Everything as one page: report.save("report.html")'
    return Document(
        "gpudiag report",
        labels.format_verdict(report),
        leads=tuple(say_all(data_quality.format_headlines(report))),
        sections=tuple(section for section in sections if section is not None),
        foot=(*folds, Paragraph(tool, "quiet")),
    )
