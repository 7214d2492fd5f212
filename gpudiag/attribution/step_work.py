"""What was done between moments of a trace: ops by name, kernels in the order of their launch. For telling steps apart."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.attribution.device import busiest
from gpudiag.attribution.names import text, texts
from gpudiag.attribution.periodicity import Period, is_step_of_layers, periods
from gpudiag.attribution.recompute import autograd_nodes
from gpudiag.model.trace import Trace

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

MAX_TOGETHER = 16
"""Most optimizers (loaders, ...) that make up one step."""
ENOUGH_ALIKE = 0.03
"""How much more alike the intervals of a longer cycle must be to be preferred over those of a shorter one."""
UNEXPLAINED = 0.5
"""Share of the difference from one interval to the next that a longer cycle may leave: what varies by chance differs at any distance."""
MAX_INTERVALS = 256
"""Intervals that are compared; the cycle of the first ones is that of all."""
_MAX_NAMES = 4096
"""Names that are told apart when intervals are compared; only broken files have more."""
EVIDENCE_SHARE = 0.8
"""Share of the repetitions that must show what only a step has."""

# Ops of torch's own optimizers: fused ones, and the lists of foreach ones (aten/src/ATen/native/native_functions.yaml).
OPTIMIZER_OP = (
    r"^aten::_fused_(adam|adamw|sgd|adagrad|rmsprop)|^aten::_foreach_(add|addcdiv|addcmul|div|lerp|mul|sqrt|sub|maximum|neg|sign)"
)
# torch/optim/optimizer.py wraps each step(); schedulers step too, and are none.
_OPTIMIZER_FRAME = r"(?i)optim[\w./-]*\.py\(\d+\): step$"
_NO_OPTIMIZER_FRAME = r"lr_scheduler|swa_utils|grad_scaler"
# Kernels of a backward pass or an optimizer; no forward layer launches them.
_TRAINING_KERNEL = r"(?i)backward|[^a-z]bwd|_bwd|wgrad|dgrad|wrw|multi_tensor_apply|fused_?adam|adam_|optimizer"
TO_DEVICE = r"(?i)HtoD|HostToDevice|H2D"
_TO_HOST = r"(?i)DtoH|DeviceToHost|D2H"


class Sequence(NamedTuple):
    """Kernels (or ops) in the order in which the host issued them. Empty: none."""

    codes: Ids
    """Small numbers that stand for name and size."""
    starts_ns: Ids
    ends_ns: Ids
    """Of the launch (op)."""
    evidence: tuple[Mask, ...]
    """What only a whole step holds: entries of each of these kinds."""


def training_thread(trace: Trace) -> int:
    """Return the thread that runs the forward pass: the one with most ops outside the engine, else with most launches; -1: none."""
    ops = trace.ops.filter(~pl.Series(autograd_nodes(trace.ops), dtype=pl.Boolean))
    numbered = ops.filter(pl.col("sequence").is_not_null())
    for table in (numbered, ops, trace.launches, trace.marks):
        counts = table["thread"].drop_nulls().value_counts().sort("count", "thread", descending=[True, False])
        if counts.height:
            return int(counts["thread"][0])
    return -1


def extent(trace: Trace) -> tuple[int, int]:
    """Return first start and last end of ops, runtime calls and device work, in ns."""
    frames = [frame for frame in (trace.ops, trace.launches, trace.kernels) if frame.height] or [trace.marks, trace.frames]
    starts = [frame["start_ns"].min() for frame in frames if frame.height]
    ends = [frame["end_ns"].max() for frame in frames if frame.height]
    return (min(starts), max(ends)) if starts else (0, 0)  # type: ignore[type-var, return-value]


def optimizer_bursts(trace: Trace) -> pl.DataFrame:
    """Return (id, thread, name, start_ns, end_ns): runs of an optimizer's ops with no forward or backward work in between.

    Gradient clipping and averaged weights use the same ops next to the optimizer: they fall into its run.
    """
    node = pl.Series(autograd_nodes(trace.ops), dtype=pl.Boolean)
    ops = trace.ops.with_columns(text("name"))
    silent = ops["sequence"].is_null() & ~node
    found = ops.filter(silent & ops["name"].str.contains(OPTIMIZER_OP) & (ops["thread"] == training_thread(trace)).fill_null(False))
    work = np.sort(ops.filter(~silent)["start_ns"].to_numpy())
    found = found.sort("start_ns", "id").with_columns(pl.Series("burst", np.searchsorted(work, found["start_ns"].sort().to_numpy())))
    bursts = found.group_by("burst", maintain_order=True).agg(
        pl.col("id").first(),
        pl.col("thread").first(),
        pl.lit("optimizer ops").alias("name"),
        pl.col("start_ns").min(),
        pl.col("end_ns").max(),
    )
    return bursts.drop("burst")


def optimizer_frames(trace: Trace) -> pl.DataFrame:
    """Return (id, thread, name, start_ns, end_ns): the calls of step() in files of optimizers, of the thread that has most."""
    named = trace.frames.select("id", "thread", text("name"), "start_ns", "end_ns").drop_nulls("thread")
    named = named.filter(pl.col("name").str.contains(_OPTIMIZER_FRAME) & ~pl.col("name").str.contains(_NO_OPTIMIZER_FRAME))
    return apart(of_one_thread(named))


def of_one_thread(table: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of the thread that has most."""
    counts = table["thread"].value_counts().sort("count", "thread", descending=[True, False])
    return table.filter(pl.col("thread") == counts["thread"][0]) if counts.height else table


def apart(table: pl.DataFrame) -> pl.DataFrame:
    """Return the rows in time order that begin when all before them are over: a wrapper's step holds that of the optimizer itself."""
    ordered = table.sort("start_ns", "end_ns", descending=[False, True])
    kept, reached = [], None
    for start, end in ordered.select("start_ns", "end_ns").iter_rows():
        kept.append(reached is None or start >= reached)
        reached = end if kept[-1] else reached
    return ordered.filter(pl.Series(kept, dtype=pl.Boolean))


def cycle(trace: Trace, moments: Ids, names: list[str]) -> int:
    """Return after how many of the moments the same begins anew: 1, or 2 for a GAN whose two optimizers take turns.

    By the backward passes between them: the shortest cycle whose intervals are as alike as those of any other, and 1 unless it explains
    most of what differs from one to the next. Evaluation, logging or a checkpoint every few steps adds work of other kinds and changes no
    backward pass. Without autograd nodes the ops with a number of autograd's are compared; without these all ops, and an interval that
    holds all of another and more is like it.
    """
    count = min(len(moments), MAX_INTERVALS)
    numbered = trace.ops["sequence"].is_not_null().to_numpy()
    training = (_histograms(trace, moments[:count], chosen) for chosen in (_in_backward(trace), numbered))
    found = next((tables for tables in training if tables.any()), None)
    trains, tables = found is not None, _histograms(trace, moments[:count]) if found is None else found
    best = {}
    for length in range(1, min(count // 2, MAX_TOGETHER) + 1):
        same = [names[row] == names[row + length] for row in range(1, count - length)]
        alike = _likeness(tables, length, of_smaller=not trains)
        best[length] = float(np.mean(alike * same)) if same else 0.0
    most = max(best.values(), default=0.0)
    if 1 - most > UNEXPLAINED * (1 - best.get(1, 1.0)):
        return 1
    return next((length for length, alike in best.items() if alike >= most - ENOUGH_ALIKE), 1)


def alikeness(trace: Trace, moments: Ids) -> float:
    """Return the share of ops that the intervals between the moments have in common with the next one; 0 where there are none."""
    tables = _histograms(trace, moments[:MAX_INTERVALS])
    most, _, common = _common(tables, 1)
    return float(common.sum() / most.sum()) if most.sum() else 0.0


def _in_backward(trace: Trace) -> Mask:
    """Return the autograd nodes and the ops that begin inside one on their own thread."""
    found = autograd_nodes(trace.ops)
    threads, starts = trace.ops["thread"].fill_null(-1).to_numpy(), trace.ops["start_ns"].to_numpy()
    for thread in np.unique(threads[found]):
        own = np.flatnonzero(threads == thread)
        spans = intervals.of(trace.ops[own].filter(pl.Series(found[own])))
        found[own] |= intervals.covered(spans, starts[own], starts[own] + 1) > 0
    return found


def _histograms(trace: Trace, moments: Ids, chosen: Mask | None = None) -> Ids:
    """Return how often each op name (of the `chosen` ops) begins in each interval between the moments; row 0: before the second moment.

    Where no ops were recorded (Nsight Systems without emit_nvtx) the runtime calls stand for them.
    """
    silent = chosen is None and not trace.ops.height
    ops = (trace.launches.rename({"api": "name"}) if silent else trace.ops).select(
        "start_ns", pl.col("name").to_physical().rank("dense").cast(pl.Int64) - 1
    )
    starts, names = ops["start_ns"].to_numpy(), ops["name"].to_numpy() % _MAX_NAMES
    row = np.searchsorted(moments, starts, side="right") - 1
    inside = (row >= 0) & (row < len(moments) - 1) & (True if chosen is None else chosen)
    width = int(names.max()) + 1 if len(names) else 1
    counts = np.bincount(row[inside] * width + names[inside], minlength=(len(moments) - 1) * width)
    return counts.reshape(len(moments) - 1, width)


def _likeness(tables: Ids, distance: int, *, of_smaller: bool) -> npt.NDArray[np.float64]:
    """Return for each interval what it shares with the one `distance` later: common ops over the ops of the larger (the smaller)."""
    most, least, common = _common(tables, distance)
    size = least if of_smaller else most
    return np.where(size > 0, common / np.maximum(size, 1), 1.0)


def _common(tables: Ids, distance: int) -> tuple[Ids, Ids, Ids]:
    """Return for each interval and the one `distance` later the ops of the larger, of the smaller, and those that both have."""
    first, later = tables[:-distance], tables[distance:]
    sums = first.sum(axis=1), later.sum(axis=1)
    return np.maximum(*sums), np.minimum(*sums), np.minimum(first, later).sum(axis=1)


def kernel_sequence(trace: Trace) -> Sequence:
    """Return the kernels and copies of the busiest device in the order of their launch; those without a launch record are left out.

    Where no runtime calls were recorded the order and the moments are the device's own.
    """
    device = busiest(trace.kernels)[0]
    kernels = trace.kernels.filter(pl.col("device").eq_missing(device)).select("name", "grid", "correlation", "start_ns", "end_ns")
    calls = trace.launches.filter(pl.col("correlation") > 0).unique("correlation", keep="first", maintain_order=True)
    calls = calls.select("correlation", pl.col("start_ns").alias("from_ns"), pl.col("end_ns").alias("to_ns"))
    linked = kernels.join(calls, on="correlation", how="inner")
    table = linked if linked.height else kernels.with_columns(from_ns="start_ns", to_ns="end_ns")
    table = table.sort("from_ns", "start_ns")
    name = texts(table["name"])
    seen = [name.str.contains(pattern).to_numpy() for pattern in (_TRAINING_KERNEL, TO_DEVICE, _TO_HOST)]
    codes = table.select(pl.struct("name", "grid").rank("dense").cast(pl.Int64) - 1).to_series().to_numpy()
    return Sequence(codes, table["from_ns"].to_numpy(), table["to_ns"].to_numpy(), tuple(seen))


def op_sequence(trace: Trace) -> Sequence:
    """Return the ops of the training thread in time order."""
    ops = trace.ops.with_columns(pl.Series("node", autograd_nodes(trace.ops)))
    ops = ops.filter(pl.col("thread") == training_thread(trace)).sort("start_ns", "id")
    codes = ops.select(pl.struct(pl.col("name").to_physical(), "signature").rank("dense").cast(pl.Int64) - 1).to_series().to_numpy()
    none = np.zeros(len(codes), dtype=bool)
    return Sequence(codes, ops["start_ns"].to_numpy(), ops["end_ns"].to_numpy(), (ops["node"].to_numpy(), none, none))


def step_period(sequence: Sequence) -> Period | None:
    """Return the shortest period that is a step: it trains, or is fed and read by the host, or is made of layers itself.

    A forward pass of equal layers has a period too; without such evidence nothing tells it from steps, and None is returned.
    """
    if not len(sequence.codes):
        return None
    gaps = np.diff(sequence.starts_ns, prepend=sequence.starts_ns[0])
    for period in periods(sequence.codes, gaps):
        training, to_device, to_host = (_share(period, mask) for mask in sequence.evidence)
        if is_step_of_layers(period) or training >= EVIDENCE_SHARE or min(to_device, to_host) >= EVIDENCE_SHARE:
            return period
    return None


def _share(period: Period, mask: Mask) -> float:
    """Return the share of the repetitions in which an entry of `mask` occurs."""
    sums = np.concatenate(([0], np.cumsum(mask)))[period.cuts]
    return float((np.diff(sums) > 0).mean())
