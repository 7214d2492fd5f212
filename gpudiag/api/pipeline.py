"""The flow of one report: open a recording, analyse it, judge it, build the report; on a cluster, where its trace can be read."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec

from gpudiag.api.analysis import analyse
from gpudiag.api.cache import find_version
from gpudiag.api.inputs import Input, open_rank, select_rank
from gpudiag.api.ranks import RankInput, find_ranks
from gpudiag.diagnosis import judge
from gpudiag.diagnosis.config import Config
from gpudiag.diagnosis.loader import RULE_SUFFIX, load_active_rules
from gpudiag.diagnosis.rule import RuleBase
from gpudiag.errors import InputError
from gpudiag.facts import Facts
from gpudiag.files import read_file
from gpudiag.model.analysis import Analysis
from gpudiag.model.experiment import ExperimentData
from gpudiag.model.job import Job
from gpudiag.model.notices import Notice, NoticeCode, make_notice
from gpudiag.model.report import ReportData, Source, Tool, encode_report
from gpudiag.report.report_data import build_report_data
from gpudiag.timeline.whatif.study import run_what_ifs
from gpudiag.trace.table_store import release_memory

Progress = Callable[[str], None]


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
        from gpudiag.api.jobs import compare_recorded_ranks

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
        from gpudiag.api.experiment_store import read_results  # here: a trace file has none

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
    return AnalysedRecording(data, analysis)


MAX_RULE_BYTES = 1 << 20
"""A rule is a few kB."""


class ReportRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the report on the shown rank of a job is made from, but for its trace."""

    item: RankInput
    job: Job | None
    source: Source
    notices: tuple[Notice, ...] = ()
    """What the machine that asks has to say of the recording, first."""
    question: ReportOptions = ReportOptions()
    rules: tuple[dict[str, str], ...] = ()
    """Folders of further rules: file -> text. They are the user's, and nowhere but on his machine."""
    config: Config | None = None


def answer_report_request(request: bytes) -> bytes:
    """Return the report (JSON) that a request asks for: a ReportRequest as JSON. Raises InputError where the rank cannot be read."""
    asked = msgspec.json.decode(request, type=ReportRequest)
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpudiag-rules-"))) for _ in asked.rules]
        for folder, files in zip(folders, asked.rules, strict=True):
            for number, (name, text) in enumerate(files.items()):  # a folder each: a name that travelled is no path
                own = folder / f"{number:06d}"
                own.mkdir()
                (own / Path(name).name).write_text(text, encoding="utf-8")
        base = load_active_rules([str(folder) for folder in folders], asked.config)
        chosen = open_rank(asked.item)
        chosen = chosen._replace(source=asked.source, notices=(*asked.notices, *chosen.notices))
        return encode_report(diagnose_window(chosen, base, lambda _: None, asked.question, job=asked.job, report_only=True).report)


def pack_rules(folders: Sequence[str]) -> tuple[dict[str, str], ...]:
    """Return the rule files of `folders`. Raises InputError where one cannot be read."""
    packed = []
    for folder in folders:
        texts = {}
        for path in sorted(Path(folder).rglob(f"*{RULE_SUFFIX}")):
            try:
                if path.stat().st_size > MAX_RULE_BYTES:
                    hint = "leave it out of the folder of rules"
                    raise InputError(f"{path}: larger than {MAX_RULE_BYTES >> 20} MB, this is no rule", hint)
                texts[path.relative_to(folder).as_posix()] = read_file(path, MAX_RULE_BYTES).decode("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                hint = "check its access rights, and that it is UTF-8"
                raise InputError(f"{path}: cannot be read ({type(error).__name__})", hint) from None
        packed.append(texts)
    return tuple(packed)
