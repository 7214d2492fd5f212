"""When the device of a rank did other work than messages, and which part of each message that leaves exposed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.attribution.cpu import cpu_spans
from gpudiag.attribution.nesting import nest
from gpudiag.facts.messages import recorded
from gpudiag.model.analysis import Analysis

PARTS = 16
"""Pieces of equal length by which `exposed_by` tells where in a message its exposed time lies: within 1/64 of its length (a piece that
is half exposed may be off by a quarter of itself)."""

_FULL = 255

Ints = npt.NDArray[np.int64]


def device_spans(analysis: Analysis) -> tuple[Ints, intervals.Spans]:
    """Return (rows of kernels, spans): when the device worked; on a CPU when each op was the innermost one of its thread."""
    kernels = analysis.trace.kernels
    if analysis.device_kind == "cpu":
        return cpu_spans(analysis.trace.ops, kernels, nest(analysis.trace.ops))
    return kernels["id"].to_numpy(), kernels.select("start_ns", "end_ns").to_numpy().astype(np.int64)


def with_exposure(analysis: Analysis) -> pl.DataFrame:
    """Return the messages of the whole recording (facts.messages.recorded) with exposed_ns and exposed_by.

    Exposed as in the breakdown of steps: other messages and copies do not cover a message, all other work does.
    """
    found = recorded(analysis)
    if not found.height:
        return found.with_columns(
            pl.lit(None, dtype=pl.Int64).alias("exposed_ns"), pl.lit(None, dtype=pl.List(pl.UInt8)).alias("exposed_by")
        )
    rows, spans = device_spans(analysis)
    bounds = analysis.trace.kernels["bound"].gather(rows)
    work = intervals.union(spans[~bounds.is_in(["communication", "copy"]).fill_null(False).to_numpy()])
    start, end = found["start_ns"].to_numpy(), found["end_ns"].to_numpy()
    reached = np.stack([_free(work, start, start + (end - start) * part // PARTS) for part in range(1, PARTS + 1)], axis=1)
    exposed = reached[:, -1]
    shares = np.round(reached[:, :-1] / np.maximum(exposed, 1)[:, None] * _FULL).astype(np.uint8)
    lists = pl.Series("exposed_by", shares).cast(pl.List(pl.UInt8))
    told = (exposed > 0) & (exposed < end - start)
    return found.with_columns(pl.Series("exposed_ns", exposed), lists.zip_with(pl.Series(told), pl.Series([None], dtype=lists.dtype)))


def _free(work: intervals.Spans, start: Ints, end: Ints) -> Ints:
    """Return how much of each [start, end) `work` does not cover."""
    free: Ints = np.maximum(end - start, 0) - intervals.covered(work, start, end)
    return free


def exposed_until(messages: pl.DataFrame, length: pl.Expr) -> pl.Expr:
    """Return how much of the first `length` ns of each message is exposed, in ns (columns start_ns, end_ns, exposed_ns, exposed_by).

    Between the pieces of exposed_by evenly; where it is null the exposed part is taken to lie at the end of the message, when the rank's
    own work is done.
    """
    whole = (pl.col("end_ns") - pl.col("start_ns")).clip(lower_bound=1)
    place = (length / whole * PARTS).clip(0, PARTS)
    piece = place.floor().clip(0, PARTS - 1).cast(pl.Int64)
    before = pl.when(piece == 0).then(0.0).otherwise(pl.col("exposed_by").list.get(piece - 1, null_on_oob=True) / _FULL)
    after = pl.when(piece == PARTS - 1).then(1.0).otherwise(pl.col("exposed_by").list.get(piece, null_on_oob=True) / _FULL)
    told = (before + (after - before) * (place - piece)) * pl.col("exposed_ns")
    at_the_end = length - (whole - pl.col("exposed_ns"))
    known = "exposed_by" in messages.columns
    chosen = pl.coalesce(pl.when(pl.col("exposed_by").is_not_null()).then(told), at_the_end) if known else at_the_end
    return chosen.clip(lower_bound=0).clip(upper_bound=pl.min_horizontal(length, "exposed_ns")).round().cast(pl.Int64)
