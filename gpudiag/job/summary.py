"""What one rank tells of itself: a small RankSummary of its analysis."""

from __future__ import annotations

import msgspec
import numpy as np
import polars as pl

from gpudiag.facts.window import Window
from gpudiag.job.exposure import device_spans, with_exposure
from gpudiag.model.analysis import Analysis
from gpudiag.model.breakdown import BUCKETS, Breakdown
from gpudiag.model.rank import MESSAGES, MOST_OPS, OPS, STEPS, RankSummary
from gpudiag.model.tables import Column
from gpudiag.timeline.breakdown import step_breakdowns, unknown_breakdown
from gpudiag.trace.kernel_names import STEP_MARK

_OTHERS = "others"


def summarise(analysis: Analysis, *, rank: int, path: str, host: str = "") -> RankSummary:
    """Return the summary of the analysis of `rank`, read from `path` on the machine `host` ('': as the manifest says, or not known)."""
    meta, manifest = analysis.trace.meta, analysis.manifest
    unix = meta.unix_base_ns
    base = meta.base_ns if unix is None else unix
    device = analysis.device
    steps = _steps(analysis, base)
    return RankSummary(
        rank=rank,
        path=path,
        device="" if device is None else device.name,
        device_kind=analysis.device_kind,
        device_index=analysis.device_index,
        host=host or (manifest.host if manifest else ""),
        world_size=meta.world_size or (manifest.world_size if manifest else None),
        clock="file" if unix is None else "unix",
        link_byte_per_s=None if device is None else device.link_byte_per_s,
        wall_ns=analysis.wall_ns,
        buckets_ns=analysis.breakdown.buckets_ns,
        linked_share=analysis.coverage.linked_share,
        modelled_share=analysis.coverage.modelled_share,
        truncated=meta.truncated,
        sm_clock_mhz=_median(analysis, "sm_clock_mhz"),
        power_w=_median(analysis, "power_w"),
        temperature_c=_median(analysis, "temperature_c"),
        throttled=_throttled(analysis),
        messages=_messages(analysis, base, rank),
        steps=steps,
        ops=_ops(analysis),
        records=analysis.step_records,
    )


def _median(analysis: Analysis, column: str) -> float | None:
    """Return the median of a column of telemetry while the steps were recorded; None where it was not sampled."""
    found = analysis.telemetry.columns.get(column) if analysis.telemetry else None
    return None if found is None else found.median


def _throttled(analysis: Analysis) -> tuple[str, ...]:
    """Return the reasons for which the clocks were held down while the steps were recorded."""
    events = analysis.telemetry.clock_events if analysis.telemetry else ()
    return tuple(event.reason for event in events if event.lowers and event.share > 0)


def _messages(analysis: Analysis, base: int, rank: int) -> pl.DataFrame:
    """Return the messages of the whole recording (schema MESSAGES) on the absolute clock that begins at `base`."""
    found = with_exposure(analysis)
    rows = analysis.steps.filter("analysed").select(pl.col("id").alias("step"), pl.int_range(pl.len()).alias("row"))
    found = found.join(rows, on="step", how="left", maintain_order="left").drop("step").rename({"row": "step", "by": "name"})
    absolute = [pl.col(name) + base for name in ("called_ns", "start_ns", "end_ns")]
    return _as(found.with_columns(*absolute, *_ends(rank)).sort("start_ns", "end_ns"), MESSAGES)


def _ends(rank: int) -> list[pl.Expr]:
    """Return source and target of messages: torch writes the other end only, the rank itself is the one that is missing."""
    own, is_pair = pl.lit(rank, dtype=pl.Int64), pl.col("kind") == "point_to_point"
    return [
        pl.when(is_pair & pl.col("target").is_not_null()).then(pl.coalesce("source", own)).otherwise("source").alias("source"),
        pl.when(is_pair & pl.col("source").is_not_null()).then(pl.coalesce("target", own)).otherwise("target").alias("target"),
    ]


def _steps(analysis: Analysis, base: int) -> pl.DataFrame:
    """Return the analysed steps (schema STEPS), each with its breakdown."""
    chosen = analysis.steps.filter("analysed")
    parts = pl.DataFrame(
        [msgspec.structs.asdict(part.buckets_ns) for part in _breakdowns(analysis, chosen)], schema=dict.fromkeys(BUCKETS, pl.Int64)
    )
    number = pl.col("name").str.extract(STEP_MARK, 1).cast(pl.Int64, strict=False).alias("number")
    frame = pl.concat([chosen.with_columns(number), parts], how="horizontal")
    frame = frame.join(_matrix_flops(analysis), left_on="id", right_on="step", how="left", maintain_order="left")
    return _as(frame.with_columns(pl.col("start_ns") + base, pl.col("end_ns") + base), STEPS)


def _breakdowns(analysis: Analysis, steps: pl.DataFrame) -> list[Breakdown]:
    bounds = steps.select("start_ns", "end_ns").to_numpy().astype(np.int64)
    kernels = analysis.trace.kernels
    if not kernels.height and analysis.breakdown.buckets_ns.unknown == analysis.wall_ns:  # the device's work was not recorded
        return [unknown_breakdown(step[None, :]) for step in bounds]
    rows, spans = device_spans(analysis)
    return step_breakdowns(kernels["bound"].gather(rows), spans, bounds, analysis.idle)


def _matrix_flops(analysis: Analysis) -> pl.DataFrame:
    """Return (step, matrix_flops): the products launched in each analysed step that has any with a count."""
    if "matrix_flops" not in analysis.trace.kernels.columns or not analysis.trace.kernels.height:
        return pl.DataFrame(schema={"step": pl.Int64, "matrix_flops": pl.Float64})
    work = Window(analysis).matrix_work.drop_nulls("matrix")
    return work.group_by("step").agg(pl.col("matrix").sum().alias("matrix_flops"))


def _ops(analysis: Analysis) -> pl.DataFrame:
    """Return the operators by their kernel time (schema OPS): the MOST_OPS largest, then the others together."""
    rows = analysis.op_rows.filter(pl.col("bound").ne_missing("communication"))
    sums = [pl.col("count").sum().cast(pl.Int64), pl.col("kernel_ns").sum()]
    summed = rows.group_by("name", "phase").agg(sums).sort(["kernel_ns", "name", "phase"], descending=[True, False, False])
    rest = summed[MOST_OPS:]
    others = rest.select(pl.lit(_OTHERS).alias("name"), pl.lit(None, dtype=pl.String).alias("phase"), *sums) if rest.height else rest
    return pl.concat([_as(summed[:MOST_OPS], OPS), _as(others, OPS)])


def _as(frame: pl.DataFrame, columns: tuple[Column, ...]) -> pl.DataFrame:
    return frame.select(pl.col(column.name).cast(column.dtype) for column in columns)
