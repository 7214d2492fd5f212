"""Links kernel -> launch -> op -> step, by correlation id and by enclosure in time; what cannot be linked stays null."""

from __future__ import annotations

import msgspec
import polars as pl

from gpudiag.attribution.cpu import cpu_kernels
from gpudiag.attribution.names import matches
from gpudiag.attribution.nesting import Nesting, innermost, nest, nulled
from gpudiag.attribution.phases import phases
from gpudiag.attribution.recompute import recomputed
from gpudiag.attribution.steps import step_of
from gpudiag.model import tables
from gpudiag.model.trace import Trace
from gpudiag.trace import kernel_names
from gpudiag.trace.kernel_class import kernel_classes


def link(trace: Trace, steps: pl.DataFrame, *, on_cpu: bool) -> tuple[Trace, Nesting]:
    """Return `trace` at stage 'link' and the nesting of its ops. `on_cpu`: the ops themselves become the kernels."""
    nesting = nest(trace.ops)
    ops = _ops(trace, steps, nesting)
    launches = _launches(trace, nesting)
    kernels = cpu_kernels(ops, trace.marks, nesting) if on_cpu else _kernels(trace, launches, ops, steps)
    return msgspec.structs.replace(trace, ops=ops, launches=launches, kernels=kernels), nesting


def _ops(trace: Trace, steps: pl.DataFrame, nesting: Nesting) -> pl.DataFrame:
    return trace.ops.with_columns(
        nulled(nesting.parent, "parent"),
        step_of(steps, nesting.start_ns),
        phases(trace, nesting),
        pl.lit(None, dtype=pl.String).alias("module"),
        recomputed(trace.ops, nesting.parent),
    )


def _launches(trace: Trace, nesting: Nesting) -> pl.DataFrame:
    threads = trace.launches["thread"].fill_null(-2).to_numpy()
    return trace.launches.with_columns(nulled(innermost(nesting, threads, trace.launches["start_ns"].to_numpy()), "op"))


def _kernels(trace: Trace, launches: pl.DataFrame, ops: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    calls = (
        launches.filter(pl.col("correlation") > 0)
        .unique("correlation", keep="first", maintain_order=True)
        .select(
            "correlation",
            pl.col("id").alias("launch"),
            "op",
            pl.col("start_ns").alias("launch_start_ns"),
            matches("api", kernel_names.GRAPH_LAUNCH).alias("replay"),
        )
    )
    frame = trace.kernels.join(calls, on="correlation", how="left", maintain_order="left")
    launched = step_of(steps, frame["launch_start_ns"].fill_null(-1).to_numpy())
    frame = frame.with_columns(
        (pl.col("end_ns") - pl.col("start_ns")).alias("busy_ns"),
        pl.when(pl.col("launch_start_ns").is_null()).then(None).otherwise(launched).alias("step"),
        pl.col("replay").fill_null(False),
        pl.lit(False).alias("mapped"),
        pl.when(pl.col("kind") == "kernel").then(kernel_classes(frame["name"])).alias("kernel_class"),
        _collective(trace, ops),
    )
    return frame.select(list(tables.schema("kernels", "link")))


def _collective(trace: Trace, ops: pl.DataFrame) -> pl.Expr:
    """Return whether a kernel is a collective: by its name, or because its record carries a collective's fields."""
    recorded = trace.collectives["kernel"].drop_nulls().implode()
    named = matches("name", kernel_names.COLLECTIVE)
    inside = pl.col("op").is_in(_communication_ops(ops).implode())
    return ((pl.col("kind") == "kernel") & (named | pl.col("id").is_in(recorded) | inside)).fill_null(False).alias("collective")


def _communication_ops(ops: pl.DataFrame) -> pl.Series:
    """Return the ops whose direct kernels move messages (torch wraps every collective in record_param_comms)."""
    return ops.filter(pl.col("name") == "record_param_comms")["id"]
