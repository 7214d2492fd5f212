"""Facts about gradient accumulation (CAP-07): micro-batches in an update, and what a larger batch would save of the cost of each pass."""

from __future__ import annotations

import numpy as np
import polars as pl

from gpudiag.attribution.names import texts
from gpudiag.facts.capacity import growth_room
from gpudiag.facts.gemm import FEW_ROWS, matrix_rate, skinny_product_rows, skinny_saving_ns
from gpudiag.facts.host_time import issued_ns, left_of
from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window
from gpudiag.roofline.families import MATRIX

NOT_RECORDED = "how many backward passes make one update is not in this recording: record with gpudiag.profile or gpudiag run"

FIXED_NS = 10_000
"""Work that its bytes keep busy for less than 10 us lasts for what one call costs, not for its size (heuristic: two launches on a GPU)."""

_PASSES = ("forward", "backward")
_ADDS = r"^aten::add_?$"


MOST_GROWTH = 16.0
"""Nobody takes a batch a hundred times as large because there is room for it: beyond this the figure would promise too much (heuristic)."""


def _counted(window: Window) -> pl.DataFrame:
    """Return the step records that tell backward passes and optimizer steps."""
    records = window.analysis.step_records
    if records is None:
        raise NotKnownError(NOT_RECORDED)
    known = records.drop_nulls(["backwards", "optimizer_steps"])
    require(known.height > 0 and int(known["optimizer_steps"].sum()) > 0, "no optimizer stepped in a recorded step")
    return known


def _turns(window: Window) -> int:
    """Return how often the matrix work of the analysed steps turns from forward to backward: the passes over a batch."""
    work = window.work().filter(pl.col("phase").is_in(_PASSES) & pl.col("family").is_in(MATRIX))
    require(work.height > 0, "no matrix work of forward and backward passes was recorded")
    again = window.analysis.trace.ops.select(pl.col("id").alias("call"), pl.col("recompute").fill_null(False).alias("again"))
    backward = (work.join(again, on="call", how="left").sort("start_ns")["phase"] == "backward").to_numpy()
    return int((backward[1:] & ~backward[:-1]).sum())


def _passes_of_a_backward(window: Window, known: pl.DataFrame) -> float:
    """Return the forward passes that go with a call of backward, at most 1: several losses of one forward pass are no micro-batches."""
    numbers = window.steps["name"].str.extract(r"^ProfilerStep#(\d+)$").cast(pl.Int64).drop_nulls()
    backwards = int(known.filter(pl.col("step").is_in(numbers.implode()))["backwards"].sum())
    return min(1.0, _turns(window) / backwards) if backwards else 1.0


@fact("micro_batches", unit="count")
def micro_batches(window: Window) -> float:
    """Forward and backward passes whose gradients one optimizer step adds up; 1 without accumulation.

    Calls of backward over optimizer steps, of all recorded steps. Losses that share a forward pass count once.
    """
    known = _counted(window)
    calls = int(known["backwards"].sum()) / int(known["optimizer_steps"].sum())
    return max(1.0, calls * _passes_of_a_backward(window, known)) if calls > 1 else 1.0


def _merged(window: Window) -> int:
    """Return how many micro-batches can go through at once."""
    return max(1, int(min(round(float(micro_batches(window))), growth_room(window))))


@fact("mergeable_micro_batches", unit="count")
def mergeable_micro_batches(window: Window) -> int:
    """Micro-batches that would fit into memory as one: at most those of an update, and what 92 % of the memory holds."""
    return _merged(window)


def _parent_names(window: Window, calls: pl.Series) -> pl.Series:
    ops = window.analysis.trace.ops
    return texts(ops["name"].gather(ops["parent"].gather(calls))).fill_null("")  # an op's id is its row


def _passes(window: Window) -> pl.DataFrame:
    """Return the work of forward and backward passes with floor_ns, what it needs at the peaks, and `adds`: gradients added up."""
    work = window.work(shapes=True).filter(pl.col("phase").is_in(_PASSES))
    if window.on_cpu:
        work = work.filter(pl.col("bound") != "overhead")  # their dispatch is time of the host (facts.host_time)
    rate = matrix_rate(window)
    matrix, rows = pl.col("family").is_in(MATRIX), pl.when(pl.col("phase") == "backward").then(pl.min_horizontal("m", "k")).otherwise("m")
    # weights are read once for all rows, so products of few rows are left with their arithmetic; large work gains nothing
    few = matrix & ((pl.col("bound") == "memory") | (rows < FEW_ROWS))
    small = ~matrix & (pl.col("t_roof_ns") < FIXED_NS)
    floor = pl.when(few).then(pl.col("flops") / rate * 1e9).when(small).then("t_roof_ns").otherwise("time_ns")
    floor = pl.when(~matrix & (pl.col("bound") == "overhead")).then(0.0).otherwise(floor)
    adds = pl.col("id").is_in(gradient_additions(window)["id"].implode())
    return work.with_columns(floor_ns=pl.min_horizontal(floor.fill_null(pl.col("time_ns")), "time_ns"), adds=adds)


def gradient_additions(window: Window) -> pl.DataFrame:
    """Return the kernels that add a gradient to one that is there already (aten::add_ under autograd's AccumulateGrad)."""
    work = window.work().filter(pl.col("op_name").str.contains(_ADDS).fill_null(False))
    return work.filter(_parent_names(window, work["call"]).str.contains("AccumulateGrad"))


def merged_saving_ns(window: Window, left: float, adds_left: float) -> float:
    """Return the time in ns that is saved where each cost of a pass is paid `left` (0..1) times as often, for the same samples.

    Products that memory binds or that have few rows, and work too small to last for its size, shrink to that part of their time, but not
    below what their FLOP (products) or bytes need at the peaks; what the host needs to issue work shrinks in full, and the profiler's part
    is in neither. Large work stays as it is. `adds_left`: part of the additions of gradients that is left.
    """
    work = _passes(window)
    merged = pl.max_horizontal(pl.col("time_ns") * left, "floor_ns")
    saved = work.select(pl.col("time_ns") - pl.when("adds").then(pl.col("time_ns") * adds_left).otherwise(merged)).to_series()
    work_ns = min(float(np.maximum(saved.to_numpy(), 0).sum()), float(window.exposed_ns(work)))
    issued = issued_ns(window)
    host_ns = left_of(window, issued)
    plain_ns = window.wall_ns - (issued - host_ns)
    if window.on_cpu:  # nothing of the process ran then: the system ran others, whatever the step does
        plain_ns -= window.analysis.breakdown.buckets_ns.idle_unexplained
    return min(1.0, (work_ns + host_ns * (1 - left)) / max(plain_ns, 1.0)) * window.wall_ns


@fact("accumulation_saving_ns", unit="ns")
def accumulation_saving_ns(window: Window) -> float:
    """Time of the analysed steps that merging the micro-batches of an update would save, as far as memory allows.

    Each pass reads all weights, issues all work and adds its gradients to those before it. With k micro-batches in g passes, g/k of that
    is left, matrix work keeps its arithmetic, and of k - 1 additions g - 1 are left.
    """
    before = round(float(micro_batches(window)))
    after = -(-before // _merged(window))
    return 0.0 if before < 2 else merged_saving_ns(window, after / before, (after - 1) / (before - 1))


@fact("accumulation_saving_share", unit="share")
def accumulation_saving_share(window: Window) -> float:
    """accumulation_saving_ns over the wall time of the analysed steps."""
    return float(accumulation_saving_ns(window)) / window.wall_ns


@fact("larger_batch_saving_ns", unit="ns")
def larger_batch_saving_ns(window: Window) -> float:
    """Time for the same samples that a batch as large as 92 % of the memory holds would save, at most 16 times as large.

    As accumulation_saving_ns, and the optimizer steps once for all of them.
    """
    left = 1 / min(growth_room(window), MOST_GROWTH)
    optimizer = window.work().filter(pl.col("phase") == "optimizer")
    return merged_saving_ns(window, left, left) + window.exposed_ns(optimizer) * (1 - left)


@fact("few_rows_saving_ns", unit="ns")
def few_rows_saving_ns(window: Window) -> float:
    """Time per sample that the steps would save if batches made 128 rows where most skinny products have fewer.

    The larger of skinny_saving_ns and what fewer passes would save: each reads all weights, issues all work, adds up gradients and is
    followed by a step of the optimizer.
    """
    alone = float(skinny_saving_ns(window))
    try:
        left = min(1.0, float(skinny_product_rows(window)) / FEW_ROWS)
        optimizer = window.work().filter(pl.col("phase") == "optimizer")
        return max(alone, merged_saving_ns(window, left, left) + window.exposed_ns(optimizer) * (1 - left))
    except NotKnownError:  # no passes forward and backward: generation, evaluation
        return alone
