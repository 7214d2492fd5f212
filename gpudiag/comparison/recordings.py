"""Recordings measured step by step: two of them compared, one checked against gates."""

from __future__ import annotations

import os
import secrets
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import polars as pl

from gpudiag.api import AnyPath, Rendered
from gpudiag.attribution import intervals
from gpudiag.cache import CachedResult, ResultKey, allow_cache, is_complete
from gpudiag.comparison.device_time import measure_parts, share_device_time
from gpudiag.diagnosis.loader import load_active_rules
from gpudiag.errors import InputError, UsageError
from gpudiag.files import open_file, read_file
from gpudiag.model.bundle import UNREADABLE
from gpudiag.model.comparison import CheckData, Gates, Measured, OpKey, StepComparison
from gpudiag.model.report import REPORT_SCHEMA_VERSION, ReportData, Source, decode_report, encode_report
from gpudiag.pipeline import AnalysedRecording, ReportOptions, diagnose_window
from gpudiag.roofline.op_table import BEFORE_WINDOW, build_op_steps
from gpudiag.timeline.history import SETTLED_AFTER
from gpudiag.units import Progress

if TYPE_CHECKING:
    from gpudiag.diagnosis.config import Config
    from gpudiag.model.analysis import Analysis


MAX_REPORT_BYTES = 256 << 20
"""Largest report that is read: a thousand times a usual one."""

_OP_KEYS = ("name", "phase", "module", "signature")


def measure_recording(
    path: AnyPath, *, rank: int | None = None, modules: bool = False, config: Config | None = None, progress: Progress | None = None
) -> Measured:
    """Measure the report on a bundle, a trace or a folder of ranks with the times of its steps, or the report in a .json file alone.

    Raises InputError where nothing can be read.
    """
    from gpudiag.inputs import resolve_input

    tell, name = progress or (lambda _: None), os.fspath(path)
    if name.lower().endswith(".json") and "://" not in name and os.path.isfile(name):
        report = read_report(Path(name))
        if report is not None:
            if rank is not None:
                raise UsageError(f"{name}: --rank chooses from a folder or a bundle, this is a report", "leave --rank out")
            return Measured(report=report)

    with allow_cache(config is None or config.cache):
        cached = CachedResult(ResultKey("measured", (name,), (rank, modules, config), rules=config.rules if config else ()))
        measured = cached.load(Measured)
        if measured is None:
            chosen = resolve_input(name, rank)
            measured = measure_analysed(diagnose_window(chosen, load_active_rules([], config), tell, ReportOptions(modules=modules)))
            measured = msgspec.structs.replace(measured, rank=min(chosen.source.ranks, default=None) if rank is None else rank)
            if is_complete(measured.report):
                cached.store(measured)
    return measured


def measure_analysed(opened: AnalysedRecording) -> Measured:
    """Measure what a recording that was opened already holds, step by step."""
    analysis = opened.analysis
    if analysis.step_records is None:
        plain = pl.DataFrame(schema={"wall_ns": pl.Int64, "samples": pl.Int64})
    else:
        records = analysis.step_records.filter((pl.col("step") >= SETTLED_AFTER) & (pl.col("window") == "plain"))
        plain = records.sort("step").select("wall_ns", "samples")
    steps = analysis.steps.filter("analysed").sort("id")
    starts, ends = (steps[name].to_numpy().astype(np.int64) for name in ("start_ns", "end_ns"))
    idle = intervals.measure_covered(intervals.build_spans(analysis.idle.filter(pl.col("cause") != "outside_recording")), starts, ends)
    # the kernel time of each op by analysed step, 0 in a step without the op; rows with the same text are added up
    place = {step: number for number, step in enumerate(steps["id"].to_list())}
    found = _find_rows(analysis, build_op_steps(analysis.trace, analysis.steps))
    sums: defaultdict[OpKey, list[int]] = defaultdict(lambda: [0] * len(place))
    for row, step, busy in found.select("row", "step", "busy_ns").iter_rows():
        named = opened.report.ops[row]  # the rows of a report stand in the order of the analysis
        sums[OpKey(named.name, named.phase, named.module, named.signature)][place[step]] += busy
    return Measured(
        report=opened.report,
        plain_ns=tuple(plain["wall_ns"].to_list()),
        plain_samples=tuple(plain["samples"].to_list()),
        analysed_ns=tuple((ends - starts).tolist()),
        idle_ns=tuple(idle.tolist()),
        ops={key: tuple(values) for key, values in sums.items()},
        parts_ns=measure_parts(analysis),
        device_ns=_collect_device_time(opened),
        command=(analysis.manifest.command or ()) if analysis.manifest else (),
    )


def _find_rows(analysis: Analysis, frame: pl.DataFrame) -> pl.DataFrame:
    """Return `frame` (name, phase, module, signature, ...) with the row of the ops that it belongs to; without what belongs to none."""
    rows = analysis.op_rows.select(*_OP_KEYS).with_row_index("row")
    if rows["module"].null_count() == rows.height:  # rows are not told apart by module, whose names the ops may have all the same
        frame = frame.with_columns(module=pl.lit(None, dtype=pl.String))
    return frame.join(rows, on=list(_OP_KEYS), nulls_equal=True)


def _collect_device_time(opened: AnalysedRecording) -> dict[OpKey, tuple[float, ...]]:
    """Return each op's share of the device's time by analysed step; without what has no row, as it was launched in no analysed step."""
    found = _find_rows(opened.analysis, share_device_time(opened.analysis))
    sums: defaultdict[OpKey, list[float]] = defaultdict(lambda: [0.0] * opened.report.steps.count)
    for row, step, shared in found.select("row", "step", "shared_ns").iter_rows():
        named = opened.report.ops[row]
        if named.phase != BEFORE_WINDOW:
            sums[OpKey(named.name, named.phase, named.module, named.signature)][step] += shared
    return {key: tuple(values) for key, values in sums.items()}


class _ReportHead(msgspec.Struct):
    """What tells a report from a trace: both are .json."""

    schema_version: int | None = None
    source: Source | None = None


def read_report(path: Path) -> ReportData | None:
    """Read the report in a file; None where it is something else, such as a trace. Raises InputError for one that cannot be read."""
    try:
        if path.stat().st_size > MAX_REPORT_BYTES:
            return None
        data = read_file(path, MAX_REPORT_BYTES)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", "give a bundle, a trace or a report") from None
    try:
        head = msgspec.json.decode(data, type=_ReportHead)
    except UNREADABLE:
        return None
    if head.schema_version is None or head.source is None:
        return None
    if head.schema_version > REPORT_SCHEMA_VERSION:
        raise InputError(
            f"{path}: a report of version {head.schema_version}, this gpudiag knows {REPORT_SCHEMA_VERSION}", "upgrade gpudiag"
        )
    try:
        return decode_report(data)
    except UNREADABLE as error:
        raise InputError(f"{path}: a report that cannot be read: {error}", "write it anew: gpudiag report PATH -o report.json") from None


MOST_OPS_ON_PAGE = 200


class Comparison(Rendered):
    """What changed from A to B: `data` is its JSON, version 1; the methods are its renderings."""

    def __init__(self, data: StepComparison) -> None:
        self.data: StepComparison = data

    def text(self, width: int | None = None, top: int = 15, color: bool = False) -> str:
        """Return it for a terminal of `width` columns (default 100) with the `top` ops that changed most."""
        from gpudiag.report.comparison import build_comparison
        from gpudiag.report.render_text import render_text

        return render_text(build_comparison(self.data, top), width=100 if width is None else width, color=color)

    def markdown(self, top: int = 30) -> str:
        """Return it as GitHub Markdown with the `top` ops that changed most."""
        from gpudiag.report.comparison import build_comparison
        from gpudiag.report.render_markdown import render_markdown

        return render_markdown(build_comparison(self.data, top))

    def html(self) -> str:
        """Return it as one self-contained HTML page."""
        from gpudiag.report.comparison import build_comparison
        from gpudiag.report.render_html import render_page

        return render_page(build_comparison(self.data, MOST_OPS_ON_PAGE))


def compare(
    a: AnyPath | AnalysedRecording | Measured,
    b: AnyPath | AnalysedRecording | Measured,
    *,
    rank: int | None = None,
    modules: bool = False,
    fail_if_slower: float | None = None,
    config: Config | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Return what changed from `a` to `b`: bundles, traces, folders of ranks, reports (.json), or what was opened or measured before.

    `modules`: ops are told apart by nn.Module where Python stacks tell it; `fail_if_slower`: a share, such as 0.03, for a gate in the
    result. Raises InputError where one cannot be read. Not for a program that goes on training: see `gpudiag.api.diagnose`.
    """
    from gpudiag.comparison.steps import compare_runs

    before, after = (
        _measure_side(one, name, rank=rank, modules=modules, config=config, progress=progress) for one, name in ((a, "A"), (b, "B"))
    )
    return Comparison(compare_runs(before, after, fail_if_slower=fail_if_slower))


def _measure_side(one: AnyPath | AnalysedRecording | Measured, name: str, *, progress: Progress | None, **asked: Any) -> Measured:
    if isinstance(one, Measured):
        return one
    if isinstance(one, tuple):
        return measure_analysed(one)
    return measure_recording(one, progress=(lambda text: progress(f"{name}: {text}")) if progress else None, **asked)


MAX_GATES_BYTES = 1_000_000
"""Largest file of gates that is read: a thousand times a usual one."""


class CheckResult:
    """What was found of each gate: `data` is its JSON, version 1; the methods are its renderings."""

    def __init__(self, data: CheckData) -> None:
        self.data = data
        self.passed: bool = data.passed

    def text(self, width: int | None = None, color: bool = False) -> str:
        """Return it for a terminal of `width` columns (default 100)."""
        from gpudiag.report.checks import build_gates_document
        from gpudiag.report.render_text import render_text

        return render_text(build_gates_document(self.data), width=100 if width is None else width, color=color)

    def github(self, width: int | None = None) -> str:
        """Return it for GitHub Actions: the text, in which no line counts as a command, then an annotation for each gate not passed."""
        from gpudiag.report import checks

        return checks.render_gates_github(self.data, self.text(width), secrets.token_hex(16))

    def junit(self) -> bytes:
        """Return it as JUnit XML: a test case for each gate."""
        from gpudiag.report import checks

        return checks.render_gates_junit(self.data)

    def json(self) -> bytes:
        """Return it as JSON (schema: `gpudiag schema check`)."""
        return encode_report(self.data)

    def __str__(self) -> str:
        return self.text()


def check(
    path: AnyPath | Measured,
    *,
    budget: AnyPath | Gates | None = None,
    baseline: AnyPath | Measured | Sequence[AnyPath | Measured] | None = None,
    rank: int | None = None,
    config: Config | None = None,
    progress: Progress | None = None,
) -> CheckResult:
    """Return what was found of each gate of `budget` (a TOML file) on a bundle, a trace or a report.

    With a `baseline` alone the gates are gpudiag.comparison.gates.DEFAULT_GATES. Of several, recordings of one program, a gate is broken
    where it is against each: how far two recordings of one program differ is seen from several only. Raises UsageError where neither is
    given, or gates need a baseline that is not; InputError with file, line and key for a file of gates that is wrong, and where something
    cannot be read.
    """
    from gpudiag.comparison.gates import DEFAULT_GATES, judge_against_each
    from gpudiag.comparison.steps import describe_ranks, list_comparison_warnings

    baselines = [baseline] if isinstance(baseline, (str, os.PathLike, Measured)) else list(baseline or ())
    if budget is None and not baselines:
        raise UsageError("nothing to check against", "give --budget gates.toml, --baseline BUNDLE, or both")
    gates = DEFAULT_GATES if budget is None else budget if isinstance(budget, Gates) else read_gates(budget)
    if gates.needs_baseline and not baselines:
        raise UsageError(f"{gates.path or 'a gate'}: tolerance_share and new_at compare with a baseline", "give --baseline BUNDLE")
    run = _measure_side(path, "run", rank=rank, config=config, progress=progress)
    before = [_measure_side(one, "baseline", rank=rank, config=config, progress=progress) for one in baselines]
    results, paths = judge_against_each(gates, run, before), tuple(side.report.source.path for side in before)
    warnings = [] if before else describe_ranks([run], ["the run"])
    for path, side in zip(paths, before, strict=True):
        name = "the baseline" if len(before) == 1 else f"baseline {path}"
        warnings += list_comparison_warnings(side, run, names=(name, "the run"), reasons=False)
    return CheckResult(
        CheckData(
            path=run.report.source.path,
            budget=gates.path,
            baseline=paths[0] if paths else "",
            baselines=paths,
            results=results,
            warnings=tuple(dict.fromkeys(warnings)),
            passed=not any(result.fails for result in results),
        )
    )


def read_gates(path: AnyPath) -> Gates:
    """Read the gates of a TOML file. Raises InputError with file, line and key for one that is wrong."""
    from gpudiag.comparison.gates import parse_gates
    from gpudiag.diagnosis.loader import load_active_rules

    target = Path(os.fspath(path))
    try:
        with open_file(target) as file:
            data = file.read(MAX_GATES_BYTES + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise InputError(f"{target}: {error.strerror}", "give a file of gates, such as gates.toml") from None
    except UnicodeDecodeError:
        raise InputError(f"{target}: no text in UTF-8", "give a file of gates, such as gates.toml") from None
    if len(data) > MAX_GATES_BYTES:
        raise InputError(f"{target}: larger than {MAX_GATES_BYTES} bytes, this is no file of gates")
    return parse_gates(target.as_posix(), text, [rule.id for rule in load_active_rules([], None).judged])
