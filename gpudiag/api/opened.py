"""A recording with everything that was found in it: the report, and the tables that it was made from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import polars as pl

from gpudiag.api.analysis import analyse
from gpudiag.api.inputs import Input, alone
from gpudiag.api.installed import version
from gpudiag.api.ranks import find_ranks
from gpudiag.diagnosis import judge
from gpudiag.diagnosis.loader import rules_in_force
from gpudiag.diagnosis.rule import RuleBase
from gpudiag.facts import Facts
from gpudiag.model.analysis import Analysis
from gpudiag.model.experiment import ExperimentData
from gpudiag.model.job import Job
from gpudiag.model.report import ReportData, Tool
from gpudiag.report.build import build

Progress = Callable[[str], None]


class Opened(NamedTuple):
    """One analysed window."""

    report: ReportData
    analysis: Analysis
    """The tables of the trace (ops, kernels, ...) with costs, steps, gaps and causes."""
    sites: pl.Series | None = None
    """Call site of each op ('file.py(line): function', null where not known)."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a recording besides which rank and window. Small: it is answered on another machine as well."""

    modules: bool = False
    """One op row for each nn.Module."""
    gpu_hour_price: float | None = None
    planned_steps: int | None = None
    graph_capture: str | None = None
    """A trace of the pass that captured the graphs which the recording replays, or a folder of such."""


def open_recording(
    path: str | Sequence[str], *, rank: int | None = None, window: int | None = None, progress: Progress | None = None
) -> Opened:
    """Return the report on `path` and the analysis behind it, judged by the built-in rules.

    Several ranks are one job, and the analysis is that of its shown rank; `rank`: that one alone. `progress` is told what is being done.
    Raises InputError where nothing can be read.
    """
    paths = [path] if isinstance(path, str) else list(path)
    return opened(paths, rules_in_force([], None), progress or (lambda _: None), rank=rank, window=window)


def opened(
    paths: Sequence[str], base: RuleBase, tell: Progress, question: Question | None = None, *, rank: int | None = None,
    window: int | None = None, report_only: bool = False,
) -> Opened:  # fmt: skip
    """Return what the rules of `base` say of all ranks that `paths` name, or of `rank` alone. Raises InputError, UsageError.

    `report_only`: nobody asks for the tables, see `diagnosed`.
    """
    recording = find_ranks(paths, window)
    if rank is not None or len(recording.numbers) < 2:
        return diagnosed(alone(recording, rank, window), base, tell, question, report_only=report_only)
    from gpudiag.api import jobs

    job = jobs.find(recording, tell)
    return diagnosed(jobs.shown(recording, job), base, tell, question, job=job, report_only=report_only)


def diagnosed(
    chosen: Input, base: RuleBase, tell: Progress, question: Question | None = None, *, job: Job | None = None, report_only: bool = False
) -> Opened:
    """Return what the rules of `base` say of one window; `job`: all ranks compared, where it is one of several. Raises InputError.

    `report_only`: nobody asks for the tables; see `analyse` for what is not kept then, unless the SQL of a rule asks for it.
    """
    asked = question or Question()
    if asked.graph_capture is not None:
        chosen = chosen._replace(graph_capture=Path(asked.graph_capture))
    tell("reading")
    keep_frames = not report_only or any("frames" in fact.sql.lower() for rule in base.judged for fact in rule.file.facts.values())
    analysis, sites = analyse(chosen, tell, modules=asked.modules, keep_frames=keep_frames)
    experiments, unread = _experiments(chosen)
    analysis = msgspec.structs.replace(
        analysis, experiments=experiments, gpu_hour_price=asked.gpu_hour_price, planned_steps=asked.planned_steps, job=job
    )
    tell("judging")
    facts = Facts(analysis)
    judgement = judge(analysis, base.judged, facts)
    failed = tuple(f"fact {name} failed ({error}): this is a bug of gpudiag" for name, error in judgement.fact_errors.items())
    analysis = msgspec.structs.replace(analysis, warnings=(*chosen.warnings, *analysis.warnings, *unread, *failed))
    data = build(
        analysis, judgement.findings, judgement.outcomes, tool=Tool("gpudiag", version("gpudiag") or "unknown"), source=chosen.source,
        sites=sites.site, site_match_share=sites.match_share, facts=facts,
    )  # fmt: skip
    return Opened(data, analysis, sites.site)


def _experiments(chosen: Input) -> tuple[tuple[ExperimentData, ...], tuple[str, ...]]:
    """Return the experiments that the bundle holds, and warnings about those that cannot be read."""
    if chosen.bundle is None:
        return (), ()
    from gpudiag.api.results import stored  # here: a trace file has none

    return stored(chosen.bundle.path)
