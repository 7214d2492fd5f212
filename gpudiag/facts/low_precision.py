"""Facts about large products that fp8 could take (CMP-03)."""

from __future__ import annotations

import polars as pl

from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window

LARGE = 4096
"""Least m, n and k from which on the casts cost less than fp8 gives (heuristic, rules.md CMP-03)."""

MULTIPLE = 16
"""k and n of an fp8 product are multiples of 16 (torch._scaled_mm; cuBLASLt)."""

CAST_PASSES = 3
"""Sizes of each operand that scaling and casting to fp8 move: read for its maximum, read, written at half the size (rules.md CMP-03)."""

MEMORY_SHARE_OF_PEAK = 0.85


@fact("fp8_speedup", unit="ratio")
def fp8_speedup(window: Window) -> float:
    """Peak of fp8 over that of bf16; 1 where the device has no fp8 path (before compute capability 8.9, gfx942)."""
    window.require_accelerator()
    peaks = window.device.peaks
    half = max((peaks[name] for name in ("bf16", "fp16") if name in peaks), default=None)
    if half is None:
        raise NotKnownError("the 16-bit peak of this device is not known")
    return peaks.get("fp8", half) / half


def large_products(window: Window) -> pl.DataFrame:
    """Return the 16-bit products that arithmetic binds with m, n and k of at least 4096, n and k multiples of 16."""
    window.require_accelerator()
    work = window.work(shapes=True).filter((pl.col("family") == "gemm") & pl.col("dtype").is_in(["bf16", "fp16"]))
    sizes = pl.min_horizontal("m", "n", "k") >= LARGE
    return work.filter((pl.col("bound") == "compute") & sizes & (pl.col("n") % MULTIPLE == 0) & (pl.col("k") % MULTIPLE == 0))


@fact("large_product_share", unit="share")
def large_product_share(window: Window) -> float:
    """Time in 16-bit products with m, n and k of at least 4096 that arithmetic binds, over the wall time of the analysed steps."""
    return window.share_of_wall(large_products(window))


@fact("large_product_efficiency", unit="share")
def large_product_efficiency(window: Window) -> float:
    """Roofline time of these products over their time."""
    work = large_products(window).drop_nulls("t_roof_ns")
    require(work.height > 0, "no 16-bit product has m, n and k of at least 4096")
    return float(work["t_roof_ns"].sum()) / float(work["time_ns"].sum())


@fact("fp8_saving_ns", unit="ns")
def fp8_saving_ns(window: Window) -> float:
    """Time that these products would save in fp8: their time over fp8_speedup, and the casts of both operands at 85 % of the bandwidth."""
    speedup = float(fp8_speedup(window))
    operands = (pl.col("m") + pl.col("n")) * pl.col("k") * pl.col("item_bytes")
    casts = CAST_PASSES * operands / (MEMORY_SHARE_OF_PEAK * window.bandwidth) * 1e9
    return window.saving_ns(large_products(window), pl.col("time_ns") / speedup + casts)
