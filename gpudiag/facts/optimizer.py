"""Facts about the optimizer step and zeroed gradients (MEM-05, MEM-08)."""

from __future__ import annotations

import math

import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.attribution.names import matches, text, texts
from gpudiag.facts import attained
from gpudiag.facts.accumulation import gradient_additions, micro_batches
from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window
from gpudiag.model.signature import parse_signature

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


def _seen(window: Window) -> bool:
    return bool((window.analysis.trace.ops["phase"] == "optimizer").any())


@fact("optimizer_seen", unit="bool")
def optimizer_seen(window: Window) -> bool:
    """Whether an optimizer step was seen: forward passes alone, and optimizers that do not mark their step, have none."""
    require(window.analysis.trace.ops.height > 0, "no ops were recorded: record with activities=[CPU, CUDA]")
    return _seen(window)


def optimizer_work(window: Window) -> pl.DataFrame:
    """Return the kernels of the optimizer step; raises NotKnownError where no optimizer step was seen."""
    work = window.work()
    require(_seen(window), "no optimizer step was seen in the window")
    return work.filter(pl.col("phase") == "optimizer")


@fact("optimizer_ns", unit="ns")
def optimizer_ns(window: Window) -> int:
    """Summed time of the optimizer's kernels (CPU: ops) within the analysed steps."""
    return int(optimizer_work(window)["time_ns"].sum())


@fact("optimizer_share", unit="share")
def optimizer_share(window: Window) -> float:
    """optimizer_ns over the wall time of the analysed steps."""
    return window.share_of_wall(optimizer_work(window))


@fact("optimizer_style", unit="text")
def optimizer_style(window: Window) -> str:
    """How the optimizer step runs: fused (one pass), foreach (one launch per operation over all tensors) or for-loop (per tensor).

    'compiled' where its kernels were generated, 'custom' where none of these is seen.
    """
    work = optimizer_work(window)
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
    return optimizer_work(window).height / window.steps.height


def _parameters_per_window(window: Window) -> float:
    """Return how many parameters were updated in the window: from the manifest, else from the shapes of the last op of the update."""
    manifest = window.analysis.manifest
    if manifest is not None and manifest.settings.optimizers:
        return sum(optimizer.parameters for optimizer in manifest.settings.optimizers) * _updates(window)
    # each parameter passes exactly one addcdiv (Adam) or is the first input of one add (SGD) per step
    ops = window.analysis.trace.ops.filter(
        (pl.col("phase") == "optimizer") & pl.col("step").is_in(window.steps["id"].implode()) & pl.col("signature").is_not_null()
    ).with_columns(text("name"))
    for name in ("aten::_foreach_addcdiv_", "aten::addcdiv_"):
        calls = ops.filter(pl.col("name") == name)
        if calls.height:
            return float(sum(_first_numel(window, row) for row in calls["signature"]))
    raise NotKnownError("the number of parameters is not known: record with gpudiag.profile")


def _step_marks(window: Window) -> pl.DataFrame:
    return window.analysis.trace.marks.filter(matches("name", r"^Optimizer\.step#"))


def _updates(window: Window) -> int:
    """Return how often the optimizer stepped within the analysed steps."""
    starts = _step_marks(window)["start_ns"].to_numpy()
    inside = int((spans.covered(window.step_spans, starts, starts + 1) > 0).sum())
    return inside or window.steps.height


def _first_numel(window: Window, row: int) -> int:
    texts = window.analysis.trace.signatures.row(row, named=True)
    inputs = parse_signature(texts["shapes"], texts["dtypes"], texts["strides"], texts["args"]).inputs
    if not inputs:
        return 0
    return sum(math.prod(shape) for shape in inputs[0].tensors) if inputs[0].tensors is not None else inputs[0].numel


def _names(window: Window) -> list[str]:
    """Return the class names of the optimizers: of the manifest, then of the marks of their steps."""
    manifest = window.analysis.manifest
    names = [optimizer.name for optimizer in manifest.settings.optimizers] if manifest is not None else []
    marks = texts(window.analysis.trace.marks["name"]).str.extract(r"^Optimizer\.step#(\w+)\.").drop_nulls()
    return [*names, *marks.unique().sort()]


def _kind(window: Window) -> str | None:
    """Return 'adam', 'sgd' or 'adagrad' from the optimizer's class name; None for others, which have no fused form."""
    found = (kind for name in _names(window) for kind in FUSED_BYTES if name.lower().rstrip("w") == kind)
    return next(found, None)


@fact("optimizer_has_fused_form", unit="bool")
def optimizer_has_fused_form(window: Window) -> bool:
    """Whether torch has a fused step for an optimizer of the run: Adam, AdamW, SGD, Adagrad."""
    require(bool(_names(window)), "the class of the optimizer is not known: no call of optimizer.step was marked")
    return _kind(window) is not None


@fact("optimizer_saving_ns", unit="ns")
def optimizer_saving_ns(window: Window) -> float:
    """Time of the optimizer beyond one fused pass, with the waits for the host inside Optimizer.step.

    The pass moves 28 B per parameter for Adam(W), 20 for SGD with momentum, at 85 % of the bandwidth; on a CPU at the best rate that a
    kind of op of the optimizer reaches.
    """
    work = optimizer_work(window)
    require(work.height > 0, "the optimizer did no work in the analysed steps")
    kind = _kind(window)
    if kind is None:
        raise NotKnownError("the traffic of this optimizer's fused form is not known")
    fused_bytes = FUSED_BYTES[kind] * _parameters_per_window(window)
    return attained.fused_saving_ns(window, work, fused_bytes) + attained.gaps_within_ns(window, spans.of(_step_marks(window)))


@fact("optimizer_host_part", unit="share")
def optimizer_host_part(window: Window) -> float:
    """Part of all waits for Python and the framework that lies inside Optimizer.step."""
    marks = _step_marks(window)
    require(marks.height > 0, "no call of optimizer.step was marked in the window")
    return attained.host_part_within(window, spans.of(marks))


def _zero_grad_calls(window: Window) -> pl.DataFrame:
    """Return the spans of Optimizer.zero_grad; torch up to 1.9 wrote annotations among the ops."""
    frames = (window.analysis.trace.marks, window.analysis.trace.ops)
    named = matches("name", r"^Optimizer\.zero_grad#")
    return pl.concat([frame.filter(named).select("thread", "start_ns", "end_ns") for frame in frames])


def _like_gradients(window: Window, work: pl.DataFrame) -> pl.Series:
    """Return whether each zeroing lies outside the passes and writes a tensor of the shape of a gradient that is then added to.

    That is p.grad.zero_() and Module.zero_grad(set_to_none=False), which nothing marks.
    """
    first = pl.col("shapes").str.split(" x ").list.first()
    shapes = gradient_additions(window).select(first.alias("shape")).filter(pl.col("shape") != "")["shape"]
    outside = pl.col("phase").is_in(["other", "optimizer"]).fill_null(False)
    return work.select((outside & first.is_in(shapes.implode())).fill_null(False)).to_series()


def zeroing_work(window: Window) -> pl.DataFrame:
    """Return the kernels that write zeros into gradients: inside Optimizer.zero_grad, or told by the shapes.

    Raises NotKnownError where no zero_grad was marked and nothing else looks like one.
    """
    inside = _zero_grad_calls(window)
    work = window.work().filter(pl.col("op_name").str.contains(r"^aten::(zero_|_foreach_zero_|fill_)$"))
    starts = window.analysis.trace.ops["start_ns"].gather(work["call"]).fill_null(-1).to_numpy()  # an op's id is its row
    within = pl.Series(spans.covered(spans.of(inside), starts, starts + 1) > 0, dtype=pl.Boolean)
    found = work.filter(within | _like_gradients(window, work))
    require(inside.height > 0 or found.height > 0, "no call of optimizer.zero_grad was seen in the window")
    return found


@fact("zero_grad_share", unit="share")
def zero_grad_share(window: Window) -> float:
    """Time of writing zeros into gradients (zero_grad with set_to_none=False, grad.zero_()) over the wall time of the analysed steps."""
    return window.share_of_wall(zeroing_work(window))


def _zeroing_calls(window: Window) -> pl.DataFrame:
    """Return the calls that write zeros, with column bytes; raises NotKnownError where none tells how many.

    On a CPU aten::_foreach_zero_ and aten::zero_ leave the writing to aten::fill_: their own rows move nothing, or have no shapes.
    """
    calls = zeroing_work(window).filter(pl.col("bytes_moved").fill_null(1) > 0).unique("call")
    narrow = (pl.col("op_name") == "aten::_foreach_zero_") & pl.col("name").str.contains(_HALF)  # counted as fp32: lists carry no type
    sized = pl.coalesce(pl.when(narrow).then(pl.col("zeroed_bytes") // 2).otherwise("zeroed_bytes"), pl.col("numel") * pl.col("item_bytes"))
    told = calls.with_columns(bytes=sized).drop_nulls("bytes")
    require(told.height > 0 or not calls.height, "no shapes: record with record_shapes=True")
    require(window.on_cpu or told.height == calls.height, "no shapes: record with record_shapes=True")
    return told


@fact("zeroed_gradient_bytes", unit="B")
def zeroed_gradient_bytes(window: Window) -> int:
    """Bytes of gradients written with zeros in the analysed steps."""
    return int(_zeroing_calls(window)["bytes"].sum())


@fact("zero_grad_saving_ns", unit="ns")
def zero_grad_saving_ns(window: Window) -> float:
    """Time of writing zeros into gradients, and of adding the first gradients of each update to them.

    With set_to_none=True autograd keeps the first gradient as it is (torch/csrc/autograd/functions/accumulate_grad.h); those of further
    micro-batches are added all the same. At least 16 B per fp32 element (one write; then two reads and one write) at 85 % of the bandwidth.
    """
    zeroing, adds = zeroing_work(window), gradient_additions(window)
    measured = window.exposed_ns(zeroing) + window.exposed_ns(adds) / _passes_of_an_update(window)
    least = ZEROED_PASSES * float(_zeroing_calls(window)["bytes"].sum()) / (MEMORY_SHARE_OF_PEAK * window.bandwidth) * 1e9
    return max(float(measured), least)


def _passes_of_an_update(window: Window) -> float:
    try:
        return float(micro_batches(window))
    except NotKnownError:
        return 1.0
