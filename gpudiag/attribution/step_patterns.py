"""Patterns that recur with the steps: calls of optimizers, ops by name, kernels in the order of their launch and their period.

A name that occurs once a step recurs at the distance of a step; steps may differ a little in length (logging, dynamic shapes), so the
sequence is cut where such a name occurs and the pieces are compared, rather than the sequence with itself at a fixed lag.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from gpudiag.arrays import Bools, Ints
from gpudiag.attribution import intervals
from gpudiag.attribution.autograd import find_autograd_nodes
from gpudiag.attribution.device import find_busiest_device
from gpudiag.attribution.names import decode_column, decode_names
from gpudiag.model.trace import Trace

MIN_PERIODS = 3
MIN_COVER = 0.8
"""Share of the sequence that the repetitions span, and of the pieces that must be alike."""
MIN_EQUAL = 0.95
"""Share of the entries of a piece that the piece before it has too."""
MIN_RECURRING = 0.8
"""Share of the distinct names (of those that occur MIN_PERIODS times) that occur in most pieces. A layer inside a step fails: the
embedding, the loss, the optimizer recur too, but not in each layer. A print every tenth step passes: it is few names of many."""

REGULAR = 0.2
"""Distance of a gap from the median gap, as a share, up to which a name counts as regular."""

_SHORTEST = 3
"""Entries of the shortest period: two names in turn are no step."""
LAYERS = 4
"""A period that holds this many repetitions of a shorter one is a step of layers and no layer."""
_CLUSTERS = 12
"""Lengths that are tried; more occur only in sequences without a period."""
_ANCHORS = 64
_RUN = 4
"""Where no single name occurs once a step, runs of this many names are tried."""


class Period(NamedTuple):
    """Where the period begins: positions in the sequence, the median length, and how alike the pieces are."""

    cuts: Ints
    length: int
    equal_share: float
    within: int
    """How many times a shorter period recurs inside this one; 1: none was found."""


def find_periods(codes: Ints, gap_ns: Ints) -> list[Period]:
    """Find the periods of `codes` (small numbers, one per entry), shortest first; each passes all the thresholds of this module.

    `gap_ns`: time before each entry; of the names that could begin a piece the one after the longest pause is taken. O(n log n).
    """
    often = np.bincount(codes) >= MIN_PERIODS
    for sequence in (codes, _code_runs(codes)):
        order = np.argsort(sequence, kind="stable")
        periods, shorter = list[Period](), 0
        for candidates in _find_regular_names(sequence, order):
            cuts = _find_cuts(sequence, order, candidates, gap_ns)
            lengths = np.diff(cuts)
            length = int(np.median(lengths))
            if length < _SHORTEST:
                continue
            # how often each name occurs in each whole piece between the cuts, sorted by piece and code
            width = int(codes.max()) + 1
            key, calls = np.unique(np.repeat(np.arange(len(lengths)), lengths) * width + codes[cuts[0] : cuts[-1]], return_counts=True)
            # share of entries that a piece has in common with the one before
            before = np.minimum(np.searchsorted(key, key - width), len(key) - 1)
            common = np.where(key[before] == key - width, np.minimum(calls, calls[before]), 0)
            share = np.bincount(key // width, common, len(lengths))[1:] / np.maximum(lengths[1:], lengths[:-1])
            alike = share >= MIN_EQUAL
            if not len(share) or alike.mean() < MIN_COVER:
                continue
            held = np.bincount(key % width, minlength=len(often))
            if (held[often] >= MIN_COVER * len(lengths)).mean() >= MIN_RECURRING:
                periods.append(Period(cuts, length, float(share[alike].mean()), length // shorter if shorter else 1))
            shorter = shorter or length  # layers of a pass recur too, whether or not all that is outside them is too little to tell
        if periods:
            return periods
    return []


def _code_runs(codes: Ints) -> Ints:
    """Return a code for each run of _RUN names, by where it begins."""
    if len(codes) < _RUN:
        return codes
    key = np.zeros(len(codes), dtype=np.uint64)
    padded = np.concatenate((codes, np.full(_RUN - 1, -1)))
    for step in range(_RUN):  # a polynomial hash modulo 2**64: that two runs collide only costs a candidate
        key = key * np.uint64(0x9E3779B97F4A7C15) + padded[step : step + len(codes)].astype(np.uint64) + np.uint64(1)
    result: Ints = np.unique(key, return_inverse=True)[1].astype(np.int64)
    return result


def _find_regular_names(sequence: Ints, order: Ints) -> list[Ints]:
    """Find the codes that recur at nearly the same distance over most of the sequence. `order`: a stable argsort of it.

    In groups of like distance, shortest distance first; of too many groups the largest.
    """
    first = np.flatnonzero(np.diff(sequence[order], prepend=-1))
    counts = np.diff(first, append=len(order))
    often = counts >= MIN_PERIODS
    gaps = np.diff(order, append=0)
    name = np.repeat(np.arange(len(first)), counts)
    inner = np.ones(len(order), dtype=bool)
    inner[first + counts - 1] = False  # the last occurrence has no gap after it
    inner &= often[name]
    gaps, name = gaps[inner], name[inner]
    if not len(gaps):
        return []
    middle = gaps[np.lexsort((gaps, name))]
    number = np.unique(name)
    begins = np.searchsorted(name, number)
    median = middle[begins + (counts[number] - 2) // 2].astype(np.float64)
    near = np.abs(gaps - np.repeat(median, counts[number] - 1)) <= REGULAR * np.repeat(median, counts[number] - 1)
    steady = np.add.reduceat(near, begins) >= MIN_COVER * (counts[number] - 1)
    reach = order[first[number] + counts[number] - 1] - order[first[number]] + median
    kept = steady & (reach >= MIN_COVER * len(order))
    if not kept.any():
        return []
    code, distance = sequence[order[first[number[kept]]]], median[kept]
    by_distance = np.argsort(distance, kind="stable")
    ratio = distance[by_distance][1:] / distance[by_distance][:-1]
    groups = np.split(by_distance, np.flatnonzero(ratio > 1 + REGULAR / 2) + 1)
    largest = sorted(range(len(groups)), key=lambda row: -len(groups[row]))[:_CLUSTERS]
    return [code[groups[row]] for row in sorted(largest)]


def _find_cuts(sequence: Ints, order: Ints, codes: Ints, gap_ns: Ints) -> Ints:
    best, longest = np.empty(0, dtype=np.int64), -1.0
    sorted_codes = sequence[order]
    for code in codes[:_ANCHORS].tolist():
        begin, end = np.searchsorted(sorted_codes, [code, code + 1])
        pause = float(np.median(gap_ns[order[begin:end]]))
        if pause > longest:
            best, longest = order[begin:end], pause
    return best


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
TRAINING_KERNEL = r"(?i)backward|[^a-z]bwd|_bwd|wgrad|dgrad|wrw|multi_tensor_apply|fused_?adam|adam_|optimizer"
TO_DEVICE = r"(?i)HtoD|HostToDevice|H2D"
_TO_HOST = r"(?i)DtoH|DeviceToHost|D2H"


class LaunchSequence(NamedTuple):
    """Kernels (or ops) in the order in which the host issued them. Empty: none."""

    codes: Ints
    """Small numbers that stand for name and size."""
    starts_ns: Ints
    ends_ns: Ints
    """Of the launch (op)."""
    evidence: tuple[Bools, ...]
    """What only a whole step holds: entries of each of these kinds."""


def find_training_thread(trace: Trace) -> int:
    """Find the thread that runs the forward pass: the one with most ops outside the engine, else with most launches; -1: none."""
    ops = trace.ops.select("thread", "sequence").filter(~pl.Series(find_autograd_nodes(trace.ops), dtype=pl.Boolean))
    numbered = ops.filter(pl.col("sequence").is_not_null())
    for table in (numbered, ops, trace.launches, trace.marks):
        counts = table["thread"].drop_nulls().value_counts().sort("count", "thread", descending=[True, False])
        if counts.height:
            return int(counts["thread"][0])
    return -1


def measure_extent(trace: Trace) -> tuple[int, int]:
    """Return first start and last end of ops, runtime calls and device work, in ns."""
    frames = [frame for frame in (trace.ops, trace.launches, trace.kernels) if frame.height] or [trace.marks, trace.frames]
    starts = [frame["start_ns"].min() for frame in frames if frame.height]
    ends = [frame["end_ns"].max() for frame in frames if frame.height]
    return (min(starts), max(ends)) if starts else (0, 0)  # type: ignore[type-var, return-value]


def find_optimizer_bursts(trace: Trace) -> pl.DataFrame:
    """Return (id, thread, name, start_ns, end_ns): runs of an optimizer's ops with no forward or backward work in between.

    Gradient clipping and averaged weights use the same ops next to the optimizer: they fall into its run.
    """
    node = pl.Series(find_autograd_nodes(trace.ops), dtype=pl.Boolean)
    ops = trace.ops.with_columns(decode_column("name"))
    silent = ops["sequence"].is_null() & ~node
    found = ops.filter(silent & ops["name"].str.contains(OPTIMIZER_OP) & (ops["thread"] == find_training_thread(trace)).fill_null(False))
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


def join_updates(trace: Trace, found: pl.DataFrame) -> pl.DataFrame:
    """Return the updates `found` (in time order), those as one between which no autograd node began: two of one backward pass."""
    nodes = np.sort(trace.ops["start_ns"].to_numpy()[find_autograd_nodes(trace.ops)])
    if not len(nodes) or found.height < 2:
        return found
    start, end = found["start_ns"].to_numpy(), found["end_ns"].to_numpy()
    apart = np.searchsorted(nodes, start[1:]) > np.searchsorted(nodes, end[:-1])
    joined = found.with_columns(update=pl.Series(np.append(0, np.cumsum(apart)))).group_by("update", maintain_order=True)
    first = pl.all().exclude("end_ns", "name").first()
    return joined.agg(first, pl.col("name").str.join(" + "), pl.col("end_ns").max()).select(found.columns)


def find_optimizer_frames(trace: Trace) -> pl.DataFrame:
    """Return (id, thread, name, start_ns, end_ns): the calls of step() in files of optimizers, of the thread that has most."""
    named = trace.frames.select("id", "thread", decode_column("name"), "start_ns", "end_ns").drop_nulls("thread")
    named = named.filter(pl.col("name").str.contains(_OPTIMIZER_FRAME) & ~pl.col("name").str.contains(_NO_OPTIMIZER_FRAME))
    return drop_nested(keep_busiest_thread(named))


def keep_busiest_thread(table: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of the thread that has most."""
    counts = table["thread"].value_counts().sort("count", "thread", descending=[True, False])
    return table.filter(pl.col("thread") == counts["thread"][0]) if counts.height else table


def drop_nested(table: pl.DataFrame) -> pl.DataFrame:
    """Return the rows in time order that begin when all before them are over: a wrapper's step holds that of the optimizer itself."""
    ordered = table.sort("start_ns", "end_ns", descending=[False, True])
    kept, reached = [], None
    for start, end in ordered.select("start_ns", "end_ns").iter_rows():
        kept.append(reached is None or start >= reached)
        reached = end if kept[-1] else reached
    return ordered.filter(pl.Series(kept, dtype=pl.Boolean))


def find_cycle(trace: Trace, moments: Ints, names: list[str]) -> int:
    """Return after how many of the moments the same begins anew: 1, or 2 for a GAN whose two optimizers take turns.

    By the backward passes between them: the shortest cycle whose intervals are as alike as those of any other, and 1 unless it explains
    most of what differs from one to the next. Evaluation, logging or a checkpoint every few steps adds work of other kinds and changes no
    backward pass. Without autograd nodes the ops with a number of autograd's are compared; without these all ops, and an interval that
    holds all of another and more is like it.
    """
    count = min(len(moments), MAX_INTERVALS)
    numbered = trace.ops["sequence"].is_not_null().to_numpy()
    backward = find_autograd_nodes(trace.ops)  # the nodes, and the ops that begin inside one on their own thread
    threads, starts = trace.ops["thread"].fill_null(-1).to_numpy(), trace.ops["start_ns"].to_numpy()
    for thread in np.unique(threads[backward]):
        own = np.flatnonzero(threads == thread)
        spans = intervals.build_spans(trace.ops[own].filter(pl.Series(backward[own])))
        backward[own] |= intervals.measure_covered(spans, starts[own], starts[own] + 1) > 0
    training = (_count_ops(trace, moments[:count], chosen) for chosen in (backward, numbered))
    found = next((tables for tables in training if tables.any()), None)
    trains, tables = found is not None, _count_ops(trace, moments[:count]) if found is None else found
    best = {}
    for length in range(1, min(count // 2, MAX_TOGETHER) + 1):
        same = [names[row] == names[row + length] for row in range(1, count - length)]
        larger, smaller, common = _count_common(tables, length)
        size = larger if trains else smaller
        alike = np.where(size > 0, common / np.maximum(size, 1), 1.0)
        best[length] = float(np.mean(alike * same)) if same else 0.0
    most = max(best.values(), default=0.0)
    if 1 - most > UNEXPLAINED * (1 - best.get(1, 1.0)):
        return 1
    return next((length for length, alike in best.items() if alike >= most - ENOUGH_ALIKE), 1)


def measure_similarity(trace: Trace, moments: Ints) -> float:
    """Measure the share of ops that the intervals between the moments have in common with the next one; 0 where there are none."""
    tables = _count_ops(trace, moments[:MAX_INTERVALS])
    most, _, common = _count_common(tables, 1)
    return float(common.sum() / most.sum()) if most.sum() else 0.0


def _count_ops(trace: Trace, moments: Ints, chosen: Bools | None = None) -> Ints:
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


def _count_common(tables: Ints, distance: int) -> tuple[Ints, Ints, Ints]:
    """Return for each interval and the one `distance` later the ops of the larger, of the smaller, and those that both have."""
    first, later = tables[:-distance], tables[distance:]
    sums = first.sum(axis=1), later.sum(axis=1)
    return np.maximum(*sums), np.minimum(*sums), np.minimum(first, later).sum(axis=1)


def build_kernel_sequence(trace: Trace) -> LaunchSequence:
    """List the kernels and copies of the busiest device in the order of their launch; those without a launch record are left out.

    Where no runtime calls were recorded the order and the moments are the device's own.
    """
    device = find_busiest_device(trace.kernels)[0]
    kernels = trace.kernels.filter(pl.col("device").eq_missing(device)).select("name", "grid", "correlation", "start_ns", "end_ns")
    calls = trace.launches.filter(pl.col("correlation") > 0).unique("correlation", keep="first", maintain_order=True)
    calls = calls.select("correlation", pl.col("start_ns").alias("from_ns"), pl.col("end_ns").alias("to_ns"))
    linked = kernels.join(calls, on="correlation", how="inner")
    table = linked if linked.height else kernels.with_columns(from_ns="start_ns", to_ns="end_ns")
    table = table.sort("from_ns", "start_ns")
    name = decode_names(table["name"])
    seen = [name.str.contains(pattern).to_numpy() for pattern in (TRAINING_KERNEL, TO_DEVICE, _TO_HOST)]
    codes = table.select(pl.struct("name", "grid").rank("dense").cast(pl.Int64) - 1).to_series().to_numpy()
    return LaunchSequence(codes, table["from_ns"].to_numpy(), table["to_ns"].to_numpy(), tuple(seen))


def build_op_sequence(trace: Trace) -> LaunchSequence:
    """List the ops of the training thread in time order."""
    ops = trace.ops.with_columns(pl.Series("node", find_autograd_nodes(trace.ops)))
    ops = ops.filter(pl.col("thread") == find_training_thread(trace)).sort("start_ns", "id")
    codes = ops.select(pl.struct(pl.col("name").to_physical(), "signature").rank("dense").cast(pl.Int64) - 1).to_series().to_numpy()
    none = np.zeros(len(codes), dtype=bool)
    return LaunchSequence(codes, ops["start_ns"].to_numpy(), ops["end_ns"].to_numpy(), (ops["node"].to_numpy(), none, none))


def find_step_period(sequence: LaunchSequence) -> Period | None:
    """Find the shortest period that is a step: it trains, or is fed and read by the host, or is made of layers itself.

    A forward pass of equal layers has a period too; without such evidence nothing tells it from steps, and None is returned.
    """
    if not len(sequence.codes):
        return None
    gaps = np.diff(sequence.starts_ns, prepend=sequence.starts_ns[0])
    for period in find_periods(sequence.codes, gaps):
        entries = [np.diff(np.concatenate(([0], np.cumsum(mask)))[period.cuts]) for mask in sequence.evidence]
        training, to_device, to_host = (float((count > 0).mean()) for count in entries)
        if period.within >= LAYERS or training >= EVIDENCE_SHARE or min(to_device, to_host) >= EVIDENCE_SHARE:
            return period
    return None
