"""What one rank tells of itself: a small RankSummary of its analysis, as bytes and back, with the exposed part of its messages."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import polars as pl

from gpudiag.arrays import Ints
from gpudiag.attribution import intervals
from gpudiag.attribution.device import find_cpu_spans
from gpudiag.attribution.nesting import nest
from gpudiag.errors import InputError
from gpudiag.facts.messages import find_recorded_messages
from gpudiag.facts.window import Window
from gpudiag.model.analysis import MOST_OPS, RANK_MESSAGES, RANK_OPS, RANK_STEPS, Analysis, RankSummary
from gpudiag.model.timeline import BUCKETS
from gpudiag.model.trace import Column
from gpudiag.timeline.breakdown import break_down_steps, build_unknown_breakdown
from gpudiag.timeline.history import RECORD_COLUMNS, RankSteps, build_rank_steps, thin_records
from gpudiag.trace.kernel_names import STEP_MARK

EXPOSURE_PARTS = 16
"""Pieces of equal length by which `exposed_by` tells where in a message its exposed time lies: within 1/64 of its length (a piece that
is half exposed may be off by a quarter of itself)."""

_FULL_PART = 255


def find_device_spans(analysis: Analysis) -> tuple[Ints, intervals.Spans]:
    """Find (rows of kernels, spans): when the device worked; on a CPU when each op was the innermost one of its thread."""
    kernels = analysis.trace.kernels
    if analysis.device_kind == "cpu":
        return find_cpu_spans(analysis.trace.ops, kernels, nest(analysis.trace.ops))
    return kernels["id"].to_numpy(), kernels.select("start_ns", "end_ns").to_numpy().astype(np.int64)


def measure_exposed_until(messages: pl.DataFrame, length: pl.Expr) -> pl.Expr:
    """Measure how much of the first `length` ns of each message is exposed, in ns (columns start_ns, end_ns, exposed_ns, exposed_by).

    Between the pieces of exposed_by evenly; where it is null the exposed part is taken to lie at the end of the message, when the rank's
    own work is done.
    """
    whole = (pl.col("end_ns") - pl.col("start_ns")).clip(lower_bound=1)
    place = (length / whole * EXPOSURE_PARTS).clip(0, EXPOSURE_PARTS)
    piece = place.floor().clip(0, EXPOSURE_PARTS - 1).cast(pl.Int64)
    before = pl.when(piece == 0).then(0.0).otherwise(pl.col("exposed_by").list.get(piece - 1, null_on_oob=True) / _FULL_PART)
    after = pl.when(piece == EXPOSURE_PARTS - 1).then(1.0).otherwise(pl.col("exposed_by").list.get(piece, null_on_oob=True) / _FULL_PART)
    told = (before + (after - before) * (place - piece)) * pl.col("exposed_ns")
    at_the_end = length - (whole - pl.col("exposed_ns"))
    known = "exposed_by" in messages.columns
    chosen = pl.coalesce(pl.when(pl.col("exposed_by").is_not_null()).then(told), at_the_end) if known else at_the_end
    return chosen.clip(lower_bound=0).clip(upper_bound=pl.min_horizontal(length, "exposed_ns")).round().cast(pl.Int64)


def summarise_rank(analysis: Analysis, *, rank: int, path: str, host: str = "") -> RankSummary:
    """Summarise the analysis of `rank`, read from `path` on the machine `host` ('': as the manifest says, or not known)."""
    meta, manifest = analysis.trace.meta, analysis.manifest
    unix = meta.unix_base_ns
    base = meta.base_ns if unix is None else unix
    device = analysis.device
    clock_events = analysis.telemetry.clock_events if analysis.telemetry else ()
    sampled = analysis.telemetry.columns if analysis.telemetry else {}
    clock, power, temperature = (sampled[name].median if name in sampled else None for name in ("sm_clock_mhz", "power_w", "temperature_c"))
    # Sum up the operators by their kernel time (schema OPS): the MOST_OPS largest, then the others together
    rows = analysis.op_rows.filter(pl.col("bound").ne_missing("communication"))
    sums = [pl.col("count").sum().cast(pl.Int64), pl.col("kernel_ns").sum()]
    summed = rows.group_by("name", "phase").agg(sums).sort(["kernel_ns", "name", "phase"], descending=[True, False, False])
    rest = summed[MOST_OPS:]
    others = rest.select(pl.lit("others").alias("name"), pl.lit(None, dtype=pl.String).alias("phase"), *sums) if rest.height else rest
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
        sm_clock_mhz=clock,
        power_w=power,
        temperature_c=temperature,
        throttled=tuple(event.reason for event in clock_events if event.lowers and event.share > 0),
        messages=_build_messages(analysis, base, rank),
        steps=_build_steps(analysis, base),
        ops=pl.concat([_cast_columns(summed[:MOST_OPS], RANK_OPS), _cast_columns(others, RANK_OPS)]),
        records=analysis.step_records,
    )


def _build_messages(analysis: Analysis, base: int, rank: int) -> pl.DataFrame:
    """Build RANK_MESSAGES of the whole recording; exposed as in the breakdown of steps: other messages and copies cover no message."""
    found = find_recorded_messages(analysis)
    if found.height:
        kernels, spans = find_device_spans(analysis)
        bounds = analysis.trace.kernels["bound"].gather(kernels)
        work = intervals.merge_spans(spans[~bounds.is_in(["communication", "copy"]).fill_null(False).to_numpy()])
        start, end = found["start_ns"].to_numpy(), found["end_ns"].to_numpy()
        until = [start + (end - start) * part // EXPOSURE_PARTS for part in range(1, EXPOSURE_PARTS + 1)]
        reached = np.stack([np.maximum(stop - start, 0) - intervals.measure_covered(work, start, stop) for stop in until], axis=1)
        exposed = reached[:, -1]
        shares = np.round(reached[:, :-1] / np.maximum(exposed, 1)[:, None] * _FULL_PART).astype(np.uint8)
        lists = pl.Series("exposed_by", shares).cast(pl.List(pl.UInt8))
        told = (exposed > 0) & (exposed < end - start)
        lists = lists.zip_with(pl.Series(told), pl.Series([None], dtype=lists.dtype))
        found = found.with_columns(pl.Series("exposed_ns", exposed), lists)
    else:
        found = found.with_columns(exposed_ns=pl.lit(None, dtype=pl.Int64), exposed_by=pl.lit(None, dtype=pl.List(pl.UInt8)))
    rows = analysis.steps.filter("analysed").select(pl.col("id").alias("step"), pl.int_range(pl.len()).alias("row"))
    found = found.join(rows, on="step", how="left", maintain_order="left").drop("step").rename({"row": "step", "by": "name"})
    absolute = [pl.col(name) + base for name in ("called_ns", "start_ns", "end_ns")]
    # torch writes the other end of a pair only: the rank itself is the one that is missing
    own, is_pair = pl.lit(rank, dtype=pl.Int64), pl.col("kind") == "point_to_point"
    source = pl.when(is_pair & pl.col("target").is_not_null()).then(pl.coalesce("source", own)).otherwise("source").alias("source")
    target = pl.when(is_pair & pl.col("source").is_not_null()).then(pl.coalesce("target", own)).otherwise("target").alias("target")
    return _cast_columns(found.with_columns(*absolute, source, target).sort("start_ns", "end_ns"), RANK_MESSAGES)


def _build_steps(analysis: Analysis, base: int) -> pl.DataFrame:
    chosen, kernels = analysis.steps.filter("analysed"), analysis.trace.kernels
    bounds = chosen.select("start_ns", "end_ns").to_numpy().astype(np.int64)
    if not kernels.height and analysis.breakdown.buckets_ns.unknown == analysis.wall_ns:  # the device's work was not recorded
        parts = [build_unknown_breakdown(step[None, :]) for step in bounds]
    else:
        rows, spans = find_device_spans(analysis)
        parts = break_down_steps(kernels["bound"].gather(rows), spans, bounds, analysis.idle)
    buckets = pl.DataFrame([msgspec.structs.asdict(part.buckets_ns) for part in parts], schema=dict.fromkeys(BUCKETS, pl.Int64))
    number = pl.col("name").str.extract(STEP_MARK, 1).cast(pl.Int64, strict=False).alias("number")
    if "matrix_flops" not in kernels.columns or not kernels.height:
        matrix_flops = pl.DataFrame(schema={"step": pl.Int64, "matrix_flops": pl.Float64})
    else:
        work = Window(analysis).matrix_work.drop_nulls("matrix")
        matrix_flops = work.group_by("step").agg(pl.col("matrix").sum().alias("matrix_flops"))
    frame = pl.concat([chosen.with_columns(number), buckets], how="horizontal")
    frame = frame.join(matrix_flops, left_on="id", right_on="step", how="left", maintain_order="left")
    return _cast_columns(frame.with_columns(pl.col("start_ns") + base, pl.col("end_ns") + base), RANK_STEPS)


def _cast_columns(frame: pl.DataFrame, columns: tuple[Column, ...]) -> pl.DataFrame:
    return frame.select(pl.col(column.name).cast(column.dtype) for column in columns)


WIRE_VERSION = 2
"""Changes with what the bytes hold: both ends must be of one version."""


class _Envelope(msgspec.Struct, frozen=True):
    version: int
    summary: msgspec.Raw


def encode_summary(summary: RankSummary) -> bytes:
    """Return `summary` as bytes."""
    return msgspec.msgpack.encode(_Envelope(WIRE_VERSION, msgspec.Raw(msgspec.msgpack.encode(summary, enc_hook=_write_table))))


def decode_summary(data: bytes) -> RankSummary:
    """Return the summary that `encode` wrote. Raises InputError for bytes of another version, or that are none."""
    try:
        envelope = msgspec.msgpack.decode(data, type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError("the summary of a rank cannot be read", "all processes must run the same version of gpudiag") from error
    if envelope.version != WIRE_VERSION:
        message = f"the summary of a rank has version {envelope.version}, this gpudiag reads version {WIRE_VERSION}"
        raise InputError(message, "all processes must run the same version of gpudiag")
    try:
        summary = msgspec.msgpack.decode(envelope.summary, type=RankSummary, dec_hook=_read_table)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, pl.exceptions.PolarsError, OSError) as error:
        raise InputError("the summary of a rank cannot be read", "all processes must run the same version of gpudiag") from error
    for columns, frame in ((RANK_MESSAGES, summary.messages), (RANK_STEPS, summary.steps), (RANK_OPS, summary.ops)):
        for column in columns:
            if frame.schema.get(column.name) != column.dtype:
                raise InputError(
                    f"the summary of a rank has no column {column.name} of type {column.dtype}", "all processes must run the same version"
                )
    return summary


def _write_table(value: Any) -> bytes:
    if not isinstance(value, pl.DataFrame):
        raise TypeError(f"a summary holds no {type(value).__name__}")
    buffer = io.BytesIO()
    value.write_ipc(buffer, compression="zstd")
    return buffer.getvalue()


def _read_table(kind: type, value: bytes) -> pl.DataFrame:
    if kind is not pl.DataFrame:
        raise TypeError(f"a summary holds no {kind.__name__}")
    return pl.read_ipc(io.BytesIO(value))


def read_rank_steps(summaries: Sequence[RankSummary]) -> RankSteps | str:
    """Read the unprofiled steps that all ranks with records have, or why they cannot be compared."""
    recorded = [(summary.rank, summary.records) for summary in summaries if summary.records is not None]
    rows = sum(records.height for _, records in recorded)
    frames = [
        thin_records(records.select(RECORD_COLUMNS), rows).with_columns(rank=pl.lit(rank, dtype=pl.Int64)) for rank, records in recorded
    ]
    return build_rank_steps(pl.concat(frames)) if frames else "no records of all steps: a bundle holds them (gpudiag run torchrun ...)"
