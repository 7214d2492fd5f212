"""Facts about the sizes of matrix products: alignment for matrix engines (CMP-04), too few rows (CMP-05)."""

from __future__ import annotations

import polars as pl

from gpudiag.facts.precision_paths import with_path
from gpudiag.facts.registry import NotKnownError, fact
from gpudiag.facts.window import Window

HARD_BYTES = 16
SOFT_BYTES = 128
"""A dimension is aligned where its bytes are a multiple of 16 (before cuBLAS 11 the condition for tensor cores), ideally of 128 on
A100 and later (NVIDIA Matrix Multiplication Background guide, table 1)."""

SOFT_EFFICIENCY = 0.6
"""Softly misaligned products count where they reach less than this (rules.md CMP-04)."""

PADDED_SHARE_OF_PEAK = 0.75
MEMORY_SHARE_OF_PEAK = 0.85
FEW_ROWS = 128
"""'> 128 rows on V100, larger on newer GPUs' (NVIDIA Fully-Connected guide; rules.md CMP-05)."""

VECTOR_ROWS = 8
"""A product with fewer rows or columns than the smallest tile of a matrix engine is a matrix times a few vectors: bytes bind it, and
padding saves none of them (CUTLASS tiles of mma.m16n8k16)."""

_DIMENSIONS = ("m", "n", "k")


def engine_products(window: Window) -> pl.DataFrame:
    """Return the products and convolutions with known sizes that run on matrix engines: 16-bit and 8-bit types, and fp32 as TF32.

    Not the memory-bound products with a few vectors, which need no matrix engine.
    """
    work = with_path(window, window.work(shapes=True)).filter(pl.col("family").is_in(["gemm", "conv"]) & pl.col("k").is_not_null())
    on_engine = pl.col("dtype").is_in(["fp16", "bf16", "fp8", "int8"]) | ((pl.col("dtype") == "fp32") & (pl.col("path") == "fast"))
    by_vectors = (pl.col("family") == "gemm") & (pl.col("bound") == "memory") & (pl.min_horizontal("m", "n") < VECTOR_ROWS)
    return work.filter(on_engine & ~by_vectors.fill_null(False))


def _misaligned(to_bytes: int) -> pl.Expr:
    return pl.any_horizontal(*((pl.col(name) * pl.col("item_bytes") % to_bytes != 0).fill_null(False) for name in _DIMENSIONS))


def misaligned_products(window: Window) -> pl.DataFrame:
    """Return the products on matrix engines with a dimension that is no multiple of 16 bytes; raises NotKnownError on a CPU-only run."""
    window.require_accelerator()
    return engine_products(window).filter(_misaligned(HARD_BYTES))


@fact("misaligned_product_share", unit="share")
def misaligned_product_share(window: Window) -> float:
    """Time in products and convolutions on matrix engines with m, n or k (channels) not a multiple of 16 bytes, over the wall time."""
    return window.share_of_wall(misaligned_products(window))


def _softly_misaligned(window: Window) -> pl.DataFrame:
    window.require_accelerator()
    work = engine_products(window).filter(~_misaligned(HARD_BYTES) & _misaligned(SOFT_BYTES) & (pl.col("efficiency") < SOFT_EFFICIENCY))
    return work if _prefers_128_bytes(window) else work.clear()


def _prefers_128_bytes(window: Window) -> bool:
    """Return whether the device is an NVIDIA A100 or later, where 128 bytes are the ideal alignment."""
    major = (window.device.compute_capability or "").split(".")[0]
    return window.device.vendor == "nvidia" and major.isdecimal() and len(major) < 4 and int(major) >= 8


@fact("softly_misaligned_product_share", unit="share")
def softly_misaligned_product_share(window: Window) -> float:
    """Time in products with a dimension that is no multiple of 128 bytes (A100 and later) and efficiency below 0.6, over the wall time."""
    return window.share_of_wall(_softly_misaligned(window))


@fact("alignment_saving_ns", unit="ns")
def alignment_saving_ns(window: Window) -> float:
    """Time that misaligned products would save at 75 % of the roofline of their padded sizes.

    Padded to 16 bytes where hard, to 128 bytes where soft misalignment is the fault; FLOP and bytes grow with the padded sizes.
    """
    window.require_accelerator()
    hard, soft = misaligned_products(window), _softly_misaligned(window)
    both = pl.concat([hard.with_columns(to=pl.lit(HARD_BYTES)), soft.with_columns(to=pl.lit(SOFT_BYTES))])
    growth = pl.lit(1.0)
    for name in _DIMENSIONS:
        padded = (pl.col(name) * pl.col("item_bytes") / pl.col("to")).ceil() * pl.col("to") / pl.col("item_bytes")
        growth = growth * (padded / pl.col(name)).fill_null(1.0)
    return window.saving_ns(both, pl.col("t_roof_ns") * growth / PADDED_SHARE_OF_PEAK)


def skinny_products(window: Window) -> pl.DataFrame:
    """Return products below 128 rows that the bytes of their operands bind, with column rows.

    Rows are m; in the weight gradient of a backward pass they are k. Batched products (attention heads) do not count.
    """
    work = window.work(shapes=True).filter((pl.col("family") == "gemm") & (pl.col("batch") == 1) & (pl.col("bound") == "memory"))
    backward = pl.col("phase") == "backward"
    rows = pl.when(backward).then(pl.min_horizontal("m", "k")).otherwise("m")
    return work.with_columns(rows.alias("rows")).filter(pl.col("rows") < FEW_ROWS)


@fact("skinny_product_share", unit="share")
def skinny_product_share(window: Window) -> float:
    """Time in memory-bound products with fewer than 128 rows over the wall time of the analysed steps."""
    return window.share_of_wall(skinny_products(window))


@fact("skinny_product_rows", unit="count")
def skinny_product_rows(window: Window) -> int:
    """Rows of the skinny product that takes most time."""
    rows = skinny_products(window).group_by("rows").agg(pl.col("time_ns").sum()).sort("time_ns", "rows", descending=True)
    if not rows.height:
        raise NotKnownError("no product has fewer than 128 rows")
    return int(rows["rows"][0])


@fact("skinny_saving_ns", unit="ns")
def skinny_saving_ns(window: Window) -> float:
    """Time per sample that the steps would save with 128 rows in skinny products, at most up to the ridge of the roofline.

    Throughput grows with the rows until min(128 / rows, ridge / intensity) (rules.md CMP-05). The optimizer, ops that are all overhead
    and waits for the host come once for the larger batch too: they shrink by the mean growth.
    """
    work = skinny_products(window)
    growth = pl.min_horizontal(FEW_ROWS / pl.col("rows"), _ridge(window) / (pl.col("flops") / pl.col("bytes_moved"))).clip(lower_bound=1)
    work = work.with_columns(growth=growth.fill_null(1.0))
    total = float(work["time_ns"].sum())
    if not total:
        return 0.0
    mean = float((work["time_ns"] / work["growth"]).sum()) / total
    steady = (pl.col("phase") == "optimizer") | (pl.col("bound") == "overhead")
    others = window.work().filter(steady.fill_null(False) & ~pl.col("id").is_in(work["id"].implode())).with_columns(growth=pl.lit(1 / mean))
    chosen = pl.concat([work.select([*others.drop("growth").columns, "growth"]), others])
    return window.saving_ns(chosen, pl.col("time_ns") / pl.col("growth")) + window.analysis.breakdown.buckets_ns.idle_launch * (1 - mean)


def matrix_rate(window: Window) -> pl.Expr:
    """Return the matrix peak in FLOP/s for the type of each product; null where it is not known."""
    device = window.device
    peaks = {dtype: peak for dtype in ("fp32", "fp16", "bf16", "fp8", "fp64") if (peak := device.matrix_peak(dtype)) is not None}
    return pl.col("dtype").replace_strict(peaks, default=None, return_dtype=pl.Float64)


def _ridge(window: Window) -> pl.Expr:
    """Return the FLOP per byte from which on arithmetic binds a product of its type."""
    return matrix_rate(window) / window.bandwidth
