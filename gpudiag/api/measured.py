"""A recording measured step by step, for comparisons and gates; or a report that was read from a file, which tells no steps."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import polars as pl

from gpudiag.api.cached_report import kept_measured
from gpudiag.api.opened import Opened, Question, diagnosed
from gpudiag.attribution import intervals
from gpudiag.diagnosis.loader import rules_in_force
from gpudiag.errors import InputError, UsageError
from gpudiag.files import read_file
from gpudiag.model.analysis import Analysis
from gpudiag.model.decoding import UNREADABLE
from gpudiag.model.measured import Measured, OpKey
from gpudiag.model.report import SCHEMA_VERSION, ReportData, Source, from_json
from gpudiag.roofline.oprows import op_steps
from gpudiag.timeline.history import SETTLED_AFTER

if TYPE_CHECKING:
    from gpudiag.diagnosis.config import Config

AnyPath = str | os.PathLike[str]
Progress = Callable[[str], None]

MAX_REPORT_BYTES = 256 << 20
"""Largest report that is read: a thousand times a usual one."""

_KEYS = ("name", "phase", "module", "signature")


def measured(
    path: AnyPath, *, rank: int | None = None, modules: bool = False, config: Config | None = None, progress: Progress | None = None
) -> Measured:
    """Return the report on a bundle, a trace or a folder of ranks with the times of its steps, or the report in a .json file alone.

    Raises InputError where nothing can be read.
    """
    from gpudiag.api.inputs import resolve_input

    tell, name = progress or (lambda _: None), os.fspath(path)
    if _may_be_report(name):
        found = read_report(Path(name))
        if found is not None:
            if rank is not None:
                raise UsageError(f"{name}: --rank chooses from a folder or a bundle, this is a report", "leave --rank out")
            return Measured(report=found)

    def make() -> Measured:
        """Return it, measured now."""
        chosen = resolve_input(name, rank)
        found = measured_of(diagnosed(chosen, rules_in_force([], config), tell, Question(modules=modules)))
        return msgspec.structs.replace(found, rank=min(chosen.source.ranks, default=None) if rank is None else rank)

    return kept_measured(make, name, (rank, modules), config=config)


def measured_of(opened: Opened) -> Measured:
    """Return what a recording that was opened already holds, step by step."""
    analysis = opened.analysis
    plain = _plain(analysis)
    steps = analysis.steps.filter("analysed").sort("id")
    starts, ends = (steps[name].to_numpy().astype(np.int64) for name in ("start_ns", "end_ns"))
    idle = intervals.covered(intervals.of(analysis.idle), starts, ends)
    return Measured(
        report=opened.report,
        plain_ns=tuple(plain["wall_ns"].to_list()),
        plain_samples=tuple(plain["samples"].to_list()),
        analysed_ns=tuple((ends - starts).tolist()),
        idle_ns=tuple(idle.tolist()),
        ops=_by_step(opened.report, analysis, steps["id"]),
    )


def _plain(analysis: Analysis) -> pl.DataFrame:
    """Return the records of the steps outside windows, in their order, without the first ones of the run, which settle."""
    if analysis.step_records is None:
        return pl.DataFrame(schema={"wall_ns": pl.Int64, "samples": pl.Int64})
    records = analysis.step_records.filter((pl.col("step") >= SETTLED_AFTER) & (pl.col("window") == "plain"))
    return records.sort("step").select("wall_ns", "samples")


def _by_step(report: ReportData, analysis: Analysis, steps: pl.Series) -> dict[OpKey, tuple[int, ...]]:
    """Return the kernel time of each op by analysed step; 0 in a step without the op. Rows with the same text are added up."""
    place = {step: number for number, step in enumerate(steps.to_list())}
    rows = analysis.op_rows.select(*_KEYS).with_row_index("row")
    found = op_steps(analysis.trace, analysis.steps).join(rows, on=list(_KEYS), nulls_equal=True)
    sums: defaultdict[OpKey, list[int]] = defaultdict(lambda: [0] * len(place))
    for row, step, busy in found.select("row", "step", "busy_ns").iter_rows():
        named = report.ops[row]  # the rows of a report stand in the order of the analysis
        sums[OpKey(named.name, named.phase, named.module, named.signature)][place[step]] += busy
    return {key: tuple(values) for key, values in sums.items()}


# -- reports that were written before -----------------------------------------------------------------------------------------


class _Head(msgspec.Struct):
    """What tells a report from a trace: both are .json."""

    schema_version: int | None = None
    source: Source | None = None


def _may_be_report(name: str) -> bool:
    return name.lower().endswith(".json") and "://" not in name and os.path.isfile(name)


def read_report(path: Path) -> ReportData | None:
    """Return the report in a file; None where it is something else, such as a trace. Raises InputError for one that cannot be read."""
    try:
        if path.stat().st_size > MAX_REPORT_BYTES:
            return None
        data = read_file(path, MAX_REPORT_BYTES)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", "give a bundle, a trace or a report") from None
    try:
        head = msgspec.json.decode(data, type=_Head)
    except UNREADABLE:
        return None
    if head.schema_version is None or head.source is None:
        return None
    if head.schema_version > SCHEMA_VERSION:
        raise InputError(f"{path}: a report of version {head.schema_version}, this gpudiag knows {SCHEMA_VERSION}", "upgrade gpudiag")
    try:
        return from_json(data)
    except UNREADABLE as error:
        raise InputError(f"{path}: a report that cannot be read: {error}", "write it anew: gpudiag report PATH -o report.json") from None
