"""batch=2: steps of twice the samples. Work that grows with the batch grows, the rest of the step stays."""

from __future__ import annotations

import msgspec
import numpy as np
import polars as pl

from gpudiag.attribution.names import contains, text
from gpudiag.model.graph import Graph
from gpudiag.model.signature import Shape, parse_signature
from gpudiag.timeline.whatif.context import Context
from gpudiag.timeline.whatif.setting import Kind, Setting, number
from gpudiag.timeline.whatif.times import Bools, Floats, Times, kernel_sums, of_kind, scaled, with_kernels

_LARGEST = 1024
_FOUND_SHARE = 0.95
"""The batch is the largest first dimension that divides those of nearly all the work that any candidate divides."""
_KNOWN_SHARE = 0.5
"""Less of the kernel time with known shapes than this, and nothing is said."""
_TO_DEVICE = r"(?i)HtoD|HostToDevice"
_EXCHANGE = r"(?i)all_?to_?all|send_?recv"
"""Kernels of NCCL and RCCL that exchange activations (ncclDevKernel_SendRecv runs all_to_all)."""
_WEIGHT_AT = {"linear": 1, "addmm": 2, "convolution": 1, "_convolution": 1, "cudnn_convolution": 1, "miopen_convolution": 1, "embedding": 0}
"""Place of the weight among the inputs (native_functions.yaml)."""


def _apply(graph: Graph, times: Times, context: Context, setting: Setting) -> Times | None:
    factor = number(setting, 1, _LARGEST)
    growing = context.once("per sample", lambda: per_sample(context))
    if not growing.any():
        return None  # for all steps alike: they have one batch size
    now = kernel_sums(graph, times, context.busy_ns)
    grown = np.maximum(now * _growth(context, factor), np.minimum(np.nan_to_num(context.t_roof_ns), now) * factor)
    times = with_kernels(graph, times, np.where(growing & (now > 0), grown, np.nan), context.busy_ns)
    times = scaled(times, of_kind(graph, "data") | _input_copies(graph, context), factor)
    return msgspec.structs.replace(times, samples=times.samples * factor)


def _input_copies(graph: Graph, context: Context) -> Bools:
    """Return the copies to the device: they bring the batch."""
    names = contains(context.trace.kernels["name"], _TO_DEVICE).fill_null(False).to_numpy()
    copies: Bools = of_kind(graph, "copy") & np.append(names, False)[graph.kernel]
    return copies


def _growth(context: Context, factor: float) -> Floats:
    """Return the factor on the time of each kernel that works on the batch.

    More thread blocks first fill the SMs that stay empty: a kernel of less than one wave takes no longer until it has one. Where waves are
    not known, a kernel that is bound by overhead takes no longer (both: not shorter than its new roof, which the caller sees to).
    """
    waves = context.work["waves"].cast(pl.Float64).fill_null(float("nan")).to_numpy()
    by_waves = np.maximum(waves * factor, 1) / np.maximum(waves, 1)
    overhead = (context.work["bound"] == "overhead").fill_null(False).to_numpy()
    return np.where(np.isnan(waves), np.where(overhead, 1.0, factor), by_waves)


def per_sample(context: Context) -> Bools:
    """Return the kernels that work on the batch: of forward or backward, with an input that is no parameter and begins with the batch.

    A kernel whose shapes or phase are not known is taken for one; none is where the shapes of most of the time are not known. So are
    collectives that exchange activations (all-to-all, send and receive). The others are fixed: optimizer, work on weights alone,
    collectives of gradients and weights, copies.
    """
    work = context.work
    phases = pl.col("phase").is_in(["forward", "backward"]) | pl.col("phase").is_null()  # null: not known, as in a run that only infers
    model = phases & ~pl.col("collective").fill_null(False) & (pl.col("kind") != "memcpy")
    inside = work.select(model.alias("model"))["model"].to_numpy()
    rows = work["signature"].fill_null(-1).to_numpy()
    time = np.where(inside, work["busy_ns"].fill_null(0).to_numpy(), 0)
    leading = _leading(context)
    spent = np.bincount(rows[rows >= 0], weights=time[rows >= 0], minlength=len(leading))
    batch = context.samples or _most_common(spent.tolist(), leading)
    if batch is None or spent.sum() < _KNOWN_SHARE * time.sum():
        return np.zeros(work.height, dtype=np.bool_)
    grows = np.array([any(size % batch == 0 for size in sizes) for sizes in leading] + [True], dtype=np.bool_)
    exchanged = work["collective"].fill_null(False) & work["name"].str.contains(_EXCHANGE)
    result: Bools = (inside & grows[rows]) | exchanged.to_numpy()
    return result


def _most_common(spent: list[float], leading: list[tuple[int, ...]]) -> int | None:
    """Return the batch size that the shapes show, by the time `spent` with each signature; None where they show none."""
    used = [(sizes, ns) for sizes, ns in zip(leading, spent, strict=True) if ns > 0 and sizes]
    reach = {size: sum(ns for sizes, ns in used if any(other % size == 0 for other in sizes)) for sizes, _ in used for size in sizes}
    best = max(reach.values(), default=0.0)
    return max((size for size, ns in reach.items() if ns >= _FOUND_SHARE * best), default=None)


def _leading(context: Context) -> list[tuple[int, ...]]:
    """Return for each signature the first dimensions (> 0) of its tensors that are no parameters."""
    parameters = _parameters(context)
    parsed = [_shapes(*row) for row in context.trace.signatures.select("shapes", "dtypes").iter_rows()]
    return [tuple({shape[0] for shape in shapes if shape and shape[0] and shape not in parameters}) for shapes in parsed]


def _shapes(shapes: str, dtypes: str | None) -> tuple[Shape, ...]:
    """Return the shapes of the tensors of at least two dimensions, and of the lists of tensors."""
    inputs = parse_signature(shapes, dtypes, None, None).inputs
    return tuple(shape for item in inputs for shape in (item.tensors or (item.shape,)) if len(shape) >= 2)


def _parameters(context: Context) -> frozenset[Shape]:
    """Return the shapes of the parameters, and of their transposes.

    They are the inputs of AccumulateGrad nodes, of ops of the optimizer, and the weights of layers.
    """
    ops = context.trace.ops.select(text("name"), "phase", "signature").drop_nulls("signature").unique()
    accumulated = ops.filter(pl.col("name").str.contains("AccumulateGrad") | (pl.col("phase") == "optimizer").fill_null(False))
    texts = context.trace.signatures.select("shapes", "dtypes")
    found = {shape for row in accumulated["signature"].unique().to_list() for shape in _shapes(*texts.row(row))}
    for name, row in ops.select("name", "signature").unique().iter_rows():
        place = _WEIGHT_AT.get(name.removeprefix("aten::"))
        weight = None if place is None else parse_signature(texts["shapes"][row], texts["dtypes"][row], None, None).tensor(place)
        if weight is not None:
            found.add(weight.shape)
    return frozenset(found | {shape[::-1] for shape in found if len(shape) == 2})


def _words(setting: Setting) -> str:
    factor = number(setting, 1, _LARGEST)
    return (
        f"{factor:g} x the samples a step: kernels on the batch grow (those that leave SMs empty fill them first), so do the loader and "
        "the copies of its batches; optimizer, work on weights, gradient collectives, Python and waits that nothing explains stay"
    )


KIND = Kind(
    "batch",
    "1 to 1024: factor on the samples of a step",
    "2",
    _apply,
    _words,
    "the shapes of most of the kernel time are not known, or no kernel works on a batch (record with record_shapes=True)",
)
