"""Documents of a report as text, Markdown, page and notebook, as the commands and the public classes make them."""

from __future__ import annotations

from typing import Any

from gpudiag.api import Report
from gpudiag.comparison.recordings import CheckResult, Comparison
from gpudiag.diagnosis.rule import RuleBase
from gpudiag.experiment.result import ExperimentResult
from gpudiag.model.comparison import CheckData, StepComparison
from gpudiag.model.experiment import ExperimentData
from gpudiag.model.memory import MemoryReport
from gpudiag.model.report import ReportData
from gpudiag.report import findings, idle_time, memory, op_table
from gpudiag.report.blocks import DOCUMENT, PAGE, Document, Section
from gpudiag.report.render_html import render_page
from gpudiag.report.render_markdown import render_markdown as render_document_markdown
from gpudiag.report.render_text import render_text as render_document


def render_text(report: ReportData, **options: Any) -> str:
    return Report(report).text(**options)


def render_markdown(report: ReportData, **options: Any) -> str:
    return Report(report).markdown(**options)


def render_html(report: ReportData, rules: RuleBase | None = None) -> str:
    return Report(report, rules).html()


def render_notebook(report: ReportData) -> str:
    """Return the fragment, without the page that is folded below it."""
    fragment, _, _ = Report(report)._repr_html_().rpartition("<details><summary>The whole report")
    return fragment


def render_comparison_text(found: StepComparison, **options: Any) -> str:
    return Comparison(found).text(**options)


def render_comparison_markdown(found: StepComparison) -> str:
    return Comparison(found).markdown()


def render_comparison_page(found: StepComparison) -> str:
    return Comparison(found).html()


def render_gates_text(found: CheckData, **options: Any) -> str:
    return CheckResult(found).text(**options)


def render_experiments_text(data: ExperimentData, width: int = 100, color: bool = False) -> str:
    return ExperimentResult(data).text(width, color)


def render_experiments_markdown(data: ExperimentData) -> str:
    return ExperimentResult(data).markdown()


def render_experiments_page(data: ExperimentData) -> str:
    return ExperimentResult(data).html()


def render_experiments_notebook(data: ExperimentData) -> str:
    return ExperimentResult(data)._repr_html_()


def render_memory_text(found: MemoryReport, top: int = 10) -> str:
    return render_document(memory.build_memory_document(found, top))


def render_memory_markdown(found: MemoryReport | None) -> str:
    return _render_section(memory.build_memory_section(found, DOCUMENT))


def render_memory_page(found: MemoryReport | None) -> str:
    section = memory.build_memory_section(found, PAGE)
    return render_page(Document("memory", "", sections=(section,) if section else ()))


def _render_section(section: Section | None) -> str:
    return render_document_markdown(Document("memory", "", sections=(section,))) if section else ""


def render_op_table(table: op_table.OpTable, *, width: int = 100, top: int = 20, color: bool = False) -> str:
    return render_document(op_table.build_ops_document(table, top), width=width, color=color)


def render_what_ifs(what_ifs: Any, trust: Any, *, reason: str = "", width: int = 100) -> str:
    return render_document(idle_time.build_what_ifs_document(what_ifs, trust, reason), width=width)


def render_fix_list(pages: tuple[findings.FixPage, ...], width: int = 100) -> str:
    return render_document(findings.build_fix_list(pages), width=width)


def render_fix(page: findings.FixPage, width: int = 100) -> str:
    return render_document(findings.build_fix_page(page), width=width)
