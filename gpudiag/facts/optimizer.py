"""Facts about updates of the parameters: gradient accumulation, the optimizer step, zeroed gradients."""

from __future__ import annotations

import math

import numpy as np
import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.attribution.names import decode_column, decode_names, match_column, match_names
from gpudiag.facts import fused_kernels
from gpudiag.facts.capacity import batch_growth_room
from gpudiag.facts.host_time import dispatching_ns, find_optimizer_time, measure_dispatch_ns, scale_to_recorded_ns, subtract_profiler_ns
from gpudiag.facts.matrix_products import FEW_ROWS, find_costliest_rows, find_skinny_products, look_up_matrix_rate, skinny_saving_ns
from gpudiag.facts.registry import (
    NotKnownError,
    fact,
    fact_of,
    kernel_share,
    kernel_time,
    per_step,
    raise_unknown,
    require,
    require_known,
    total,
    with_share,
)
from gpudiag.facts.window import Window
from gpudiag.roofline.op_calls import MATRIX_FAMILIES
from gpudiag.timeline.whatif.device_time import estimate_fixed_ns

NOT_RECORDED = "how many backward passes make one update is not in this recording: record with gpudiag.profile or gpudiag run"

FIXED_NS = 10_000
"""Work that its bytes keep busy for less than 10 us lasts for what one call costs, not for its size (heuristic: two launches on a GPU)."""

_PASSES = ("forward", "backward")


MOST_GROWTH = 16.0
"""Nobody takes a batch a hundred times as large because there is room for it: beyond this the figure would promise too much (heuristic)."""


def micro_batches(window: Window) -> float:
    """Forward and backward passes whose gradients one optimizer step adds up; 1 without accumulation.

    Calls of backward over optimizer steps, of all recorded steps. Losses that share a forward pass count once. Where autograd added none of
    the gradients of the analysed steps to one that was there, there is none: the closure of LBFGS, gradients taken away sample by sample.
    """
    known = require_known(window.analysis.step_records, NOT_RECORDED).drop_nulls(["backwards", "optimizer_steps"])
    updates = int(known["optimizer_steps"].sum())
    require(updates > 0, "no optimizer stepped in a recorded step")
    calls = int(known["backwards"].sum()) / updates
    nodes = window.recorded_ops.select(match_column("name", "AccumulateGrad$").any()).item()
    if calls <= 1 or (nodes and not find_gradient_additions(window).height):
        return 1.0
    numbers = window.steps["name"].str.extract(r"^ProfilerStep#(\d+)$").cast(pl.Int64).drop_nulls()
    backwards = int(known.filter(pl.col("step").is_in(numbers.implode()))["backwards"].sum())
    if not backwards:
        return calls
    # how often the matrix work of the analysed steps turns from forward to backward: the passes over a batch
    work = window.work().filter(pl.col("phase").is_in(_PASSES) & pl.col("family").is_in(MATRIX_FAMILIES))
    require(work.height > 0, "no matrix work of forward and backward passes was recorded")
    backward = (work.sort("start_ns")["phase"] == "backward").to_numpy()
    turns = int((backward[1:] & ~backward[:-1]).sum())
    return max(1.0, calls * min(1.0, turns / backwards))


def mergeable_micro_batches(window: Window) -> int:
    """Micro-batches that would fit into memory as one: at most those of an update, and what 92 % of the memory holds."""
    return max(1, int(min(round(micro_batches(window)), batch_growth_room(window))))


def find_gradient_additions(window: Window) -> pl.DataFrame:
    """Return the kernels that add a gradient to one that is there already (aten::add_ under autograd's AccumulateGrad)."""
    work = window.work().filter(pl.col("op_name").str.contains(r"^aten::add_?$").fill_null(False))
    return work.filter(window.name_around(work).fill_null("").str.contains("AccumulateGrad"))


def estimate_merged_saving_ns(window: Window, left: float, adds_left: float, *, dispatch: pl.Expr | None = None) -> float:
    """Return the time in ns that is saved where each cost of a pass is paid `left` (0..1) times as often, for the same samples.

    Products that memory binds or that have few rows, and work too small to last for its size, shrink to that part of their time, but not
    below what their FLOP (products) or bytes need at the peaks; what the host needs to issue work shrinks in full, and the profiler's part
    is in neither. Large work stays as it is. `adds_left`: part of the additions of gradients that is left; `dispatch`: what small ops of a
    CPU take for being issued.
    """
    work, rate = window.work(shapes=True).filter(pl.col("phase").is_in(_PASSES)), look_up_matrix_rate(window)
    if window.on_cpu:
        work = work.filter(pl.col("bound") != "overhead")  # their dispatch is time of the host (facts.host_time)
    matrix = pl.col("family").is_in(MATRIX_FAMILIES)
    rows = pl.when(pl.col("phase") == "backward").then(pl.min_horizontal("m", "k")).otherwise("m")
    # what the work needs at the peaks: weights are read once for all rows, so products of few rows are left with their arithmetic
    few = matrix & ((pl.col("bound") == "memory") | (rows < FEW_ROWS))
    small = ~matrix & (pl.col("t_roof_ns") < FIXED_NS)
    floor = pl.when(few).then(pl.col("flops") / rate * 1e9).when(small).then("t_roof_ns").otherwise("time_ns")
    floor = pl.when(~matrix & (pl.col("bound") == "overhead")).then(0.0).otherwise(floor)
    merged = pl.max_horizontal(pl.col("time_ns") * left, pl.min_horizontal(floor.fill_null(pl.col("time_ns")), "time_ns"))
    adds = pl.col("id").is_in(find_gradient_additions(window)["id"].implode())
    saved = work.select(pl.col("time_ns") - pl.when(adds).then(pl.col("time_ns") * adds_left).otherwise(merged)).to_series()
    work_ns = min(float(np.maximum(saved.to_numpy(), 0).sum()), float(window.exposed_ns(work)))
    issued = dispatching_ns(window)  # the data grow, and so does the program's own code
    if window.on_cpu:
        dispatched = window.work().with_columns(fixed=estimate_fixed_ns() if dispatch is None else dispatch)
        dispatched = dispatched.filter(pl.col("bound") == "overhead")
        issued += float(dispatched.filter(pl.col("phase").is_in(_PASSES))["fixed"].sum()) - measure_dispatch_ns(window)
    return scale_to_recorded_ns(window, work_ns + subtract_profiler_ns(window, issued) * (1 - left))


def accumulation_saving_ns(window: Window) -> float:
    """Time of the analysed steps that merging the micro-batches of an update would save, as far as memory allows.

    Each pass reads all weights, issues all work and adds its gradients to those before it. With k micro-batches in g passes, g/k of that
    is left, matrix work keeps its arithmetic, and of k - 1 additions g - 1 are left.
    """
    before = round(micro_batches(window))
    after = -(-before // mergeable_micro_batches(window))
    small = (pl.col("time_ns") - pl.col("t_roof_ns").fill_null(0.0)).clip(lower_bound=0)  # many passes for one: all but what the data need
    return 0.0 if before < 2 else estimate_merged_saving_ns(window, after / before, (after - 1) / (before - 1), dispatch=small)


def estimate_fewer_steps_ns(window: Window, left: float) -> float:
    """Return estimate_merged_saving_ns, and the optimizer steps that then come `left` (0..1) times as often."""
    optimizer = window.work().filter(pl.col("phase") == "optimizer")
    return estimate_merged_saving_ns(window, left, left) + window.exposed_ns(optimizer) * (1 - left)


def few_rows_saving_ns(window: Window) -> float:
    """Time per sample that the steps would save if batches made 128 rows where most skinny products have fewer.

    The larger of what these products and what fewer passes would save: each reads all weights, issues all work, adds up gradients and is
    followed by a step of the optimizer.
    """
    alone = skinny_saving_ns(window)
    try:
        return max(alone, estimate_fewer_steps_ns(window, min(1.0, find_costliest_rows(find_skinny_products(window)) / FEW_ROWS)))
    except NotKnownError:  # no passes forward and backward: generation, evaluation
        return alone


FUSED_BYTES = {"adam": 28, "sgd": 20, "adagrad": 20}
"""Bytes per fp32 parameter of a fused step: Adam reads p, g, m, v and writes p, m, v; SGD with momentum and Adagrad read p, g and one
state and write two (op_costs.md section 10)."""

ZEROED_PASSES = 4
"""Bytes that zeroing costs, in sizes of the gradients: one write, then the first accumulation reads two and writes one (16 B per fp32
parameter), where autograd would keep the new gradient as it is."""

_HALF = r"BFloat16|Half"
"""In the name of a kernel over a list of 16-bit tensors."""

_STYLES = {
    "fused": r"^aten::_fused_|^apex|fused_adam|FusedAdam|multi_tensor_(adam|sgd)",
    "foreach": r"^aten::_foreach_|multi_tensor_apply",
    "compiled": r"triton_",
    "for-loop": r"^aten::(add|mul|addcmul|addcdiv|div|sqrt|lerp|sub|maximum)_? ",
}
"""Way in which the optimizer's step runs -> its ops and kernels ("op kernel"); the first that fits."""


def find_optimizer_work(window: Window) -> pl.DataFrame:
    """Return the kernels of the optimizer step; raises NotKnownError where no optimizer step was seen."""
    work = window.work()
    require(bool((window.analysis.trace.ops["phase"] == "optimizer").any()), "no optimizer step was seen in the window")
    return work.filter(pl.col("phase") == "optimizer")


def optimizer_style(window: Window) -> str:
    """How the optimizer step runs: fused (one pass), foreach (one launch per operation over all tensors) or for-loop (per tensor).

    'compiled' where its kernels were generated, 'custom' where none of these is seen.
    """
    work = find_optimizer_work(window)
    require(work.height > 0, "the optimizer did no work in the analysed steps")
    moving = work.filter(pl.col("bytes_moved").fill_null(1) > 0)  # on a CPU dispatch has rows of its own
    work = moving if moving.height else work
    # An op over lists runs those of its tensors one by one on a CPU (ATen/native/ForeachOpsKernels.cpp)
    ops = window.recorded_ops["name"]
    listed = decode_names(ops.gather(window.find_around(work, match_names(ops, r"^aten::_(foreach|fused)_").to_numpy())))
    names = work.with_columns(op_name=pl.coalesce(listed, pl.col("op_name"), pl.lit("")))
    names = names.select(pl.concat_str(["op_name", "name"], separator=" ").alias("name"), "time_ns")
    kind = pl.lit("custom")
    for style, pattern in reversed(_STYLES.items()):
        kind = pl.when(pl.col("name").str.contains(pattern)).then(pl.lit(style)).otherwise(kind)
    sums = names.group_by(kind.alias("kind")).agg(pl.col("time_ns").sum()).sort("time_ns", "kind", descending=True)
    return str(sums["kind"][0])


def _count_updated_parameters(window: Window) -> float:
    """Return how many parameters were updated in the window: from the manifest, else from the shapes of the last op of the update."""
    manifest = window.analysis.manifest
    if manifest is not None and manifest.settings.optimizers:
        starts = window.analysis.trace.marks.filter(match_column("name", r"^Optimizer\.step#"))["start_ns"].to_numpy()
        updates = int((spans.measure_covered(window.host_spans, starts, starts + 1) > 0).sum()) or window.steps.height
        return sum(optimizer.parameters for optimizer in manifest.settings.optimizers) * updates
    # each parameter passes exactly one addcdiv (Adam) or is the first input of one add (SGD) per step
    within = (pl.col("phase") == "optimizer") & window.within_steps
    ops = window.analysis.trace.ops.filter(within & pl.col("signature").is_not_null()).with_columns(decode_column("name"))
    for name in ("aten::_foreach_addcdiv_", "aten::addcdiv_"):
        rows = ops.filter(pl.col("name") == name)["signature"]
        if len(rows):
            firsts = [inputs[0] for row in rows if (inputs := window.signature(row).inputs)]
            return float(sum(sum(math.prod(shape) for shape in x.tensors) if x.tensors is not None else x.numel for x in firsts))
    raise NotKnownError("the number of parameters is not known: record with gpudiag.profile")


def _list_optimizer_names(window: Window) -> list[str]:
    """Return the class names of the optimizers that are not known to be fused: of the manifest, then of the marks of their steps."""
    used = window.analysis.manifest.settings.optimizers if window.analysis.manifest is not None else ()
    open_names = [one.name for one in used if one.implementation != "fused"]
    marks = decode_names(window.analysis.trace.marks["name"]).str.extract(r"^Optimizer\.step#(\w+)\.").drop_nulls()
    return [*open_names, *(name for name in marks.unique().sort() if name not in {one.name for one in used})]


def _find_fused_kind(window: Window) -> str | None:
    """Return 'adam', 'sgd' or 'adagrad' from the optimizer's class name; None for others, which have no fused form."""
    found = (kind for name in _list_optimizer_names(window) for kind in FUSED_BYTES if name.lower().rstrip("w") == kind)
    return next(found, None)


SMALL_TENSOR = 4096
FOREACH_ON_CPU = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""Elements of a tensor up to which, and classes for which, foreach=True was measured to be faster than the loop on a CPU."""


def foreach_helps(window: Window) -> bool:
    """Whether foreach=True was seen to be faster than the loop for optimizers of this class.

    GPU: yes. CPU: where they are of a class that was and their tensors are small in the mean (tests/benchmarks/RESULTS.md): it saves
    calls, but its temporary tensors live all at once.
    """
    if not window.on_cpu:
        return True
    manifest = window.analysis.manifest
    used = require_known((manifest and manifest.settings.optimizers) or None, "the optimizers are not known: record with gpudiag.profile")
    used = tuple(one for one in used if one.implementation != "fused")
    return bool(used) and all(one.name in FOREACH_ON_CPU and one.parameters <= SMALL_TENSOR * one.tensors for one in used)


def optimizer_saving_ns(window: Window) -> float:
    """Time of the optimizer beyond one fused pass, with the waits for the host inside the optimizer.

    The pass moves 28 B per parameter for Adam(W), 20 for SGD with momentum, at the whole bandwidth; on a CPU at the best rate that a
    kind of op of the optimizer reaches. CPU, without a fused form: the waits and what dispatching the ops takes, which foreach saves.
    What the recorded steps take beyond the optimizer's part of plain ones (their clock) is the profiler's: no bound on a CPU holds it.
    """
    work = find_optimizer_work(window)
    require(work.height > 0, "the optimizer did no work in the analysed steps")
    kind, gaps_ns, history = _find_fused_kind(window), _measure_waits_ns(window), window.history
    if kind is None and window.on_cpu:
        saved_ns = gaps_ns + float(work.select(estimate_fixed_ns().sum()).item())
    else:
        kind = require_known(kind, "the traffic of this optimizer's fused form is not known")
        fused_bytes = FUSED_BYTES[kind] * _count_updated_parameters(window)
        saved_ns = fused_kernels.estimate_fused_saving_ns(window, work, fused_bytes) + gaps_ns
    if window.on_cpu and history and history.median_ns and history.phases and history.phases.optimizer_ns:
        plain_ns = history.phases.optimizer_ns / history.median_ns * window.wall_ns
        saved_ns -= max(0.0, float(work["time_ns"].sum()) + gaps_ns - plain_ns)
    return max(saved_ns, 0.0)


def find_unused_row_work(window: Window) -> pl.DataFrame:
    """Return the kernels that treat rows of embedding tables which no batch looked up, with `unused`, the part of each that does so.

    A dense gradient is zeroed for all rows of its table, and the optimizer goes over them all; sparse gradients hold the rows that
    were looked up (torch.nn.Embedding, `sparse`). At most as many rows are in use as indices came in. A table that a product shares (tied
    weights) has a gradient in every row.
    """
    ops, work = window.recorded_ops, window.work(shapes=True)
    dense = match_names(ops["name"], "^aten::(embedding|_embedding_bag)_dense_backward$")
    work = work.with_columns(lookup=window.find_around(work, dense.to_numpy()))
    tied = set(work.filter((pl.col("phase") == "backward") & pl.col("family").is_in(MATRIX_FAMILIES)).select("m", "n").iter_rows())
    unused, elements = {}, 0.0
    passes = max(1.0, micro_batches(window)) if window.analysis.step_records is not None else 1.0
    for row, number in ops.filter(dense & ops.select(window.within_steps).to_series()).select("id", "signature").drop_nulls().iter_rows():
        gradient, indices, *more = window.signature(number).inputs  # num_weights, of bags behind three tensors
        rows = next((item.value for item in more if type(item.value) is int), None)
        if rows and gradient.shape and (rows, gradient.shape[-1]) not in tied:
            unused[row] = max(0.0, 1 - passes * indices.numel / rows)
            elements += unused[row] * rows * gradient.shape[-1] / passes
    updating = min(1.0, elements / _count_updated_parameters(window)) if elements else 0.0
    zeroed = pl.col("lookup").replace_strict(unused, default=0.0, return_dtype=pl.Float64)
    zeroed = pl.when(pl.col("op_name").is_in(["aten::fill_", "aten::zero_"])).then(zeroed).otherwise(0.0)
    return work.with_columns(unused=pl.when(pl.col("phase") == "optimizer").then(updating).otherwise(zeroed)).filter(pl.col("unused") > 0)


def unused_rows_ns(window: Window) -> float:
    """Time in which gradients and the optimizer treat rows of embedding tables that no batch looked up; 0 where gradients are sparse."""
    return float(find_unused_row_work(window).select((pl.col("time_ns") * pl.col("unused")).sum()).item())


def _measure_waits_ns(window: Window) -> float:
    return fused_kernels.measure_gaps_within_ns(window, find_optimizer_time(window))


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


def zero_grad_saving_ns(window: Window) -> float:
    """Time of writing zeros into gradients, and of adding the first gradients of each update to them.

    With set_to_none=True autograd keeps the first gradient as it is (torch/csrc/autograd/functions/accumulate_grad.h); those of further
    micro-batches are added all the same. At least 16 B per fp32 element (one write; then two reads and one write) at 85 % of the bandwidth.
    """
    zeroing, adds = find_zeroing_work(window), find_gradient_additions(window)
    zeroing_ns, adds_ns = window.exposed_ns(zeroing), window.exposed_ns(adds)
    try:
        passes = micro_batches(window)
    except NotKnownError:
        passes = 1.0
    least = (
        ZEROED_PASSES * float(_find_zeroing_calls(window)["bytes"].sum()) / (fused_kernels.MEMORY_SHARE_OF_PEAK * window.bandwidth) * 1e9
    )
    return max(zeroing_ns + adds_ns / passes, least)


# fmt: off
FACTS = (
    fact_of(micro_batches, "count"),
    fact_of(mergeable_micro_batches, "count"),
    *with_share(accumulation_saving_ns),
    fact("larger_batch_saving_ns", "ns", "Time for the same samples that a batch as large as 92 % of the memory holds would save, at most "
         "16 times as large. As accumulation_saving_ns, and the optimizer steps once for all of them.",
         lambda window: estimate_fewer_steps_ns(window, 1 / min(batch_growth_room(window), MOST_GROWTH))),
    fact_of(few_rows_saving_ns, "ns"),
    fact("optimizer_seen", "bool", "Whether an optimizer step was seen: forward passes alone, and optimizers that do not mark their step, "
         "have none.", lambda window: bool((window.recorded_ops["phase"] == "optimizer").any())),
    *kernel_time("optimizer", "Time of the optimizer's kernels (CPU: ops)", find_optimizer_work),
    fact_of(optimizer_style, "text"),
    fact("optimizer_launches_per_step", "count", "Kernels (CPU: ops that work) of the optimizer per analysed step.",
         per_step(find_optimizer_work)),
    fact("optimizer_has_fused_form", "bool", "Whether torch has a fused step for one that is not fused: Adam, AdamW, SGD, Adagrad.",
         lambda window: (_find_fused_kind(window) is not None
                         if _list_optimizer_names(window) or (window.analysis.manifest and window.analysis.manifest.settings.optimizers)
                         else raise_unknown("the class of the optimizer is not known: no call of optimizer.step was marked"))),
    fact_of(foreach_helps, "bool"),
    *with_share(unused_rows_ns),
    fact("without_unused_rows_ns", "ns", "Time saved if neither gradients nor the optimizer treated rows of embedding tables that no batch "
         "looked up: replayed, else unused_rows_ns.",
         lambda window: window.saving_ns(find_unused_row_work(window), pl.col("time_ns") * (1 - pl.col("unused")))),
    *with_share(optimizer_saving_ns),
    fact("optimizer_waits_ns", "ns", "Waits for the host inside the optimizer's step() and zero_grad(), their closures aside, within the "
         "analysed steps.", _measure_waits_ns),
    kernel_share("zero_grad_share", "Time of writing zeros into gradients (zero_grad with set_to_none=False, grad.zero_())",
         find_zeroing_work),
    fact("zeroed_gradient_bytes", "B", "Bytes of gradients written with zeros in the analysed steps.",
         total(_find_zeroing_calls, "bytes")),
    fact_of(zero_grad_saving_ns, "ns"),
)
# fmt: on
