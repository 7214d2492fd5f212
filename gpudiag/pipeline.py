"""The flow of one report: open a recording, analyse it, judge it, build the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from gpudiag.analysis import analyse
from gpudiag.cache import find_version
from gpudiag.diagnosis import judge
from gpudiag.diagnosis.loader import load_active_rules
from gpudiag.diagnosis.rule import RuleBase
from gpudiag.facts import Facts
from gpudiag.inputs import Input, open_rank, select_rank
from gpudiag.model.analysis import Analysis
from gpudiag.model.experiment import ExperimentData
from gpudiag.model.job import Job
from gpudiag.model.notices import Notice, NoticeCode, make_notice
from gpudiag.model.report import ReportData, Tool
from gpudiag.recordings.code_lines import read_code_lines
from gpudiag.recordings.paths import find_ranks
from gpudiag.report_data import build_report_data
from gpudiag.timeline.whatif.study import run_what_ifs
from gpudiag.trace.table_store import release_memory
from gpudiag.units import Progress


class AnalysedRecording(NamedTuple):
    """One analysed window."""

    report: ReportData
    analysis: Analysis
    """The tables of the trace (ops, kernels, ...) with costs, steps, gaps and causes."""


class ReportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a recording besides which rank and window. Small: it is answered on another machine as well."""

    modules: bool = False
    gpu_hour_price: float | None = None
    planned_steps: int | None = None
    graph_capture: str | None = None
    """A trace of the pass that captured the graphs which the recording replays, or a folder of such."""


def open_recording(
    path: str | Sequence[str], *, rank: int | None = None, window: int | None = None, progress: Progress | None = None
) -> AnalysedRecording:
    """Open the report on `path` and the analysis behind it, judged by the built-in rules.

    Several ranks are one job, and the analysis is that of its shown rank; `rank`: that one alone. `progress` is told what is being done.
    Raises InputError where nothing can be read.
    """
    paths = [path] if isinstance(path, str) else list(path)
    return diagnose_paths(paths, load_active_rules([], None), progress or (lambda _: None), rank=rank, window=window)


def diagnose_paths(
    paths: Sequence[str], base: RuleBase, tell: Progress, question: ReportOptions | None = None, *, rank: int | None = None,
    window: int | None = None, report_only: bool = False,
) -> AnalysedRecording:  # fmt: skip
    """Diagnose all ranks that `paths` name, or `rank` alone, by the rules of `base`. Raises InputError, UsageError.

    `report_only`: nobody asks for the tables, see `diagnose_window`.
    """
    recording = find_ranks(paths, window)
    if rank is not None or len(recording.numbers) < 2:
        job, chosen = None, select_rank(recording, rank, window)
    else:
        from gpudiag.ranks import compare_recorded_ranks

        job = compare_recorded_ranks(recording, tell)
        chosen = open_rank(recording.one(job.shown_rank))._replace(source=recording.source)
    return diagnose_window(chosen, base, tell, question, job=job, report_only=report_only)


def diagnose_window(
    chosen: Input,
    base: RuleBase,
    tell: Progress,
    question: ReportOptions | None = None,
    *,
    job: Job | None = None,
    report_only: bool = False,
) -> AnalysedRecording:
    """Diagnose one window by the rules of `base`; `job`: all ranks compared, where it is one of several. Raises InputError.

    `report_only`: nobody asks for the tables; see `analyse` for what is not kept then, unless the SQL of a rule asks for it.
    """
    asked = question or ReportOptions()
    if asked.graph_capture is not None:
        chosen = chosen._replace(graph_capture=Path(asked.graph_capture))
    tell("reading")
    keep_frames = not report_only or any("frames" in fact.sql.lower() for rule in base.judged for fact in rule.file.facts.values())
    analysis = analyse(chosen, tell, modules=asked.modules, keep_frames=keep_frames)
    experiments: tuple[ExperimentData, ...] = ()
    unread: tuple[Notice, ...] = ()
    if chosen.bundle is not None:
        from gpudiag.report.experiment.results import read_results

        experiments, unread = read_results(chosen.bundle.path)
    analysis = msgspec.structs.replace(
        analysis, experiments=experiments, gpu_hour_price=asked.gpu_hour_price, planned_steps=asked.planned_steps, job=job
    )
    release_memory()
    rules = [rule for rule in base.judged if analysis.device_kind in rule.file.device_kinds]
    what_ifs = run_what_ifs(analysis, (rule.file.what_ifs for rule in rules if rule.file.what_ifs))
    tell("judging")
    release_memory()
    facts = Facts(analysis, what_ifs)
    judgement = judge(analysis, base.judged, facts)
    failed = [make_notice(NoticeCode.FACT_FAILED, fact=name, reason=error) for name, error in judgement.fact_errors.items()]
    if base.old_names:
        failed.append(make_notice(NoticeCode.OLD_FACT_NAMES, names=", ".join(base.old_names)))
    analysis = msgspec.structs.replace(analysis, notices=(*chosen.notices, *analysis.notices, *unread, *failed))
    data = build_report_data(
        analysis, judgement.findings, judgement.outcomes, tool=Tool("gpudiag", find_version("gpudiag") or "unknown"), source=chosen.source,
        facts=facts,
    )  # fmt: skip
    if chosen.bundle is not None:
        named = [*(place for finding in data.findings for place in finding.where[:_MOST_PLACES]), *data.lines]
        data = msgspec.structs.replace(data, code=read_code_lines(named, chosen.bundle.path, chosen.bundle.manifest))
    return AnalysedRecording(data, analysis)


_MOST_PLACES = 3
"""Places of a finding whose lines are read: pages name as many."""
