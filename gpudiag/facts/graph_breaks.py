"""Facts about compiled code that is split into several graphs (OVH-04), from the calls of torch.compile's graphs in a trace."""

from __future__ import annotations

import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.attribution.names import matches
from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window
from gpudiag.roofline.chains import GENERATED
from gpudiag.roofline.families import MATRIX

REGION = r"^Torch-Compiled Region"
"""A compiled frame: what follows a graph break runs nested in it, as a frame of its own (seen with torch 2.13)."""

GRAPH_CALL = r"^CompiledFunction$"
BACKWARD_NODE = r"^autograd::engine::evaluate_function: CompiledFunctionBackward$"


def _ops(window: Window, pattern: str) -> pl.DataFrame:
    trace = window.analysis.trace
    require(trace.ops.height > 0, "no ops were recorded: record with activities=[CPU, CUDA]")
    inside = pl.col("step").is_in(window.steps["id"].implode())
    return trace.ops.filter(inside & matches("name", pattern)).sort("start_ns")


def _pieces(window: Window) -> pl.DataFrame:
    """Return the graph calls of the steps with `region`, the start of the outermost compiled region around each, where it holds several.

    Raises NotKnownError where the trace marks the calls but not the regions (older torch): which belong together is not told then.
    """
    regions = _ops(window, REGION)
    last = pl.col("end_ns").cum_max().shift(1).over("thread")
    outer = regions.filter((pl.col("start_ns") >= last).fill_null(True)).select("thread", region="start_ns", region_end="end_ns")
    calls = _ops(window, GRAPH_CALL)
    if calls.height and not outer.height:
        raise NotKnownError("this version of torch does not mark compiled regions, so which graphs are of one function is not known")
    if not calls.height:
        return calls.with_columns(region=pl.lit(None, dtype=pl.Int64)).clear()
    found = calls.join_asof(
        outer.sort("region"), left_on="start_ns", right_on="region", by="thread", coalesce=False, check_sortedness=False
    )
    found = found.filter(pl.col("end_ns") <= pl.col("region_end"))
    return found.filter(pl.len().over("thread", "region") > 1)


def between(window: Window) -> pl.DataFrame:
    """Return the host's time between the graphs of one compiled region (start_ns, end_ns): eager ops, guards, Python."""
    pieces = _pieces(window).sort("thread", "start_ns")
    start = pl.col("end_ns").cum_max().shift(1).over("thread", "region")
    return pieces.select(start_ns=start, end_ns="start_ns").drop_nulls().filter(pl.col("end_ns") > pl.col("start_ns"))


@fact("broken_regions_per_step", unit="count")
def broken_regions_per_step(window: Window) -> float:
    """Calls of compiled functions per step that ran as several graphs, because torch.compile had to break them."""
    require(window.steps.height > 0, "no complete step was recorded")
    return _pieces(window).select("thread", "region").unique().height / window.steps.height


@fact("breaks_per_step", unit="count")
def breaks_per_step(window: Window) -> float:
    """Times per step that compiled code was left between two graphs of one compiled function; calls of several functions do not count."""
    require(window.steps.height > 0, "no complete step was recorded")
    pieces = _pieces(window)
    return (pieces.height - pieces.select("thread", "region").unique().height) / window.steps.height


def _of_pieces_ns(window: Window) -> float:
    """Return what a CPU would save at most if each function were one graph: of all time in compiled functions, forward and backward,
    matrix work aside, the part of the further graphs. Each is entered, writes its results and reads its inputs for itself.
    """
    pieces = _pieces(window)
    if not pieces.height:
        return 0.0
    whole = spans.of(pl.concat([_ops(window, pattern).select("start_ns", "end_ns") for pattern in (REGION, BACKWARD_NODE)]))
    matrix = window.kernels.filter(pl.col("family").is_in(MATRIX))
    starts = matrix["start_ns"].to_numpy()
    products = matrix.filter(pl.Series(spans.covered(whole, starts, starts + 1) > 0, dtype=pl.Boolean))["time_ns"].sum()
    further = pieces.height - pieces.select("thread", "region").unique().height
    return max(0.0, spans.total(spans.union(whole)) - float(products)) * further / max(1, _ops(window, GRAPH_CALL).height)


def _split_ns(window: Window) -> float:
    """Return what the generated kernels would save at most where pieces of a function became one: each writes for the next."""
    pieces = _pieces(window)
    if not pieces.height:
        return 0.0
    extra = pieces.height - pieces.select("thread", "region").unique().height
    split = window.kernels.filter(pl.col("name").str.contains(GENERATED))
    return window.exposed_ns(split) * extra / max(1, _ops(window, GRAPH_CALL).height)


def _break_ns(window: Window) -> float:
    found = spans.of(between(window))
    if window.on_cpu:
        return max(float(spans.total(found)), _of_pieces_ns(window))
    eager = window.kernels.join(window.analysis.trace.ops.select(op="id", issued_ns="start_ns"), on="op", how="left").filter(
        pl.col("issued_ns").is_not_null()
    )
    starts = eager["issued_ns"].to_numpy()
    chosen = eager.filter(pl.Series(spans.covered(found, starts, starts + 1) > 0, dtype=pl.Boolean))
    idle = spans.of(window.idle.filter(pl.col("cause").is_in(["idle_launch", "idle_sync", "idle_unexplained"])))
    return float(spans.overlap(found, idle) + window.exposed_ns(chosen)) + _split_ns(window)


@fact("break_ns", unit="ns")
def break_ns(window: Window) -> float:
    """Time that the breaks cost: between the graphs of one compiled function the device is idle or runs ops that are not compiled.

    Generated kernels could be fused across a break too. On a CPU: all time in compiled functions but matrix work, as far as it is that of
    further graphs.
    """
    return min(_break_ns(window), float(window.wall_ns))


@fact("break_share", unit="share")
def break_share(window: Window) -> float:
    """break_ns over the wall time of the analysed steps."""
    return min(_break_ns(window) / window.wall_ns, 1.0)
