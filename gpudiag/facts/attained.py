"""How fast one fused pass over given work would run, and what fusing it saves."""

from __future__ import annotations

import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.facts.window import Window

MEMORY_SHARE_OF_PEAK = 0.85
"""Share of the bandwidth that fused kernels reach (the factor of the gain bounds of rules.md, MEM)."""

STREAMING_BYTES = 1_000_000
"""Calls that move less take longer to be issued than to stream (1 MB in 20 us at 50 GB/s): their rate says nothing of memory."""

MINOR = 0.1
"""Share of the time of the work below which a kind of op does not set the rate: a handful of calls may be fast by chance."""

TRANSCENDENTAL = [
    "cos",
    "sin",
    "tan",
    "tanh",
    "exp",
    "expm1",
    "exp2",
    "log",
    "log1p",
    "log2",
    "pow",
    "sigmoid",
    "erf",
    "erfinv",
    "gelu",
    "gelu_backward",
    "silu",
    "silu_backward",
    "mish",
    "mish_backward",
    "softplus",
    "softplus_backward",
    "elu",
    "celu",
    "selu",
    "atan2",
    "sinh",
    "cosh",
    "asin",
    "acos",
    "atan",
    "logit",
    "log_sigmoid_forward",
]
"""Element-wise ops that compute for long on a CPU: fusing saves their traffic, not their arithmetic."""


def stream_byte_per_s(window: Window, work: pl.DataFrame) -> float:
    """Return the rate in byte/s at which one fused pass over the data of `work` would run.

    GPU: 85 % of the bandwidth. CPU: the best rate that a kind of op of `work` reaches in this run: fresh results are page faults, and
    other processes use the same memory, so that the peak of a quiet machine promises too much; 85 % of the bandwidth where none is large.
    """
    peak = MEMORY_SHARE_OF_PEAK * window.bandwidth
    if not window.on_cpu:
        return peak
    large = work.filter(pl.col("bytes_moved") >= STREAMING_BYTES)
    sums = large.group_by("op_name").agg(pl.col("bytes_moved").sum(), pl.col("time_ns").sum())
    rates = sums.filter(pl.col("time_ns") >= MINOR * pl.col("time_ns").sum()).select(pl.col("bytes_moved") / pl.col("time_ns") * 1e9)
    return float(rates.to_series().max()) if rates.height else peak  # type: ignore[arg-type]


def fused_saving_ns(window: Window, work: pl.DataFrame, fused_bytes: float) -> float:
    """Return the time in ns that the kernels `work` would save as fused passes that move `fused_bytes` in all.

    What the host takes between them is not in it (see gaps_within_ns).
    """
    total = float(work["time_ns"].sum())
    if not total:
        return 0.0
    rate = stream_byte_per_s(window, work)
    floor = fused_bytes / rate * 1e9 + arithmetic_ns(window, work, rate)
    return window.saving_ns(work, pl.col("time_ns") * min(floor / total, 1.0))


def arithmetic_ns(window: Window, work: pl.DataFrame, rate: float) -> float:
    """Return what transcendental ops on a CPU take beyond streaming their bytes at `rate`: arithmetic that stays when they are fused."""
    if not window.on_cpu:
        return 0.0
    names = [f"aten::{name}{end}" for name in TRANSCENDENTAL for end in ("", "_")]
    sums = work.filter(pl.col("op_name").is_in(names)).group_by("op_name").agg(pl.col("bytes_moved").sum(), pl.col("time_ns").sum())
    return float((sums["time_ns"] - sums["bytes_moved"] / rate * 1e9).clip(lower_bound=0).sum())


def gaps_within_ns(window: Window, within: spans.Spans) -> int:
    """Return how long in ns the device waited for Python and the framework inside the time spans `within`."""
    idle = window.idle
    if "cause" not in idle.columns or not idle.height:
        return 0
    waits = spans.of(idle.filter(pl.col("cause") == "idle_launch"))
    return int(spans.overlap(spans.union(waits), spans.union(within)))


def host_part_within(window: Window, within: spans.Spans) -> float:
    """Return which part, 0..1, of all waits for Python and the framework lies inside the time spans `within`; 0 where there are none."""
    waits = window.analysis.breakdown.buckets_ns.idle_launch
    return min(gaps_within_ns(window, within) / waits, 1.0) if waits else 0.0


def spans_of_groups(work: pl.DataFrame, keys: list[str]) -> spans.Spans:
    """Return the time from the first start to the last end of each group of rows of `work`."""
    return spans.of(work.group_by(keys).agg(pl.col("start_ns").min(), pl.col("end_ns").max()).sort("start_ns"))
