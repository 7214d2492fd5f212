"""Roofline time and bound of every kernel (architecture.md section 3)."""

from __future__ import annotations

import msgspec
import numpy as np
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.attribution.names import matches, matching
from gpudiag.attribution.nesting import nulled
from gpudiag.model import tables
from gpudiag.model.bundle import Settings
from gpudiag.model.cost import HOST_BOUND_BELOW_NS, INEFFICIENT_BELOW, SHORT_KERNEL_NS, Cost
from gpudiag.model.hardware import Device
from gpudiag.model.trace import Trace
from gpudiag.roofline.engine import with_engine
from gpudiag.roofline.over_roof import with_over_roof
from gpudiag.roofline.owners import Owners
from gpudiag.roofline.waves import waves
from gpudiag.trace import kernel_names


def classify(trace: Trace, owners: Owners, idle: pl.DataFrame, device: Device | None, settings: Settings | None = None) -> Trace:
    """Return `trace` at stage 'cost': owner, cost, engine, roofline time and bound of every kernel.

    The cost of a call is spread over its kernels by their time, so that each has the efficiency of the call. `settings`: those found
    when the run was recorded; None for a plain trace.
    """
    frame = _with_cost(trace.kernels, owners)
    frame = _with_copies(frame)
    frame = _with_roof(with_engine(frame, device, settings), device)
    frame = frame.with_columns(efficiency=pl.when(pl.col("busy_ns") > 0).then(pl.col("t_roof_ns") / pl.col("busy_ns")))
    frame = with_over_roof(frame, device).with_columns(waves=waves(device))
    frame = frame.with_columns(_overhead(frame, trace, idle, device)).with_columns(_bound().alias("bound"))
    return msgspec.structs.replace(trace, kernels=frame.select(list(tables.schema("kernels", "cost"))))


def _numbers(cost: Cost) -> tuple[float, ...]:
    return float(cost.matrix_flops), float(cost.recompute_flops), float(cost.vector_flops), float(cost.bytes)


def _with_cost(kernels: pl.DataFrame, owners: Owners) -> pl.DataFrame:
    known = [(row, cost) for row, cost in enumerate(owners.costs) if isinstance(cost, Cost)]
    costs = pl.DataFrame(
        [(row, owners.names[row], *_numbers(cost), cost.dtype, cost.provenance) for row, cost in known],
        schema={
            "call": pl.Int64, "call_name": pl.String, "call_matrix": pl.Float64, "call_again": pl.Float64, "call_vector": pl.Float64,
            "call_bytes": pl.Float64, "dtype": pl.String, "provenance": pl.String,
        },
        orient="row",
    )  # fmt: skip
    frame = kernels.with_columns(nulled(owners.owner, "owner"), nulled(owners.call, "call"))
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
    return frame.with_columns(zero=((pl.col("flops") == 0) & (pl.col("bytes_moved") == 0)).fill_null(False))


def _named_copy(frame: pl.DataFrame, pattern: str) -> pl.Expr:
    """Return whether a row is a copy whose name matches `pattern` and does not say that it stays on the device."""
    named = matching(frame["name"], pattern) & ~matching(frame["name"], r"(?i)DtoD|DeviceToDevice|D2D")
    return (pl.col("kind") == "memcpy") & pl.lit(pl.Series(named))


def _with_copies(frame: pl.DataFrame) -> pl.DataFrame:
    """Return `frame` with the recorded bytes of copies and memsets as their cost: a copy within the device reads and writes each byte."""
    peer = _named_copy(frame, kernel_names.PEER_COPY)
    frame = frame.with_columns(
        peer_copy=peer, host_copy=peer | _named_copy(frame, kernel_names.HOST_COPY), moves=pl.col("kind").is_in(["memcpy", "memset"])
    )
    both_ways = pl.when((pl.col("kind") == "memcpy") & ~pl.col("host_copy")).then(2.0).otherwise(1.0)
    return frame.with_columns(
        pl.when("moves").then(pl.col("bytes") * both_ways).otherwise("bytes_moved").alias("bytes_moved"),
        pl.when(pl.col("moves") & pl.col("bytes").is_not_null()).then(0.0).otherwise("flops").alias("flops"),
        pl.when(pl.col("moves") & pl.col("bytes").is_not_null()).then(pl.lit("exact")).otherwise("provenance").alias("provenance"),
    )


def _number(value: float | None) -> pl.Expr:
    return pl.lit(value, dtype=pl.Float64)


def _with_roof(frame: pl.DataFrame, device: Device | None) -> pl.DataFrame:
    """Return `frame` with compute_ns, memory_ns, cache_resident and t_roof_ns = max of both (null where a needed peak is not known)."""
    known = device.peaks if device else {}
    peak = pl.col("engine").replace_strict(known, default=None, return_dtype=pl.Float64) if known else _number(None)
    matrix = pl.when(pl.col("call_matrix") == 0).then(0.0).otherwise(pl.col("call_matrix") * pl.col("part") / peak * 1e9)
    rate = _number(device.vector_peak if device else None)
    vector = pl.when(pl.col("call_vector") == 0).then(0.0).otherwise(pl.col("call_vector") * pl.col("part") / rate * 1e9)
    frame = frame.with_columns(
        compute_ns=pl.when("moves").then(0.0).otherwise(pl.max_horizontal(matrix, vector)),
        compute_known=pl.col("moves") | (matrix.is_not_null() & vector.is_not_null()),
    )
    return _with_bytes(frame, device)


def _with_bytes(frame: pl.DataFrame, device: Device | None) -> pl.DataFrame:
    dram = _number(device.bandwidth_byte_per_s if device else None)
    inner = pl.col("call_bytes") <= _number(device.inner_cache_bytes if device else None)
    outer = _number(device.cache_bandwidth_byte_per_s if device else None)
    cache = pl.when(inner).then(pl.coalesce(_number(device.inner_cache_byte_per_s if device else None), outer)).otherwise(outer)
    host = _number(device.pcie_byte_per_s if device else None)
    link = pl.when("peer_copy").then(pl.coalesce(_number(device.link_byte_per_s if device else None), host)).otherwise(host)
    by_dram = pl.col("bytes_moved") / pl.when("host_copy").then(link).otherwise(dram) * 1e9
    fits = pl.col("call_bytes") <= _number(device.cache_bytes if device else None)
    resident = (fits & (by_dram > pl.col("compute_ns")) & cache.is_not_null() & ~pl.col("moves")).fill_null(False)
    frame = frame.with_columns(
        cache_resident=resident, memory_ns=pl.when(resident).then(pl.col("bytes_moved") / cache * 1e9).otherwise(by_dram)
    )
    frame = frame.with_columns(pl.when(pl.col("bytes_moved") == 0).then(0.0).otherwise("memory_ns").alias("memory_ns"))
    known = pl.col("memory_ns").is_not_null() & pl.col("compute_known")
    return frame.with_columns(t_roof_ns=pl.when(known).then(pl.max_horizontal("compute_ns", "memory_ns")))


def _overhead(frame: pl.DataFrame, trace: Trace, idle: pl.DataFrame, device: Device | None) -> list[pl.Expr]:
    """Return the columns `latency` (rule a) and `starved` (rule b) of the overhead bound."""
    floor = device.launch_floor_ns if device and device.launch_floor_ns else 0.0
    short = pl.col("busy_ns") < max(SHORT_KERNEL_NS, 2 * floor)
    small = (pl.col("grid") < pl.lit(device.sm_count if device else None, dtype=pl.Int64)).fill_null(False)
    latency = (pl.col("zero") | ((pl.col("efficiency") < INEFFICIENT_BELOW) & (short | small))).fill_null(False)
    waits = _plain_waits(trace, idle)
    waited = frame.select("id").join(waits, left_on="id", right_on="kernel", how="left", maintain_order="left")["wait_ns"]
    starved = (pl.col("busy_ns") < HOST_BOUND_BELOW_NS) & (waited.fill_null(0) > pl.col("busy_ns"))
    return [latency.alias("latency"), starved.alias("starved")]


def _plain_waits(trace: Trace, idle: pl.DataFrame) -> pl.DataFrame:
    """Return (kernel, wait_ns): host-wait gaps in which the host neither loaded data, synchronised, allocated nor compiled."""
    waits = idle.filter((pl.col("kind") == "host_wait") & pl.col("kernel").is_not_null())
    starts, ends = waits["start_ns"].to_numpy(), waits["end_ns"].to_numpy()
    busy = intervals.covered(_other_reasons(trace), starts, ends)
    return waits.select("kernel", (pl.col("end_ns") - pl.col("start_ns")).alias("wait_ns")).filter(pl.Series(busy == 0))


def _other_reasons(trace: Trace) -> intervals.Spans:
    calls = trace.launches.filter(matches("api", kernel_names.SYNC_CALL) | matches("api", kernel_names.ALLOCATION_CALL))
    named = matches("name", kernel_names.LOADER_MARK) | matches("name", kernel_names.COMPILE_MARK)
    marks, loads = trace.marks.filter(named), trace.ops.filter(named)
    return intervals.union(np.concatenate([intervals.of(calls), intervals.of(marks), intervals.of(loads)]))


def _bound() -> pl.Expr:
    return (
        pl.when("collective")
        .then(pl.lit("communication"))
        .when("host_copy")
        .then(pl.lit("copy"))
        .when("moves")
        .then(pl.lit("memory"))
        .when(pl.col("latency") | pl.col("starved"))
        .then(pl.lit("overhead"))
        .when(pl.col("t_roof_ns").is_null())
        .then(pl.lit("unknown"))
        .when(pl.col("compute_ns") > pl.col("memory_ns"))
        .then(pl.lit("compute"))
        .otherwise(pl.lit("memory"))
    )
