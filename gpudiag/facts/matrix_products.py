"""Facts about matrix products: alignment, few rows, waves and occupancy, and the decode products of inference."""

from __future__ import annotations

import polars as pl

from gpudiag.facts.precision import add_path
from gpudiag.facts.registry import fact, fact_of, gpu_only, kernel_share, raise_unknown, require, require_known
from gpudiag.facts.window import Window, cache_by_window
from gpudiag.roofline.kernel_bounds import estimate_attainable_ns
from gpudiag.roofline.op_calls import MATRIX_FAMILIES

HARD_BYTES = 16
SOFT_BYTES = 128
"""A dimension is aligned where its bytes are a multiple of 16 (before cuBLAS 11 the condition for tensor cores), ideally of 128 on
A100 and later (NVIDIA Matrix Multiplication Background guide, table 1)."""

SOFT_EFFICIENCY = 0.6
"""Softly misaligned products count where they reach less than this (rules.md CMP-04)."""

PADDED_SHARE_OF_PEAK = 0.75
FEW_ROWS = 128
"""'> 128 rows on V100, larger on newer GPUs' (NVIDIA Fully-Connected guide; rules.md CMP-05)."""

VECTOR_ROWS = 8
"""A product with fewer rows or columns than the smallest tile of a matrix engine is a matrix times a few vectors: bytes bind it, and
padding saves none of them (CUTLASS tiles of mma.m16n8k16)."""

_DIMENSIONS = ("m", "n", "k")


def find_engine_products(window: Window) -> pl.DataFrame:
    """Return the products and convolutions with known sizes that run on matrix engines: 16-bit and 8-bit types, and fp32 as TF32.

    Not the memory-bound products with a few vectors, which need no matrix engine.
    """
    work = add_path(window, window.work(shapes=True).filter(pl.col("family").is_in(["gemm", "conv"]) & pl.col("k").is_not_null()))
    on_engine = pl.col("dtype").is_in(["fp16", "bf16", "fp8", "int8"]) | ((pl.col("dtype") == "fp32") & (pl.col("path") == "fast"))
    by_vectors = (pl.col("family") == "gemm") & (pl.col("bound") == "memory") & (pl.min_horizontal("m", "n") < VECTOR_ROWS)
    return work.filter(on_engine & ~by_vectors.fill_null(False))


def _is_misaligned(to_bytes: int) -> pl.Expr:
    return pl.any_horizontal(*((pl.col(name) * pl.col("item_bytes") % to_bytes != 0).fill_null(False) for name in _DIMENSIONS))


def find_misaligned_products(window: Window) -> pl.DataFrame:
    """Return the products on matrix engines with a dimension that is no multiple of 16 bytes; raises NotKnownError on a CPU-only run."""
    window.require_accelerator()
    return find_engine_products(window).filter(_is_misaligned(HARD_BYTES))


def _find_softly_misaligned(window: Window) -> pl.DataFrame:
    products = find_engine_products(window.require_accelerator())
    # an NVIDIA A100 or later, where 128 bytes are the ideal alignment
    major = (window.device.compute_capability or "").split(".")[0]
    prefers = window.device.vendor == "nvidia" and major.isdecimal() and len(major) < 4 and int(major) >= 8
    soft = ~_is_misaligned(HARD_BYTES) & _is_misaligned(SOFT_BYTES) & (pl.col("efficiency") < SOFT_EFFICIENCY)
    return products.filter(soft & prefers)


def misaligned_classes(window: Window) -> int:
    """Classes of the loss that are a dimension of such a product (a vocabulary of 50257), the most there are; 0 where none is."""
    products = pl.concat([find_misaligned_products(window), _find_softly_misaligned(window)])
    sizes = set(products.select(pl.concat_list(*_DIMENSIONS).explode()).to_series().to_list())
    losses = window.work(shapes=True).filter(op_name="aten::_log_softmax")["signature"].unique().drop_nulls()
    logits = [window.signature(row).tensor(0) for row in losses]
    return max((x.shape[-1] for x in logits if x is not None and x.shape and x.shape[-1] in sizes), default=0)


def alignment_saving_ns(window: Window) -> float:
    """Time that misaligned products would save at 75 % of the roofline of their padded sizes.

    Padded to 16 bytes where hard, to 128 bytes where soft misalignment is the fault; FLOP and bytes grow with the padded sizes.
    """
    window.require_accelerator()
    hard, soft = find_misaligned_products(window), _find_softly_misaligned(window)
    both = pl.concat([hard.with_columns(to=pl.lit(HARD_BYTES)), soft.with_columns(to=pl.lit(SOFT_BYTES))])
    growth = pl.lit(1.0)
    for name in _DIMENSIONS:
        padded = (pl.col(name) * pl.col("item_bytes") / pl.col("to")).ceil() * pl.col("to") / pl.col("item_bytes")
        growth = growth * (padded / pl.col(name)).fill_null(1.0)
    return window.saving_ns(both, estimate_attainable_ns(window.device, PADDED_SHARE_OF_PEAK) * growth)


def find_skinny_products(window: Window) -> pl.DataFrame:
    """Return products below 128 rows that the bytes of their operands bind, with column rows.

    Rows are m; in the weight gradient of a backward pass they are k. Batched products (attention heads) do not count.
    """
    work = window.work(shapes=True).filter((pl.col("family") == "gemm") & (pl.col("batch") == 1) & (pl.col("bound") == "memory"))
    backward = pl.col("phase") == "backward"
    rows = pl.when(backward).then(pl.min_horizontal("m", "k")).otherwise("m")
    return work.with_columns(rows.alias("rows")).filter(pl.col("rows") < FEW_ROWS)


def find_costliest_rows(products: pl.DataFrame, none_found: str = "no product has fewer than 128 rows") -> int:
    """Return the number of rows of those `products` that take most time; raises NotKnownError(none_found) where there are none."""
    sums = products.group_by("rows").agg(pl.col("time_ns").sum()).sort("time_ns", "rows", descending=True)
    require(sums.height > 0, none_found)
    return int(sums["rows"][0])


def skinny_saving_ns(window: Window) -> float:
    """Time per sample that the steps would save with 128 rows in skinny products, at most up to the ridge of the roofline.

    Throughput grows with the rows until min(128 / rows, ridge / intensity) (rules.md CMP-05). The optimizer, ops that are all overhead
    and waits for the host come once for the larger batch too: they shrink by the mean growth.
    """
    work = find_skinny_products(window)
    work = work.with_columns(growth=estimate_growth(window, FEW_ROWS, look_up_matrix_rate(window)))
    total = float(work["time_ns"].sum())
    if not total:
        return 0.0
    mean = float((work["time_ns"] / work["growth"]).sum()) / total
    steady = (pl.col("phase") == "optimizer") | (pl.col("bound") == "overhead")
    others = window.work().filter(steady.fill_null(False) & ~pl.col("id").is_in(work["id"].implode())).with_columns(growth=pl.lit(1 / mean))
    chosen = pl.concat([work.select([*others.drop("growth").columns, "growth"]), others])
    return window.saving_ns(chosen, pl.col("time_ns") / pl.col("growth")) + window.analysis.breakdown.buckets_ns.idle_launch * (1 - mean)


def estimate_growth(window: Window, rows: int, rate: pl.Expr) -> pl.Expr:
    """Return how many times the throughput of products of few rows grows with `rows`: min(rows' / rows, ridge / intensity), at least 1."""
    ridge, intensity = rate / window.bandwidth, pl.col("flops") / pl.col("bytes_moved")
    return pl.min_horizontal(rows / pl.col("rows"), ridge / intensity).clip(lower_bound=1)


def look_up_matrix_rate(window: Window, types: tuple[str, ...] = ("fp32", "fp16", "bf16", "fp8", "fp64")) -> pl.Expr:
    """Return the matrix peak in FLOP/s for the type of each product; null where it is not known."""
    peaks = {dtype: peak for dtype in types if (peak := window.device.matrix_peak(dtype)) is not None}
    return pl.col("dtype").replace_strict(peaks, default=None, return_dtype=pl.Float64)


FULL_WAVES = 0.75
"""Waves over the next whole number below which a kernel of less than two waves is under-filled (rules.md CMP-06; op_costs section 1.2)."""

SLOW_SHARE_OF_ROOF = 0.55
"""Efficiency below which a large aligned product is slow (rules.md CMP-06)."""

LARGE_DIMENSION = 1024
"""Least m, n and k of a product that could fill a device (heuristic: 64 tiles of 128 x 128)."""

FILLED_SHARE_OF_ROOF = 0.8
"""What well-chosen kernels reach (rules.md CMP-06, gain bound)."""

_PERSISTENT = r"(?i)nvjet|stream_?k|persistent|flash|fmha|cudnn_generated_fort_native_sdpa"
"""Kernels that launch one block an SM, or as many as it holds, by design."""


@cache_by_window
def _find_matrix_kernels(window: Window) -> pl.DataFrame:
    window.require_accelerator()
    chosen = pl.col("family").is_in(MATRIX_FAMILIES) & (pl.col("kind") == "kernel") & (pl.col("bound") != "memory").fill_null(True)
    return add_path(window, window.work(shapes=True).filter(chosen)).filter(pl.col("path").fill_null("fast") != "slow")


def find_underfilled_kernels(window: Window) -> pl.DataFrame:
    """Return the matrix kernels with fewer blocks than multiprocessors, or a second wave that is less than half full.

    Those that memory binds (CMP-05), persistent kernels, which launch as many blocks as there are multiprocessors, and work without a
    roof do not count.
    """
    work = _find_matrix_kernels(window).filter(pl.col("efficiency").is_not_null())
    count = window.device.sm_count
    require(bool(count) and bool((work["grid"] > 0).any() or not work.height), "the grids of the kernels were not recorded")
    waves = pl.coalesce(pl.col("waves"), pl.col("grid") / (count or 1))
    few = (pl.col("grid") > 0) & (pl.col("grid") < count)
    tail = (waves > 1) & (waves < 2) & (waves / waves.ceil() < FULL_WAVES)
    persistent = (pl.col("grid") == count) | pl.col("name").str.contains(_PERSISTENT)
    return work.filter((few | tail).fill_null(False) & ~persistent & (pl.col("efficiency") < FILLED_SHARE_OF_ROOF))


def find_slow_products(window: Window) -> pl.DataFrame:
    """Return the products with m, n and k of at least 1024, aligned to 16 bytes, that arithmetic binds and that reach less than 0.55."""
    work = _find_matrix_kernels(window).filter((pl.col("family") == "gemm") & (pl.col("bound") == "compute"))
    aligned = pl.all_horizontal(pl.col(name) * pl.col("item_bytes") % 16 == 0 for name in ("m", "n", "k"))
    large = pl.min_horizontal("m", "n", "k") >= LARGE_DIMENSION
    return work.filter(large & aligned & (pl.col("efficiency") < SLOW_SHARE_OF_ROOF))


def find_poorly_filled(window: Window) -> pl.DataFrame:
    """Return the under-filled kernels and the slow large products."""
    return pl.concat([find_underfilled_kernels(window), find_slow_products(window)]).unique("id").sort("id")


DECODE_ROWS = 16
"""Products with at most so many rows are those of generation, a token for each sequence (rules.md INF-01)."""

TYPICAL_ROWS = 128
"""Rows up to which a larger batch is counted as gain: servers batch tens of sequences; the ridge of the roofline may stand earlier."""

NO_PEAKS = "the peaks of this device are not known"

EIGHT_BIT = 0.5
"""Part of the bytes of 16-bit weights that 8-bit weights need."""


def find_decode_products(window: Window) -> pl.DataFrame:
    """Return the memory-bound products of at most DECODE_ROWS rows."""
    return find_skinny_products(window).filter(pl.col("rows") <= DECODE_ROWS)


def _find_wide_weights(window: Window) -> pl.DataFrame:
    return find_decode_products(window).filter(pl.col("dtype").is_in(["fp16", "bf16"]))


# fmt: off
FACTS = (
    kernel_share("misaligned_product_share", "Time in products and convolutions on matrix engines with m, n or k (channels) not a "
         "multiple of 16 bytes", find_misaligned_products),
    kernel_share("softly_misaligned_product_share", "Time in products with a dimension that is no multiple of 128 bytes (A100 and later) "
         "and efficiency below 0.6", _find_softly_misaligned),
    fact_of(alignment_saving_ns, "ns"),
    fact_of(misaligned_classes, "count"),
    kernel_share("skinny_product_share", "Time in memory-bound products with fewer than 128 rows", find_skinny_products),
    fact("skinny_product_rows", "count", "Rows of the skinny product that takes most time.",
         lambda window: find_costliest_rows(find_skinny_products(window))),
    kernel_share("underfilled_share", "Time in matrix kernels with fewer blocks than multiprocessors or a second wave less than half full",
         find_underfilled_kernels),
    kernel_share("slow_product_share", "Time in large aligned products (m, n, k >= 1024) that reach less than 55 % of roofline",
         find_slow_products),
    fact("filling_saving_ns", "ns", "Time that under-filled kernels and slow large products would save at 80 % of roofline.",
         lambda window: window.saving_ns(find_poorly_filled(window), estimate_attainable_ns(window.device, FILLED_SHARE_OF_ROOF))),
    fact("trains", "bool", "Whether the analysed steps train: a backward pass or an optimizer step was seen. Forward passes alone are "
         "inference or evaluation.", lambda window: bool(window.recorded_ops["phase"].is_in(["backward", "optimizer"]).any())),
    fact("infers", "bool", "Whether ops were recorded, and none is of a backward pass or an optimizer step; false where no op tells.",
         lambda window: (ops := window.analysis.trace.ops).height > 0 and not ops["phase"].is_in(["backward", "optimizer"]).any()),
    kernel_share("decode_product_share", "Time in memory-bound products of at most 16 rows", find_decode_products),
    fact("decode_rows", "count", "Rows of the decode products that take most time: sequences that are generated at once.",
         lambda window: find_costliest_rows(find_decode_products(window), "no product has so few rows")),
    fact("decode_batching_saving_ns", "ns", "Time for each token that these products would save with 128 rows, at most up to the ridge "
         "of the roofline (rules.md INF-01).",
         lambda window: window.saving_ns(
             find_decode_products(window),
             pl.col("time_ns") / estimate_growth(window, TYPICAL_ROWS, look_up_matrix_rate(window, ("fp32", "fp16", "bf16", "fp8"))))),
    fact("wide_weight_byte_share", "share", "Part of the bytes moved in the analysed steps that decode products with 16-bit weights move.",
         lambda window: (float(_find_wide_weights(window)["bytes_moved"].sum()) / moved
                         if (moved := float(window.work(shapes=True)["bytes_moved"].drop_nulls().sum())) > 0
                         else raise_unknown("the bytes of the work are not known: record with record_shapes=True"))),
    fact("has_eight_bit_path", "bool", "Whether the device has matrix engines for int8 or fp8, by its peaks.",
         gpu_only(lambda window: bool(require_known(window.device.peaks or None, NO_PEAKS).keys() & {"int8", "fp8"}))),
    fact("eight_bit_saving_ns", "ns", "Time that decode products with 16-bit weights would save with half the bytes.",
         lambda window: window.saving_ns(_find_wide_weights(window), pl.col("time_ns") * EIGHT_BIT)),
)
# fmt: on
