"""A recording with everything that was found in it: the report, and the tables that it was made from."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import polars as pl

from gpudiag.api.analysis import analyse
from gpudiag.api.inputs import Input, resolve_input
from gpudiag.api.installed import version
from gpudiag.api.results import stored
from gpudiag.diagnosis import judge
from gpudiag.diagnosis.loader import rules_in_force
from gpudiag.diagnosis.rule import RuleBase
from gpudiag.facts import Facts
from gpudiag.model.analysis import Analysis
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


def open_recording(path: str, *, rank: int | None = None, window: int | None = None, progress: Progress | None = None) -> Opened:
    """Return the report on `path` and the analysis behind it, judged by the built-in rules.

    `progress` is told what is being done. Raises InputError where nothing can be read.
    """
    return diagnosed(resolve_input(path, rank, window), rules_in_force([], None), progress or (lambda _: None))


def diagnosed(
    chosen: Input, base: RuleBase, tell: Progress, *, modules: bool = False, gpu_hour_price: float | None = None,
    planned_steps: int | None = None,
) -> Opened:  # fmt: skip
    """Return what the rules of `base` say of one window. The options are those of `api.diagnose`. Raises InputError."""
    tell("reading")
    analysis, sites = analyse(chosen, tell, modules=modules)
    experiments, unread = ((), ()) if chosen.bundle is None else stored(chosen.bundle.path)
    analysis = msgspec.structs.replace(analysis, experiments=experiments, gpu_hour_price=gpu_hour_price, planned_steps=planned_steps)
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
