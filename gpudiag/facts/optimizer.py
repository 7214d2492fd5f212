"""Facts about updates of the parameters: gradient accumulation, the optimizer step, zeroed gradients."""

from __future__ import annotations

import math

import numpy as np
import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.attribution.names import decode_column, decode_names, match_column
from gpudiag.facts import fused_kernels
from gpudiag.facts.capacity import estimate_growth_room
from gpudiag.facts.host_time import measure_issued_ns, subtract_profiler_ns
from gpudiag.facts.matrix_products import FEW_ROWS, look_up_matrix_rate, skinny_product_rows, skinny_saving_ns
from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window
from gpudiag.model.ops import parse_signature
from gpudiag.roofline.op_calls import MATRIX_FAMILIES

NOT_RECORDED = "how many backward passes make one update is not in this recording: record with gpudiag.profile or gpudiag run"

FIXED_NS = 10_000
"""Work that its bytes keep busy for less than 10 us lasts for what one call costs, not for its size (heuristic: two launches on a GPU)."""

_PASSES = ("forward", "backward")
_ADDS = r"^aten::add_?$"


MOST_GROWTH = 16.0
"""Nobody takes a batch a hundred times as large because there is room for it: beyond this the figure would promise too much (heuristic)."""


def _count_turns(window: Window) -> int:
    """Return how often the matrix work of the analysed steps turns from forward to backward: the passes over a batch."""
    work = window.work().filter(pl.col("phase").is_in(_PASSES) & pl.col("family").is_in(MATRIX_FAMILIES))
    require(work.height > 0, "no matrix work of forward and backward passes was recorded")
    again = window.analysis.trace.ops.select(pl.col("id").alias("call"), pl.col("recompute").fill_null(False).alias("again"))
    backward = (work.join(again, on="call", how="left").sort("start_ns")["phase"] == "backward").to_numpy()
    return int((backward[1:] & ~backward[:-1]).sum())


def _count_passes_of_backward(window: Window, known: pl.DataFrame) -> float:
    """Return the forward passes that go with a call of backward, at most 1: several losses of one forward pass are no micro-batches."""
    numbers = window.steps["name"].str.extract(r"^ProfilerStep#(\d+)$").cast(pl.Int64).drop_nulls()
    backwards = int(known.filter(pl.col("step").is_in(numbers.implode()))["backwards"].sum())
    return min(1.0, _count_turns(window) / backwards) if backwards else 1.0


@fact("micro_batches", unit="count")
def micro_batches(window: Window) -> float:
    """Forward and backward passes whose gradients one optimizer step adds up; 1 without accumulation.

    Calls of backward over optimizer steps, of all recorded steps. Losses that share a forward pass count once.
    """
    # The step records that tell backward passes and optimizer steps
    records = window.analysis.step_records
    if records is None:
        raise NotKnownError(NOT_RECORDED)
    known = records.drop_nulls(["backwards", "optimizer_steps"])
    require(known.height > 0 and int(known["optimizer_steps"].sum()) > 0, "no optimizer stepped in a recorded step")
    calls = int(known["backwards"].sum()) / int(known["optimizer_steps"].sum())
    return max(1.0, calls * _count_passes_of_backward(window, known)) if calls > 1 else 1.0


def _count_mergeable(window: Window) -> int:
    """Return how many micro-batches can go through at once."""
    return max(1, int(min(round(float(micro_batches(window))), estimate_growth_room(window))))


@fact("mergeable_micro_batches", unit="count")
def mergeable_micro_batches(window: Window) -> int:
    """Micro-batches that would fit into memory as one: at most those of an update, and what 92 % of the memory holds."""
    return _count_mergeable(window)


def _find_pass_work(window: Window) -> pl.DataFrame:
    """Return the work of forward and backward passes with floor_ns, what it needs at the peaks, and `adds`: gradients added up."""
    work = window.work(shapes=True).filter(pl.col("phase").is_in(_PASSES))
    if window.on_cpu:
        work = work.filter(pl.col("bound") != "overhead")  # their dispatch is time of the host (facts.host_time)
    rate = look_up_matrix_rate(window)
    matrix, rows = (
        pl.col("family").is_in(MATRIX_FAMILIES),
        pl.when(pl.col("phase") == "backward").then(pl.min_horizontal("m", "k")).otherwise("m"),
    )
    # weights are read once for all rows, so products of few rows are left with their arithmetic; large work gains nothing
    few = matrix & ((pl.col("bound") == "memory") | (rows < FEW_ROWS))
    small = ~matrix & (pl.col("t_roof_ns") < FIXED_NS)
    floor = pl.when(few).then(pl.col("flops") / rate * 1e9).when(small).then("t_roof_ns").otherwise("time_ns")
    floor = pl.when(~matrix & (pl.col("bound") == "overhead")).then(0.0).otherwise(floor)
    adds = pl.col("id").is_in(find_gradient_additions(window)["id"].implode())
    return work.with_columns(floor_ns=pl.min_horizontal(floor.fill_null(pl.col("time_ns")), "time_ns"), adds=adds)


def find_gradient_additions(window: Window) -> pl.DataFrame:
    """Return the kernels that add a gradient to one that is there already (aten::add_ under autograd's AccumulateGrad)."""
    work = window.work().filter(pl.col("op_name").str.contains(_ADDS).fill_null(False))
    calls = work["call"]
    ops = window.analysis.trace.ops
    return work.filter(decode_names(ops["name"].gather(ops["parent"].gather(calls))).fill_null("").str.contains("AccumulateGrad"))


def estimate_merged_saving_ns(window: Window, left: float, adds_left: float) -> float:
    """Return the time in ns that is saved where each cost of a pass is paid `left` (0..1) times as often, for the same samples.

    Products that memory binds or that have few rows, and work too small to last for its size, shrink to that part of their time, but not
    below what their FLOP (products) or bytes need at the peaks; what the host needs to issue work shrinks in full, and the profiler's part
    is in neither. Large work stays as it is. `adds_left`: part of the additions of gradients that is left.
    """
    work = _find_pass_work(window)
    merged = pl.max_horizontal(pl.col("time_ns") * left, "floor_ns")
    saved = work.select(pl.col("time_ns") - pl.when("adds").then(pl.col("time_ns") * adds_left).otherwise(merged)).to_series()
    work_ns = min(float(np.maximum(saved.to_numpy(), 0).sum()), float(window.exposed_ns(work)))
    issued = measure_issued_ns(window)
    host_ns = subtract_profiler_ns(window, issued)
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
    after = -(-before // _count_mergeable(window))
    return 0.0 if before < 2 else estimate_merged_saving_ns(window, after / before, (after - 1) / (before - 1))


@fact("accumulation_saving_share", unit="share")
def accumulation_saving_share(window: Window) -> float:
    """accumulation_saving_ns over the wall time of the analysed steps."""
    return float(accumulation_saving_ns(window)) / window.wall_ns


@fact("larger_batch_saving_ns", unit="ns")
def larger_batch_saving_ns(window: Window) -> float:
    """Time for the same samples that a batch as large as 92 % of the memory holds would save, at most 16 times as large.

    As accumulation_saving_ns, and the optimizer steps once for all of them.
    """
    left = 1 / min(estimate_growth_room(window), MOST_GROWTH)
    optimizer = window.work().filter(pl.col("phase") == "optimizer")
    return estimate_merged_saving_ns(window, left, left) + window.exposed_ns(optimizer) * (1 - left)


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
        return max(alone, estimate_merged_saving_ns(window, left, left) + window.exposed_ns(optimizer) * (1 - left))
    except NotKnownError:  # no passes forward and backward: generation, evaluation
        return alone


MEMORY_SHARE_OF_PEAK = 0.85

FUSED_BYTES = {"adam": 28, "sgd": 20, "adagrad": 20}
"""Bytes per fp32 parameter of a fused step: Adam reads p, g, m, v and writes p, m, v; SGD with momentum and Adagrad read p, g and one
state and write two (op_costs.md section 10)."""

ZEROED_PASSES = 4
"""Bytes that zeroing costs, in sizes of the gradients: one write, then the first accumulation reads two and writes one (16 B per fp32
parameter), where autograd would keep the new gradient as it is."""

_HALF = r"BFloat16|Half"
"""In the name of a kernel over a list of 16-bit tensors."""

_FUSED = r"^aten::_fused_|^apex|fused_adam|FusedAdam|multi_tensor_(adam|sgd)"


def _has_optimizer_step(window: Window) -> bool:
    return bool((window.analysis.trace.ops["phase"] == "optimizer").any())


@fact("optimizer_seen", unit="bool")
def optimizer_seen(window: Window) -> bool:
    """Whether an optimizer step was seen: forward passes alone, and optimizers that do not mark their step, have none."""
    require(window.analysis.trace.ops.height > 0, "no ops were recorded: record with activities=[CPU, CUDA]")
    return _has_optimizer_step(window)


def find_optimizer_work(window: Window) -> pl.DataFrame:
    """Return the kernels of the optimizer step; raises NotKnownError where no optimizer step was seen."""
    work = window.work()
    require(_has_optimizer_step(window), "no optimizer step was seen in the window")
    return work.filter(pl.col("phase") == "optimizer")


@fact("optimizer_ns", unit="ns")
def optimizer_ns(window: Window) -> int:
    """Summed time of the optimizer's kernels (CPU: ops) within the analysed steps."""
    return int(find_optimizer_work(window)["time_ns"].sum())


@fact("optimizer_share", unit="share")
def optimizer_share(window: Window) -> float:
    """optimizer_ns over the wall time of the analysed steps."""
    return window.share_of_wall(find_optimizer_work(window))


@fact("optimizer_style", unit="text")
def optimizer_style(window: Window) -> str:
    """How the optimizer step runs: fused (one pass), foreach (one launch per operation over all tensors) or for-loop (per tensor).

    'compiled' where its kernels were generated, 'custom' where none of these is seen.
    """
    work = find_optimizer_work(window)
    require(work.height > 0, "the optimizer did no work in the analysed steps")
    moving = work.filter(pl.col("bytes_moved").fill_null(1) > 0)  # on a CPU dispatch has rows of its own
    work = moving if moving.height else work
    names = work.select(pl.concat_str([pl.col("op_name").fill_null(""), pl.col("name")], separator=" ").alias("name"), "time_ns")
    kind = (
        pl.when(pl.col("name").str.contains(_FUSED))
        .then(pl.lit("fused"))
        .when(pl.col("name").str.contains(r"^aten::_foreach_|multi_tensor_apply"))
        .then(pl.lit("foreach"))
        .when(pl.col("name").str.contains(r"triton_"))
        .then(pl.lit("compiled"))
        .when(pl.col("name").str.contains(r"^aten::(add|mul|addcmul|addcdiv|div|sqrt|lerp|sub|maximum)_? "))
        .then(pl.lit("for-loop"))
        .otherwise(pl.lit("custom"))
    )
    sums = names.group_by(kind.alias("kind")).agg(pl.col("time_ns").sum()).sort("time_ns", "kind", descending=True)
    return str(sums["kind"][0])


@fact("optimizer_launches_per_step", unit="count")
def optimizer_launches_per_step(window: Window) -> float:
    """Kernels (CPU: ops that work) of the optimizer per analysed step."""
    require(window.steps.height > 0, "no complete step was recorded")
    return find_optimizer_work(window).height / window.steps.height


def _count_updated_parameters(window: Window) -> float:
    """Return how many parameters were updated in the window: from the manifest, else from the shapes of the last op of the update."""
    manifest = window.analysis.manifest
    if manifest is not None and manifest.settings.optimizers:
        # How often the optimizer stepped within the analysed steps
        starts = _find_step_marks(window)["start_ns"].to_numpy()
        inside = int((spans.measure_covered(window.step_spans, starts, starts + 1) > 0).sum())
        return sum(optimizer.parameters for optimizer in manifest.settings.optimizers) * (inside or window.steps.height)
    # each parameter passes exactly one addcdiv (Adam) or is the first input of one add (SGD) per step
    ops = window.analysis.trace.ops.filter(
        (pl.col("phase") == "optimizer") & pl.col("step").is_in(window.steps["id"].implode()) & pl.col("signature").is_not_null()
    ).with_columns(decode_column("name"))
    for name in ("aten::_foreach_addcdiv_", "aten::addcdiv_"):
        calls = ops.filter(pl.col("name") == name)
        if calls.height:
            return float(sum(_read_first_numel(window, row) for row in calls["signature"]))
    raise NotKnownError("the number of parameters is not known: record with gpudiag.profile")


def _find_step_marks(window: Window) -> pl.DataFrame:
    return window.analysis.trace.marks.filter(match_column("name", r"^Optimizer\.step#"))


def _read_first_numel(window: Window, row: int) -> int:
    texts = window.analysis.trace.signatures.row(row, named=True)
    inputs = parse_signature(texts["shapes"], texts["dtypes"], texts["strides"], texts["args"]).inputs
    if not inputs:
        return 0
    return sum(math.prod(shape) for shape in inputs[0].tensors) if inputs[0].tensors is not None else inputs[0].numel


def _list_optimizer_names(window: Window) -> list[str]:
    """Return the class names of the optimizers: of the manifest, then of the marks of their steps."""
    manifest = window.analysis.manifest
    names = [optimizer.name for optimizer in manifest.settings.optimizers] if manifest is not None else []
    marks = decode_names(window.analysis.trace.marks["name"]).str.extract(r"^Optimizer\.step#(\w+)\.").drop_nulls()
    return [*names, *marks.unique().sort()]


def _find_fused_kind(window: Window) -> str | None:
    """Return 'adam', 'sgd' or 'adagrad' from the optimizer's class name; None for others, which have no fused form."""
    found = (kind for name in _list_optimizer_names(window) for kind in FUSED_BYTES if name.lower().rstrip("w") == kind)
    return next(found, None)


@fact("optimizer_has_fused_form", unit="bool")
def optimizer_has_fused_form(window: Window) -> bool:
    """Whether torch has a fused step for an optimizer of the run: Adam, AdamW, SGD, Adagrad."""
    require(bool(_list_optimizer_names(window)), "the class of the optimizer is not known: no call of optimizer.step was marked")
    return _find_fused_kind(window) is not None


@fact("optimizer_saving_ns", unit="ns")
def optimizer_saving_ns(window: Window) -> float:
    """Time of the optimizer beyond one fused pass, with the waits for the host inside Optimizer.step.

    The pass moves 28 B per parameter for Adam(W), 20 for SGD with momentum, at 85 % of the bandwidth; on a CPU at the best rate that a
    kind of op of the optimizer reaches.
    """
    work = find_optimizer_work(window)
    require(work.height > 0, "the optimizer did no work in the analysed steps")
    kind = _find_fused_kind(window)
    if kind is None:
        raise NotKnownError("the traffic of this optimizer's fused form is not known")
    fused_bytes = FUSED_BYTES[kind] * _count_updated_parameters(window)
    return fused_kernels.estimate_fused_saving_ns(window, work, fused_bytes) + fused_kernels.measure_gaps_within_ns(
        window, spans.build_spans(_find_step_marks(window))
    )


@fact("optimizer_host_part", unit="share")
def optimizer_host_part(window: Window) -> float:
    """Part of all waits for Python and the framework that lies inside Optimizer.step."""
    marks = _find_step_marks(window)
    require(marks.height > 0, "no call of optimizer.step was marked in the window")
    return fused_kernels.measure_host_part_within(window, spans.build_spans(marks))


def find_zeroing_work(window: Window) -> pl.DataFrame:
    """Return the kernels that write zeros into gradients: inside Optimizer.zero_grad, or told by the shapes.

    Raises NotKnownError where no zero_grad was marked and nothing else looks like one.
    """
    # The spans of Optimizer.zero_grad; torch up to 1.9 wrote annotations among the ops
    frames = (window.analysis.trace.marks, window.analysis.trace.ops)
    named = match_column("name", r"^Optimizer\.zero_grad#")
    inside = pl.concat([frame.filter(named).select("thread", "start_ns", "end_ns") for frame in frames])
    work = window.work().filter(pl.col("op_name").str.contains(r"^aten::(zero_|_foreach_zero_|fill_)$"))
    starts = window.analysis.trace.ops["start_ns"].gather(work["call"]).fill_null(-1).to_numpy()  # an op's id is its row
    within = pl.Series(spans.measure_covered(spans.build_spans(inside), starts, starts + 1) > 0, dtype=pl.Boolean)
    # Whether each zeroing lies outside the passes and writes a tensor of the shape of a gradient that is then added to. That is
    # p.grad.zero_() and Module.zero_grad(set_to_none=False), which nothing marks
    first = pl.col("shapes").str.split(" x ").list.first()
    shapes = find_gradient_additions(window).select(first.alias("shape")).filter(pl.col("shape") != "")["shape"]
    outside = pl.col("phase").is_in(["other", "optimizer"]).fill_null(False)
    found = work.filter(within | work.select((outside & first.is_in(shapes.implode())).fill_null(False)).to_series())
    require(inside.height > 0 or found.height > 0, "no call of optimizer.zero_grad was seen in the window")
    return found


@fact("zero_grad_share", unit="share")
def zero_grad_share(window: Window) -> float:
    """Time of writing zeros into gradients (zero_grad with set_to_none=False, grad.zero_()) over the wall time of the analysed steps."""
    return window.share_of_wall(find_zeroing_work(window))


def _find_zeroing_calls(window: Window) -> pl.DataFrame:
    """Return the calls that write zeros, with column bytes; raises NotKnownError where none tells how many.

    On a CPU aten::_foreach_zero_ and aten::zero_ leave the writing to aten::fill_: their own rows move nothing, or have no shapes.
    """
    calls = find_zeroing_work(window).filter(pl.col("bytes_moved").fill_null(1) > 0).unique("call")
    narrow = (pl.col("op_name") == "aten::_foreach_zero_") & pl.col("name").str.contains(_HALF)  # counted as fp32: lists carry no type
    sized = pl.coalesce(pl.when(narrow).then(pl.col("zeroed_bytes") // 2).otherwise("zeroed_bytes"), pl.col("numel") * pl.col("item_bytes"))
    told = calls.with_columns(bytes=sized).drop_nulls("bytes")
    require(told.height > 0 or not calls.height, "no shapes: record with record_shapes=True")
    require(window.on_cpu or told.height == calls.height, "no shapes: record with record_shapes=True")
    return told


@fact("zeroed_gradient_bytes", unit="B")
def zeroed_gradient_bytes(window: Window) -> int:
    """Bytes of gradients written with zeros in the analysed steps."""
    return int(_find_zeroing_calls(window)["bytes"].sum())


@fact("zero_grad_saving_ns", unit="ns")
def zero_grad_saving_ns(window: Window) -> float:
    """Time of writing zeros into gradients, and of adding the first gradients of each update to them.

    With set_to_none=True autograd keeps the first gradient as it is (torch/csrc/autograd/functions/accumulate_grad.h); those of further
    micro-batches are added all the same. At least 16 B per fp32 element (one write; then two reads and one write) at 85 % of the bandwidth.
    """
    zeroing, adds = find_zeroing_work(window), find_gradient_additions(window)
    measured = window.exposed_ns(zeroing) + window.exposed_ns(adds) / _count_passes_of_update(window)
    least = ZEROED_PASSES * float(_find_zeroing_calls(window)["bytes"].sum()) / (MEMORY_SHARE_OF_PEAK * window.bandwidth) * 1e9
    return max(float(measured), least)


def _count_passes_of_update(window: Window) -> float:
    try:
        return float(micro_batches(window))
    except NotKnownError:
        return 1.0
