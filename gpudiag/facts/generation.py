"""Facts about inference: products with a few rows that read all weights for one token each (INF-01, INF-02)."""

from __future__ import annotations

import polars as pl

from gpudiag.facts.gemm import skinny_products
from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window

DECODE_ROWS = 16
"""Products with at most so many rows are those of generation, a token for each sequence (rules.md INF-01)."""

TYPICAL_ROWS = 128
"""Rows up to which a larger batch is counted as gain: servers batch tens of sequences; the ridge of the roofline may stand earlier."""

EIGHT_BIT = 0.5
"""Part of the bytes of 16-bit weights that 8-bit weights need."""


@fact("trains", unit="bool")
def trains(window: Window) -> bool:
    """Whether the analysed steps train: a backward pass or an optimizer step was seen. Forward passes alone are inference or evaluation."""
    ops = window.analysis.trace.ops
    require(ops.height > 0, "no ops were recorded: record with activities=[CPU, CUDA]")
    return bool(ops["phase"].is_in(["backward", "optimizer"]).any())


def decode_products(window: Window) -> pl.DataFrame:
    """Return the memory-bound products of at most DECODE_ROWS rows."""
    return skinny_products(window).filter(pl.col("rows") <= DECODE_ROWS)


@fact("decode_product_share", unit="share")
def decode_product_share(window: Window) -> float:
    """Time in memory-bound products of at most 16 rows over the wall time of the analysed steps."""
    return window.share_of_wall(decode_products(window))


@fact("decode_rows", unit="count")
def decode_rows(window: Window) -> int:
    """Rows of the decode products that take most time: sequences that are generated at once."""
    rows = decode_products(window).group_by("rows").agg(pl.col("time_ns").sum()).sort("time_ns", "rows", descending=True)
    require(rows.height > 0, "no product has so few rows")
    return int(rows["rows"][0])


@fact("decode_batching_saving_ns", unit="ns")
def decode_batching_saving_ns(window: Window) -> float:
    """Time for each token that these products would save with 128 rows, at most up to the ridge of the roofline (rules.md INF-01)."""
    work, device = decode_products(window), window.device
    peaks = {dtype: peak for dtype in ("fp32", "fp16", "bf16", "fp8") if (peak := device.matrix_peak(dtype)) is not None}
    ridge = pl.col("dtype").replace_strict(peaks, default=None, return_dtype=pl.Float64) / window.bandwidth
    growth = pl.min_horizontal(TYPICAL_ROWS / pl.col("rows"), ridge / (pl.col("flops") / pl.col("bytes_moved"))).clip(lower_bound=1)
    return window.saving_ns(work, pl.col("time_ns") / growth)


def _wide_weights(window: Window) -> pl.DataFrame:
    return decode_products(window).filter(pl.col("dtype").is_in(["fp16", "bf16"]))


@fact("wide_weight_byte_share", unit="share")
def wide_weight_byte_share(window: Window) -> float:
    """Part of the bytes moved in the analysed steps that decode products with 16-bit weights move."""
    total = float(window.work(shapes=True)["bytes_moved"].drop_nulls().sum())
    require(total > 0, "the bytes of the work are not known: record with record_shapes=True")
    return float(_wide_weights(window)["bytes_moved"].sum()) / total


@fact("has_eight_bit_path", unit="bool")
def has_eight_bit_path(window: Window) -> bool:
    """Whether the device has matrix engines for int8 or fp8, by its peaks."""
    window.require_accelerator()
    peaks = window.device.peaks
    if not peaks:
        raise NotKnownError("the peaks of this device are not known")
    return bool(peaks.keys() & {"int8", "fp8"})


@fact("eight_bit_saving_ns", unit="ns")
def eight_bit_saving_ns(window: Window) -> float:
    """Time that decode products with 16-bit weights would save with half the bytes."""
    return window.saving_ns(_wide_weights(window), pl.col("time_ns") * EIGHT_BIT)
