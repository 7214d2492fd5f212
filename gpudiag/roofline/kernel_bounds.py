"""Roofline time and bound of every kernel (architecture.md section 3), and work above its roofline."""

from __future__ import annotations

import msgspec
import numpy as np
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.attribution.names import mask_names, match_column
from gpudiag.attribution.nesting import null_missing
from gpudiag.model.bundle import Settings
from gpudiag.model.hardware import Device
from gpudiag.model.notices import Notice, NoticeCode, make_notice
from gpudiag.model.ops import HOST_BOUND_BELOW_NS, INEFFICIENT_BELOW, OVER_ROOF_ABOVE, SHORT_KERNEL_NS, Cost
from gpudiag.model.trace import Trace, build_table_schema
from gpudiag.roofline.engine import add_engine
from gpudiag.roofline.launch_geometry import count_waves
from gpudiag.roofline.op_roles import AttributedOps
from gpudiag.trace import kernel_names
from gpudiag.units import format_share

ABOVE_ROOFLINE_CAUSES = {
    "cache": "part of its data was in the last-level cache",
    "inner_cache": "part of its data was in the caches of the cores, not only in the last-level cache",
    "algorithm": "a fast convolution algorithm multiplies less than is counted",
    "unexplained": "a wrong peak or a wrong count, such as an expanded input without recorded strides",
}

_CACHES = 2.5
"""A call that moves more than this many caches is not explained by one: most of it has to come from DRAM."""

_SHOWN = 3
_SMALLEST = 0.0001
"""A share of time below this would read 0.00 %."""


def mark_above_roofline(frame: pl.DataFrame, device: Device | None) -> pl.DataFrame:
    """Return `frame` with `over_roof` (efficiency above OVER_ROOF_ABOVE) and `over_cause`, a key of CAUSES.

    cache: what the last-level cache can spare it of DRAM explains the rate. inner_cache: it was judged against the last-level cache
    already, and what the caches of the cores can spare it of that explains the rate.
    """
    outer, inner = (device.cache_bytes, device.inner_cache_bytes) if device else (None, None)
    dram, cache = (device.bandwidth_byte_per_s, device.cache_bandwidth_byte_per_s) if device else (None, None)
    by_dram = ~pl.col("cache_resident") & ~pl.col("host_copy")
    by_outer = pl.col("cache_resident") & (pl.col("call_bytes") > pl.lit(inner, dtype=pl.Float64))
    fast = pl.col("algorithm") & (pl.col("compute_ns") >= pl.col("memory_ns"))
    helped = ((by_dram & _is_helped_by_cache(outer, dram), "cache"), (by_outer & _is_helped_by_cache(inner, cache), "inner_cache"))
    cause = kernel_names.choose_first([(fast, "algorithm"), *helped], "unexplained")
    frame = frame.with_columns(over_roof=(pl.col("efficiency") > OVER_ROOF_ABOVE).fill_null(False))
    return frame.with_columns(over_cause=pl.when("over_roof").then(cause))


def _is_helped_by_cache(cache_bytes: float | None, rate: float | None) -> pl.Expr:
    """Return whether a call stays below its roof where a cache of `cache_bytes` spares it the way to what gives `rate` byte/s.

    It may have been read from the cache as much as that holds, and as much again may not have been written back yet.
    """
    size = pl.lit(cache_bytes, dtype=pl.Float64)
    moved = pl.coalesce("call_bytes", "bytes_moved")
    least = (moved - 2 * size) / pl.lit(rate, dtype=pl.Float64) * 1e9 * pl.col("part").fill_null(1.0)
    below = pl.max_horizontal("compute_ns", least) <= OVER_ROOF_ABOVE * pl.col("busy_ns")
    return (below & least.is_not_null() & (moved <= _CACHES * size)).fill_null(False)


def list_above_roofline_notices(rows: pl.DataFrame, work: str = "kernel") -> tuple[Notice, ...]:
    """Return one notice on the op rows above their roof (share of the `work` time, the worst ops, why); nothing where there is none."""
    over = rows.filter(pl.col("over_roof").is_not_null())
    if not over.height:
        return ()
    share = int(over["kernel_ns"].sum()) / int(rows["kernel_ns"].sum())
    said = format_share(share, 2) if share >= _SMALLEST else f"under {format_share(_SMALLEST, 2)}"
    # the ops with most time missing to their roof, one word for all rows of an op, gathered by cause
    missing = (pl.col("t_roof_ns") - pl.col("kernel_ns")).sum()
    ops = over.group_by("name", "over_roof_cause").agg(missing.alias("missing"), pl.len().alias("rows"), pl.col("over_roof").max())
    told: dict[str, list[str]] = {}
    ranked = ops.sort("missing", "name", descending=[True, False]).head(_SHOWN)
    for name, cause, rows, ratio in ranked.select("name", "over_roof_cause", "rows", "over_roof").iter_rows():
        most = format_share(ratio)
        told.setdefault(cause, []).append(f"{name} {most}" if rows == 1 else f"{name} up to {most} ({rows} rows)")
    worst = "; ".join(f"{', '.join(names)}: {ABOVE_ROOFLINE_CAUSES[cause]}" for cause, names in told.items())
    return (make_notice(NoticeCode.ABOVE_ROOFLINE, share=share, said=said, work=work, worst=worst),)


def classify_kernels(
    trace: Trace, owners: AttributedOps, idle: pl.DataFrame, device: Device | None, settings: Settings | None = None
) -> Trace:
    """Return `trace` at stage 'cost': owner, cost, engine, roofline time and bound of every kernel.

    The cost of a call is spread over its kernels by their time, so that each has the efficiency of the call. `settings`: those found
    when the run was recorded; None for a plain trace.
    """
    frame = _add_cost(trace.kernels, owners)
    frame = _add_roofline(add_engine(frame, device, settings), device)
    frame = frame.with_columns(efficiency=pl.when(pl.col("busy_ns") > 0).then(pl.col("t_roof_ns") / pl.col("busy_ns")))
    frame = mark_above_roofline(frame, device).with_columns(waves=count_waves(device))
    # Find the columns `latency` (rule a) and `starved` (rule b) of the overhead bound
    floor = device.launch_floor_ns if device and device.launch_floor_ns else 0.0
    short = pl.col("busy_ns") < max(SHORT_KERNEL_NS, 2 * floor)
    # A product that its FLOPs bind has no other work: beyond the roof of a short one a CPU is setting it up (oneDNN), however long
    set_up = (pl.col("kind") == "cpu") & (pl.col("call_matrix") > 0) & (pl.col("compute_ns") > pl.col("memory_ns"))
    short |= (set_up & (pl.col("t_roof_ns") < INEFFICIENT_BELOW * SHORT_KERNEL_NS)).fill_null(False)
    small = (pl.col("grid") < pl.lit(device.sm_count if device else None, dtype=pl.Int64)).fill_null(False)
    latency = (pl.col("zero") | ((pl.col("efficiency") < INEFFICIENT_BELOW) & (short | small))).fill_null(False)
    # waits for the host in which it neither loaded data, synchronised, allocated nor compiled
    waits = idle.filter((pl.col("kind") == "host_wait") & pl.col("kernel").is_not_null())
    calls = trace.launches.filter(match_column("api", kernel_names.SYNC_CALL) | match_column("api", kernel_names.ALLOCATION_CALL))
    named = match_column("name", kernel_names.LOADER_MARK) | match_column("name", kernel_names.COMPILE_MARK)
    reasons = [intervals.build_spans(table) for table in (calls, trace.marks.filter(named), trace.ops.filter(named))]
    merged = intervals.merge_spans(np.concatenate(reasons))
    busy = intervals.measure_covered(merged, waits["start_ns"].to_numpy(), waits["end_ns"].to_numpy())
    waits = waits.select("kernel", (pl.col("end_ns") - pl.col("start_ns")).alias("wait_ns")).filter(pl.Series(busy == 0))
    waited = frame.select("id").join(waits, left_on="id", right_on="kernel", how="left", maintain_order="left")["wait_ns"]
    starved = (pl.col("busy_ns") < HOST_BOUND_BELOW_NS) & (waited.fill_null(0) > pl.col("busy_ns"))
    chain = (
        ("collective", "communication"),
        ("host_copy", "copy"),
        ("moves", "memory"),
        (latency | starved, "overhead"),
        (pl.col("t_roof_ns").is_null(), "unknown"),
        (pl.col("compute_ns") > pl.col("memory_ns"), "compute"),
    )
    bound = kernel_names.choose_first(chain, "memory").alias("bound")
    frame = frame.with_columns(latency.alias("latency"), starved.alias("starved"), bound)
    return msgspec.structs.replace(trace, kernels=frame.select(list(build_table_schema("kernels", "cost"))))


def estimate_attainable_ns(device: Device | None, share: float) -> pl.Expr:
    """Estimate the time of kernels at `share` of their roof, no shorter than the device's best products take for their FLOP."""
    if device is None or not device.attained:
        return pl.col("t_roof_ns") / share
    rate = pl.col("engine").cast(pl.String).replace_strict(device.attained, default=None, return_dtype=pl.Float64)
    best = pl.when(pl.col("t_roof_ns").is_not_null()).then(pl.col("flops") / rate * 1e9)
    return pl.max_horizontal(pl.col("t_roof_ns") / share, best)


def _add_cost(kernels: pl.DataFrame, owners: AttributedOps) -> pl.DataFrame:
    known = [(row, cost) for row, cost in enumerate(owners.costs) if isinstance(cost, Cost)]
    costs = pl.DataFrame(
        [
            (row, owners.names[row], float(cost.matrix_flops), float(cost.recompute_flops), float(cost.vector_flops),
             float(cost.special), float(cost.draws), float(cost.bytes), cost.dtype, cost.provenance)
            for row, cost in known
        ],
        schema={
            "call": pl.Int64, "call_name": pl.String, "call_matrix": pl.Float64, "call_again": pl.Float64, "call_vector": pl.Float64,
            "call_special": pl.Float64, "call_draws": pl.Float64, "call_bytes": pl.Float64, "dtype": pl.String, "provenance": pl.String,
        },
        orient="row",
    )  # fmt: skip
    frame = kernels.with_columns(null_missing(owners.owner, "owner"), null_missing(owners.call, "call"))
    frame = frame.join(costs, on="call", how="left", maintain_order="left").with_columns(pl.col("provenance").fill_null("none"))
    total = pl.col("busy_ns").sum().over("owner")
    part = (
        pl.when(pl.col("owner").is_null())
        .then(None)
        .when(total == 0)
        .then(1.0 / pl.len().over("owner"))
        .otherwise(pl.col("busy_ns") / total)
    )
    frame = frame.with_columns(part.alias("part"), total.alias("call_ns"))
    frame = frame.with_columns(
        ((pl.col("call_matrix") + pl.col("call_vector")) * pl.col("part")).alias("flops"),
        (pl.col("call_matrix") * pl.col("part")).alias("matrix_flops"),
        (pl.col("call_again") * pl.col("part")).alias("recompute_flops"),
        (pl.col("call_bytes") * pl.col("part")).alias("bytes_moved"),
    )
    frame = frame.with_columns(zero=((pl.col("flops") == 0) & (pl.col("bytes_moved") == 0)).fill_null(False))
    # the recorded bytes of copies and memsets: a copy within the device reads and writes each byte
    peer = _is_named_copy(frame, kernel_names.PEER_COPY)
    frame = frame.with_columns(
        peer_copy=peer, host_copy=peer | _is_named_copy(frame, kernel_names.HOST_COPY), moves=pl.col("kind").is_in(["memcpy", "memset"])
    )
    both_ways = pl.when((pl.col("kind") == "memcpy") & ~pl.col("host_copy")).then(2.0).otherwise(1.0)
    return frame.with_columns(
        pl.when("moves").then(pl.col("bytes") * both_ways).otherwise("bytes_moved").alias("bytes_moved"),
        pl.when(pl.col("moves") & pl.col("bytes").is_not_null()).then(0.0).otherwise("flops").alias("flops"),
        pl.when(pl.col("moves") & pl.col("bytes").is_not_null()).then(pl.lit("exact")).otherwise("provenance").alias("provenance"),
    )


def _is_named_copy(frame: pl.DataFrame, pattern: str) -> pl.Expr:
    """Return whether a row is a copy whose name matches `pattern` and does not say that it stays on the device."""
    named = mask_names(frame["name"], pattern) & ~mask_names(frame["name"], r"(?i)DtoD|DeviceToDevice|D2D")
    return (pl.col("kind") == "memcpy") & pl.lit(pl.Series(named))


def _build_literal(value: float | None) -> pl.Expr:
    return pl.lit(value, dtype=pl.Float64)


def _add_roofline(frame: pl.DataFrame, device: Device | None) -> pl.DataFrame:
    """Return `frame` with compute_ns, memory_ns, cache_resident and t_roof_ns = max of both (null where a needed peak is not known)."""
    known = device.peaks if device else {}
    peak = pl.col("engine").replace_strict(known, default=None, return_dtype=pl.Float64) if known else _build_literal(None)
    matrix = pl.when(pl.col("call_matrix") == 0).then(0.0).otherwise(pl.col("call_matrix") * pl.col("part") / peak * 1e9)
    rate = _build_literal(device.vector_peak if device else None)
    vector = pl.when(pl.col("call_vector") == 0).then(0.0).otherwise(pl.col("call_vector") * pl.col("part") / rate * 1e9)
    special = pl.col("call_special") * pl.col("part") / _build_literal(device.special_per_s if device else None) * 1e9
    drawn = pl.col("call_draws") * pl.col("part") / _build_literal(device.draws_per_s if device else None) * 1e9
    frame = frame.with_columns(
        compute_ns=pl.when("moves").then(0.0).otherwise(pl.max_horizontal(matrix, vector, special, drawn)),
        compute_known=pl.col("moves") | (matrix.is_not_null() & vector.is_not_null()),
    )
    dram = _build_literal(device.bandwidth_byte_per_s if device else None)
    inner = pl.col("call_bytes") <= _build_literal(device.inner_cache_bytes if device else None)
    outer = _build_literal(device.cache_bandwidth_byte_per_s if device else None)
    cache = pl.when(inner).then(pl.coalesce(_build_literal(device.inner_cache_byte_per_s if device else None), outer)).otherwise(outer)
    host = _build_literal(device.pcie_byte_per_s if device else None)
    link = pl.when("peer_copy").then(pl.coalesce(_build_literal(device.link_byte_per_s if device else None), host)).otherwise(host)
    by_dram = pl.col("bytes_moved") / pl.when("host_copy").then(link).otherwise(dram) * 1e9
    fits = pl.col("call_bytes") <= _build_literal(device.cache_bytes if device else None)
    resident = (fits & (by_dram > pl.col("compute_ns")) & cache.is_not_null() & ~pl.col("moves")).fill_null(False)
    frame = frame.with_columns(
        cache_resident=resident, memory_ns=pl.when(resident).then(pl.col("bytes_moved") / cache * 1e9).otherwise(by_dram)
    )
    frame = frame.with_columns(pl.when(pl.col("bytes_moved") == 0).then(0.0).otherwise("memory_ns").alias("memory_ns"))
    both_known = pl.col("memory_ns").is_not_null() & pl.col("compute_known")
    return frame.with_columns(t_roof_ns=pl.when(both_known).then(pl.max_horizontal("compute_ns", "memory_ns")))
