"""Facts about the host's time: calls that wait for the device, and idle time without what the profiler adds to it.

A profiler slows the host that issues work, not the device. What it adds to the analysed steps is known where plain steps ran beside them;
it is taken out of the idle time that the host is to blame for, of each kind by its part.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.attribution.call_sites import DEMO, MODULE_FRAME, RECORDER
from gpudiag.attribution.names import decode_names, mask_names, match_column
from gpudiag.attribution.nesting import find_nearest, null_missing
from gpudiag.facts.idle_time import as_graph_ns, compiled_ns, measure_idle_ns, without_launch_ns
from gpudiag.facts.input_pipeline import drop_loading
from gpudiag.facts.memory_bound import find_chains, unfused_chain_ceiling_ns
from gpudiag.facts.registry import Fact, fact, fact_of, per_step, require, require_known
from gpudiag.facts.window import Window, cache_by_window
from gpudiag.model.bundle import PREEMPTED_SHARE
from gpudiag.timeline.host_events import LONG_PAUSE_NS, LOOP_PAUSE_NS, find_own_frames
from gpudiag.timeline.host_threads import format_frame
from gpudiag.trace.kernel_names import KERNEL_LAUNCH, OPTIMIZER_MARK

CORRECTED = frozenset({"host_idle_share", "dispatch_idle_share", "shape_idle_share", "read_idle_share", "synchronize_idle_share"})
"""Facts that leave out what the profiler added to the steps; `Window.as_recorded` measures them with it."""

Find = Callable[[Window], pl.DataFrame]

DISPATCH_NS = 20_000
"""The most that dispatching an op takes on the host: 5 to 20 us (Holistic Trace Analysis)."""

LOOP_NS = 250_000
"""Time between two passes from which on it is code of the loop: that of 12 to 50 ops."""

MOSTLY = 0.5
"""Part of the calls of an op with one shape that are bound by overhead, from which all of them are."""


def find_dispatch(window: Window) -> pl.DataFrame:
    """Return (op, time_ns) of the ops of a CPU too small to do anything else: their time beyond their roofline; no row on a GPU.

    It lies inside the op there, and in the idle time of a GPU. Calls of one shape are taken together: one that the system interrupted is
    not longer for what it does. Those in which the loader makes a batch are its own (INP-01).
    """
    kind = ("op_name", "signature")
    small = drop_loading(window, window.kernels.filter(window.on_cpu & ((pl.col("bound") == "overhead").mean().over(*kind) > MOSTLY)))
    return small.select("op", time_ns=(pl.col("time_ns") - pl.col("t_roof_ns").fill_null(0.0)).clip(lower_bound=0).cast(pl.Float64))


def measure_dispatch_ns(window: Window) -> float:
    """Return the time in ns that small ops of a CPU spend on being dispatched; 0 on a GPU."""
    return float(find_dispatch(window)["time_ns"].sum()) if window.on_cpu else 0.0


def issuing_ns(window: Window) -> float:
    """Time in ns that Python, the framework and launches hold up the device, as recorded; on a CPU the dispatch inside small ops too."""
    return measure_idle_ns(window, "idle_launch") + measure_dispatch_ns(window)


MOST_ADDED_NS = 3_000
"""Most that the profiler adds for an op on a CPU (measured: 0.8 us); what steps took beyond that is the machine's: it slowed everything."""


def profiler_added_ns(window: Window) -> float:
    """Return what the profiler added to the analysed steps in ns: (slow-down - 1) x the plain step for each, on a CPU at most 3 us for each
    op; 0 where they were no slower."""
    not_known = "what the profiler added to the steps is not known: only profiled steps were recorded; use gpudiag.profile"
    slowdown = require_known(window.analysis.profiler_slowdown, not_known)
    added = window.wall_ns * (1 - 1 / slowdown) if slowdown > 1 else 0.0
    return min(added, MOST_ADDED_NS * window.analysis.trace.ops.filter(window.within_steps).height) if window.on_cpu else added


def measure_slowed_ns(window: Window) -> float:
    """Return the idle time that grows with the profiler: it slows what it records, so not the pauses in which nothing was issued."""
    return dispatching_ns(window) + window.analysis.breakdown.buckets_ns.idle_sync


def subtract_profiler_ns(window: Window, recorded_ns: float) -> float:
    """Return what is left of `recorded_ns`, a part of `measure_slowed_ns`, without the profiler's part beyond idle_profiler; all where
    unknown."""
    if window.as_recorded or not window.analysis.profiler_slowdown:
        return float(recorded_ns)
    slowed, seen = measure_slowed_ns(window), window.analysis.breakdown.buckets_ns.idle_profiler
    return recorded_ns * (1 - min(max(profiler_added_ns(window) - seen, 0.0) / slowed, 1.0)) if slowed > 0 else 0.0


def measure_share_of_plain(window: Window, left_ns: float) -> float:
    """Return `left_ns` over the wall time of the analysed steps without what the profiler added, at most 1."""
    plain = float(window.wall_ns)
    if window.as_recorded:
        return min(left_ns / plain, 1.0)
    if window.analysis.profiler_slowdown:
        plain -= min(profiler_added_ns(window), measure_slowed_ns(window) + window.analysis.breakdown.buckets_ns.idle_profiler)
    if window.on_cpu:
        plain -= _measure_preempted_ns(window)
    return min(left_ns / plain, 1.0) if plain > 0 else 0.0


def _measure_preempted_ns(window: Window) -> float:
    """Return the idle time without a cause in which other programs ran, not that of a thread that slept: all, where nothing was marked."""
    marks, unexplained = window.analysis.host_marks, float(window.analysis.breakdown.buckets_ns.idle_unexplained)
    if marks is None or not marks.height:
        return unexplained
    return min(unexplained, sum_preempted_ns(marks, window.steps["name"]) + PREEMPTED_SHARE * window.wall_ns)


def sum_preempted_ns(marks: pl.DataFrame, steps: pl.Series) -> int:
    """Return the marked time in ns that the training thread waited for a processor in `steps`, named as the profiler does."""
    return int(marks.filter(pl.format("ProfilerStep#{}", "step").is_in(steps.implode()), kind="preempted")["duration_ns"].sum())


def preempted_share(window: Window) -> float:
    """Part of the analysed steps in which the training thread waited for a processor that other threads or programs had; 0 where nothing
    was marked."""
    marks = window.analysis.host_marks
    return 0.0 if marks is None else min(sum_preempted_ns(marks, window.steps["name"]) / window.wall_ns, 1.0)


def scale_to_recorded_ns(window: Window, left_ns: float) -> float:
    """Return `left_ns` of a plain step at the pace of the recorded steps: messages and ceilings are read as shares of these."""
    return measure_share_of_plain(window, left_ns) * window.wall_ns


@cache_by_window
def find_pauses(window: Window) -> spans.Spans:
    """Return the idle time by host overhead in which the host issued nothing for so long that it ran code of the program's own.

    A pause is long from LONG_PAUSE_NS on, outside the passes and the optimizer, where no framework runs, from LOOP_PAUSE_NS on, in a
    function of the program's that issues nothing from DISPATCH_NS on; times the slow-down by the profiler where it is known. What lies in
    an optimizer's step() is that of the optimizer.
    """
    waits = window.idle_spans("idle_launch")
    waits = spans.subtract_spans(waits, find_optimizer_time(window))
    issued, within = window.kernels, window.step_spans
    if not window.on_cpu:
        trace = window.analysis.trace
        linked = pl.col("id").is_in(trace.kernels["launch"].drop_nulls().unique().implode())
        issued = trace.launches.filter(linked | match_column("api", KERNEL_LAUNCH))  # those into a graph that is captured ran nothing
        within = spans.merge_spans(np.concatenate((within, window.host_spans)))
    pauses = spans.subtract_spans(within, spans.build_spans(issued))
    bare = spans.subtract_spans(pauses, spans.merge_spans(spans.build_spans(window.analysis.trace.ops)))  # ops that launch nothing
    bare = bare[2 * spans.measure_covered(find_outside_passes(window), bare[:, 0], bare[:, 1]) > bare[:, 1] - bare[:, 0]]
    slowdown = max(1.0, window.analysis.profiler_slowdown or 1.0)
    kinds = ((pauses, LONG_PAUSE_NS), (bare, LOOP_PAUSE_NS), (spans.build_spans(_find_functions_without_ops(window)), DISPATCH_NS))
    chosen = [part[part[:, 1] - part[:, 0] >= slowdown * least] for part, least in kinds]
    long = spans.merge_spans(np.concatenate(chosen))
    return spans.subtract_spans(waits, spans.subtract_spans(waits, long)) if issued.height else waits[:0]


def _find_functions_without_ops(window: Window) -> pl.DataFrame:
    """Return the rows of `window.idle` by host overhead in which a function of the program's ran, and no op is called from its lines."""
    function = pl.col("site").str.replace(r"\((?:\d+|\?)\)", "")
    issuing = window.analysis.sites.unique().alias("site").to_frame().select(function).to_series()
    itself = pl.coalesce("evidence_name", "evidence") == format_frame("site")
    return window.idle.filter((pl.col("cause") == "idle_launch") & itself & ~function.is_in(issuing.drop_nulls().implode()))


_OF_DISTRIBUTED = r"distributed|\b(?:Work|Store|ProcessGroup)"


def find_waits_for_others(window: Window) -> spans.Spans:
    """Return the idle time of a CPU in which the training thread waits for a thread or process that is no loader and no other rank."""
    waits = window.idle.filter(window.on_cpu & (pl.col("cause") == "idle_sync") & ~match_column("evidence", _OF_DISTRIBUTED))
    found, loading = spans.build_spans(waits), window.loader_waits
    return found if loading is None else spans.subtract_spans(found, spans.merge_spans(spans.build_spans(loading)))


@cache_by_window
def find_own_code_time(window: Window) -> spans.Spans:
    """Return `find_pauses` and `find_waits_for_others`: what the program does, or waits for, between the ops."""
    return spans.merge_spans(np.concatenate((find_pauses(window), find_waits_for_others(window))))


def own_time_ns(window: Window) -> int:
    """Return the time of `find_own_code_time` as recorded."""
    return spans.measure_spans(find_own_code_time(window))


def find_own_code(window: Window, *, outside: bool = False) -> pl.DataFrame:
    """Return the rows of `window.idle` that lie in `find_own_code_time`, or (`outside`) are host overhead and do not, with `time_ns`."""
    waits = window.idle.filter(pl.col("cause").is_in(["idle_launch"] if outside else ["idle_launch", "idle_sync"]))
    inside = pl.Series(spans.measure_covered(find_own_code_time(window), waits["start_ns"].to_numpy(), waits["end_ns"].to_numpy()))
    return waits.with_columns(time_ns=waits["time_ns"] - inside if outside else inside).filter(pl.col("time_ns") > 0)


LARGEST = 0.8
"""Share of a call's time from which on the one call in it that takes that much is looked into instead of it."""


def find_own_code_calls(window: Window) -> pl.DataFrame:
    """Find the calls that hold `find_own_code_time`: call (frame), site (the user's frame around it), time_ns, the largest first.

    From the outermost frames of the thread with most ops down, as long as one call holds nearly all. No row where no frames were recorded.
    """
    frames = find_own_frames(window.analysis.trace)
    main = window.analysis.trace.ops["thread"].fill_null(-1).mode().to_list()[:1]
    inside = spans.measure_covered(find_own_code_time(window), frames.table["start_ns"].to_numpy(), frames.nesting.end_ns)
    named = ~frames.of_calls & (~mask_names(frames.table["name"], RECORDER) | mask_names(frames.table["name"], DEMO))
    outer = np.append(find_nearest(frames.nesting.parent, named), -1)[frames.nesting.parent]
    held = pl.DataFrame({"call": frames.table["name"].cast(pl.String), "parent": outer, "time_ns": inside}).with_row_index()
    long = pl.Series(named) & frames.table.select(pl.col("end_ns") - pl.col("start_ns") >= LOOP_PAUSE_NS).to_series()
    held = held.filter(long & frames.table["thread"].fill_null(-1).is_in(main) & (pl.col("time_ns") > 0))
    level, deeper = held.clear(), held.filter(pl.col("parent") < 0)
    while deeper.height:
        level = deeper
        calls = level.group_by("call").agg(pl.col("time_ns").sum(), pl.col("index"))
        calls = calls.sort("time_ns", "call", descending=[True, False])
        largest, in_all = calls["time_ns"][0], level["time_ns"].sum()
        below = held.filter(pl.col("parent").is_in(calls["index"][0].to_list()))
        deeper = below if min(largest / in_all, below["time_ns"].sum() / largest) >= LARGEST else held.clear()
    sites = frames.table["name"].cast(pl.String).gather(null_missing(frames.user[level["index"].to_numpy()]))
    level = level.with_columns(site=sites).group_by("call", "site").agg(pl.col("time_ns").sum())
    return level.sort("time_ns", "call", descending=[True, False])


@cache_by_window
def find_syncs(window: Window) -> pl.DataFrame:
    """Return the syncs of the analysed steps with op_name and kernel_name; raises NotKnownError where runtime calls were not recorded."""
    trace = window.require_accelerator().analysis.trace
    found = window.analysis.syncs if trace.launches.height else None
    found = require_known(found, "no runtime calls were recorded: record with activities=[CPU, CUDA]").filter(window.within_steps)
    ops, kernels = decode_names(trace.ops["name"]), decode_names(trace.kernels["name"])
    return found.with_columns(op_name=pl.lit(ops.gather(found["op"])), kernel_name=pl.lit(kernels.gather(found["kernel"])))


READ_OPS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::tolist")
"""Ops that bring a value to the host whatever they are given (native_functions.yaml; rules.md SYN-01)."""

SHAPE_OPS = (
    "aten::nonzero", "aten::nonzero_numpy", "aten::argwhere", "aten::where", "aten::masked_select", "aten::index", "aten::index_put_",
    "aten::index_put", "aten::_index_put_impl_", "aten::unique_dim", "aten::unique_consecutive", "aten::_unique", "aten::_unique2",
    "aten::repeat_interleave", "aten::bincount", "aten::histc", "aten::masked_scatter",
)  # fmt: skip
"""Ops whose result has a size that depends on values (native_functions.yaml; rules.md SYN-02); indexing where the index is a mask."""


WAITED = (pl.col("waited_ns") > 0) | (pl.col("cost_ns").fill_null(0) > 0)
"""Syncs that held anything up: the host, for work that still ran, or the device after it."""


def syncs_where(chosen: pl.Expr) -> Find:
    """Return what finds the syncs of the analysed steps that are `chosen`."""
    return lambda window: find_syncs(window).filter(chosen)


_COPIED = pl.col("op_name").is_not_null() & pl.col("kernel_name").str.contains(r"(?i)DtoH|DeviceToHost")

find_reads = syncs_where((pl.col("op_name").is_in(READ_OPS) | (_COPIED & ~pl.col("op_name").is_in(SHAPE_OPS))).fill_null(False))
"""Finds the syncs in which the host reads a result: .item(), float(), .cpu(), a condition on a tensor."""

find_synchronizations = syncs_where(pl.col("op").is_null() & match_column("api", r"(?i)(Device|Stream|Event|Ctx)Synchronize$"))
"""Finds the syncs that belong to no op: torch.cuda.synchronize(), Stream.synchronize(), Event.synchronize()."""

find_shape_syncs = syncs_where(pl.col("op_name").is_in(SHAPE_OPS).fill_null(False))
"""Finds the syncs inside such ops: only one whose size the device must tell waits."""


def find_reads_amid_passes(window: Window) -> pl.DataFrame:
    """Return the reads that lie between the first and the last op of the forward and backward passes of their step."""
    reads, ops = find_reads(window), window.analysis.trace.ops.select("phase", "step", "start_ns")
    passes = ops.filter(pl.col("phase").is_in(["forward", "backward"])).drop_nulls("step")
    spans = passes.group_by("step").agg(pl.col("start_ns").min().alias("first_ns"), pl.col("start_ns").max().alias("last_ns"))
    return reads.join(spans, on="step", how="inner").filter(pl.col("start_ns").is_between("first_ns", "last_ns", closed="none"))


# -- what each kind of wait costs -------------------------------------------------------------------------------------


def sum_cost_ns(found: pl.DataFrame) -> int:
    """Return the idle time of the device in ns that these syncs are charged with."""
    require(found["cost_ns"].null_count() == 0, "what the waits cost the device was not worked out: no idle time of the device is known")
    return int(found["cost_ns"].sum())


def plain_share(recorded_ns: Callable[[Window], float]) -> Callable[[Window], float]:
    """Return what measures the share of a plain step of `recorded_ns` without the profiler's part."""
    return lambda window: measure_share_of_plain(window, subtract_profiler_ns(window, recorded_ns(window)))


def at_plain_pace(saved_ns: Callable[[Window], float]) -> Callable[[Window], float]:
    """Return what measures `saved_ns` without the profiler's part, at the pace of the recorded steps."""
    return lambda window: scale_to_recorded_ns(window, subtract_profiler_ns(window, saved_ns(window)))


def of_plain_step(saved_ns: Callable[[Window], float]) -> Callable[[Window], float]:
    """Return what measures `saved_ns` of ops that the profiler hardly slows: on a CPU the rest of the step is shorter without it."""
    return lambda window: scale_to_recorded_ns(window, saved_ns(window)) if window.on_cpu else saved_ns(window)


def pausing_ns(window: Window) -> int:
    """Return the part of issuing_ns in `find_pauses`, in which the profiler has no part."""
    return spans.measure_spans(find_pauses(window))


def dispatching_ns(window: Window) -> float:
    """Return the rest of issuing_ns: Python, the framework and launches between ops that follow one another."""
    return issuing_ns(window) - pausing_ns(window)


def host_idle_ns(window: Window) -> float:
    """Time that Python, the framework and launches hold up the device, without what the profiler may have added to it: it is taken out of
    the time between ops that follow one another and of the idle time by synchronisation, of each by its part. On a CPU-only run the
    dispatch inside small ops counts too: time of overhead-bound ops beyond their roofline. As recorded where the slow-down is not known or
    below 1.
    """
    return pausing_ns(window) + subtract_profiler_ns(window, dispatching_ns(window))


_PASSES = ("forward", "backward")


@cache_by_window
def find_outside_passes(window: Window) -> spans.Spans:
    """Return the host's time in and around ops of neither the passes nor the optimizer, and pauses of LOOP_NS between these.

    Where nothing trains: all time outside modules, if Python frames tell them.
    """
    ops, everything = window.recorded_ops, window.host_spans
    if not ops["phase"].is_in([*_PASSES[1:], "optimizer"]).any():
        modules = spans.build_spans(window.analysis.trace.frames.filter(match_column("name", MODULE_FRAME)))
        return spans.subtract_spans(everything, spans.merge_spans(modules)) if len(modules) else everything[:0]
    named = pl.col("phase").is_in([*_PASSES, "optimizer"]) | match_column("name", "^aten::")  # not the ranges of old torch
    known = ops.filter(named & (pl.col("parent").fill_null(-1) < 0)).sort("start_ns")
    seeds = match_column("name", "^aten::ones_like$") & (pl.col("phase").shift(-1) == "backward")  # torch.autograd.backward makes them
    known = known.select("start_ns", "end_ns", phase=pl.when(seeds).then(pl.lit("backward")).otherwise("phase"))
    phase, after, lasts = pl.col("phase"), pl.col("after"), pl.col("end_ns") - pl.col("start_ns")
    pauses = known.select(start_ns=pl.col("end_ns").cum_max(), end_ns=pl.col("start_ns").shift(-1), phase="phase", after=phase.shift(-1))
    alike = (phase.is_in(_PASSES) & after.is_in(_PASSES)) | (phase == after)
    own_code = (phase == "other") | (after == "other") | (~alike & (lasts >= LOOP_NS))
    pauses = pauses.filter((lasts > 0) & own_code)
    own = [rows.select("start_ns", "end_ns") for rows in (known.filter(phase == "other"), pauses)]
    return spans.subtract_spans(spans.build_spans(pl.concat(own)), find_optimizer_time(window))


@cache_by_window
def find_optimizer_time(window: Window) -> spans.Spans:
    """Return the host's time inside the optimizer's step() and zero_grad(), without the closure in which a trainer runs the passes."""
    marked = spans.build_spans(window.analysis.trace.marks.filter(match_column("name", OPTIMIZER_MARK)))
    own, until = pl.col("phase") == "optimizer", pl.col("end_ns").cum_max()
    ops = window.recorded_ops.select("start_ns", "end_ns", "phase").drop_nulls().sort("start_ns")
    ops = ops.with_columns(since=pl.when(own).then(until).forward_fill().shift(1).fill_null(0))
    ops = ops.filter(pl.col("phase").is_in(_PASSES))
    starts = ops["start_ns"].to_numpy()
    number = np.searchsorted(marked[:, 0], starts, side="right") - 1
    inside = (number >= 0) & (starts < np.append(marked[:, 1], 0)[number])
    since = np.maximum(ops["since"].to_numpy()[inside], marked[number[inside], 0])  # the Python before an op of the closure is its own
    closures = np.stack((since, ops["end_ns"].to_numpy()[inside]), axis=1)
    return spans.subtract_spans(marked, spans.merge_spans(closures))


def dispatch_outside_part(window: Window) -> float:
    """Part of the idle time between ops that follow one another outside the passes and the optimizer: metrics, averages of weights,
    sampling, validation, preparing data."""
    return _measure_dispatch_part(window, find_outside_passes(window), "other", "data")


def dispatch_optimizer_part(window: Window) -> float:
    """Part of the idle time between ops that follow one another in the optimizer: its step and zero_grad()."""
    return _measure_dispatch_part(window, find_optimizer_time(window), "optimizer")


def _measure_dispatch_part(window: Window, own: spans.Spans, *phases: str) -> float:
    waits = window.idle_spans("idle_launch")
    waits, small = spans.subtract_spans(waits, find_pauses(window)), find_dispatch(window)
    other = window.recorded_ops["phase"].gather(small["op"]).is_in(phases)
    total = float(spans.measure_spans(waits)) + float(small["time_ns"].sum())
    require(total > 0, "the device never waited for work to be issued")
    return (float(spans.measure_overlap(waits, own)) + float(small.filter(other)["time_ns"].sum())) / total


def find_foreign_time(window: Window) -> spans.Spans:
    """Return the idle time that goes away with no code of the program: of other programs and the profiler, of loaders and compilers."""
    own = ["idle_launch", "idle_sync", "idle_gc", "idle_io", "idle_allocation"]
    return spans.build_spans(window.idle.filter(~pl.col("cause").is_in(own)))


def find_stretches(window: Window, within: spans.Spans) -> spans.Spans:
    """Return the stretches of the loop's own code that hold any of `within`, with all their ops; `within` in any case.

    File writes and garbage collections are a part of a stretch that `within` holds more of: else they are the cause (OVH-06).
    """
    whole = spans.merge_spans(np.concatenate((find_outside_passes(window), within)))
    inside = spans.measure_covered(within, whole[:, 0], whole[:, 1])
    held, inside = whole[inside > 0], inside[inside > 0]
    causes = window.idle_spans("idle_io", "idle_gc")
    theirs = held[spans.measure_covered(causes, held[:, 0], held[:, 1]) > inside]
    causes = spans.subtract_spans(theirs, spans.subtract_spans(theirs, causes))
    return spans.subtract_spans(held, spans.merge_spans(np.concatenate((find_foreign_time(window), causes))))


@cache_by_window
def find_own_code_stretches(window: Window) -> spans.Spans:
    """Return find_own_code_time, on a CPU with the loop's own code around them and around pauses of LOOP_NS and more, its ops too."""
    found = find_own_code_time(window)
    if not window.on_cpu or not len(found):
        return found
    waits = window.idle_spans("idle_launch")
    pauses = spans.subtract_spans(window.step_spans, spans.build_spans(window.kernels))
    long = pauses[pauses[:, 1] - pauses[:, 0] >= LOOP_NS]
    long = spans.subtract_spans(waits, spans.subtract_spans(waits, long))
    return find_stretches(window, spans.merge_spans(np.concatenate((found, long))))


def measure_dispatch_within_ns(window: Window, within: spans.Spans) -> float:
    """Return the part of dispatching_ns in ns that lies in the time spans `within`."""
    waits, small = window.idle_spans("idle_launch"), find_dispatch(window)
    begun = window.recorded_ops["start_ns"].gather(small["op"]).to_numpy()
    inside = pl.Series(spans.measure_covered(within, begun, begun + 1) > 0, dtype=pl.Boolean)
    return spans.measure_overlap(spans.subtract_spans(waits, find_pauses(window)), within) + float(small.filter(inside)["time_ns"].sum())


def measure_plain_ns(window: Window, within: spans.Spans) -> float:
    """Return how long in ns the program takes for what lies in `within`, without what the profiler added to it."""
    own, dispatch = spans.subtract_spans(within, find_foreign_time(window)), measure_dispatch_within_ns(window, within)
    return spans.measure_overlap(own, window.step_spans) - dispatch + subtract_profiler_ns(window, dispatch)


def without_own_code_ns(window: Window) -> float:
    """At most this time is saved without own_code_ns, at the pace of a plain step: on a CPU without the loop's own code around it."""
    return scale_to_recorded_ns(window, measure_plain_ns(window, find_own_code_stretches(window)))


def without_chains_ns(window: Window) -> float:
    """Time that the steps would save with one fused kernel for each chain at most, with the waits for the host inside the chains.

    On a CPU at least the loop's own code around chains of neither pass, with its copies and other ops: working on lists of tensors, in
    place or every n-th step takes them away too.
    """
    chains = find_chains(window).filter(pl.col("phase") == "other")["ids"].explode()
    inside = window.kernels.filter(pl.col("id").is_in(chains.implode()))
    most_ns = unfused_chain_ceiling_ns(window)
    if not window.on_cpu or not inside.height:
        return most_ns
    return max(most_ns, measure_plain_ns(window, find_stretches(window, spans.build_spans(inside))))


def without_dispatching_ns(window: Window) -> float:
    """Return the time saved in ns without dispatching_ns: what-if host=0, and on a CPU small ops at their roofline."""
    return max(0.0, without_launch_ns(window) - pausing_ns(window)) + measure_dispatch_ns(window)


def _list_wait_facts(kind: str, waits: str, find: Find) -> tuple[Fact, ...]:
    def recorded_ns(window: Window) -> int:
        return sum_cost_ns(find(window))

    def saved_ns(window: Window) -> float:
        return window.without_syncs_ns(find(window), otherwise=sum_cost_ns)

    words = f"Idle time that {waits} cost the device, without what the profiler may have added to it, at the pace of the recorded steps."
    saved = f"Time saved if {waits} did not wait, less the profiler's part: replayed, else that idle time."
    return (
        fact(f"{kind}_idle_ns", "ns", words, at_plain_pace(recorded_ns)),
        fact(f"{kind}_idle_share", "share", f"{kind}_idle_ns as a share of a plain step.", plain_share(recorded_ns)),
        fact(f"without_{kind}_waits_ns", "ns", saved, at_plain_pace(saved_ns)),
    )


# fmt: off
FACTS = (
    *_list_wait_facts("read", "reads of results", find_reads),
    *_list_wait_facts("synchronize", "synchronisations that the program asked for", find_synchronizations),
    *_list_wait_facts("shape", "ops that need the size of their result", find_shape_syncs),
    fact_of(preempted_share, "share"),
    fact_of(dispatch_outside_part, "share"),
    fact_of(dispatch_optimizer_part, "share"),
    fact_of(host_idle_ns, "ns"),
    fact("host_idle_share", "share", "host_idle_ns over the wall time of the analysed steps without what the profiler added: the share of "
         "a plain step.", lambda window: measure_share_of_plain(window, host_idle_ns(window))),
    fact("own_code_ns", "ns", "The part of host_idle_ns in which the host issued nothing for 1 ms or more at a time, outside the passes "
         "and the optimizer 0.1 ms, in functions of the program's that issue nothing 20 us: code of the program's own between the ops, "
         "which no faster dispatch shortens; on a CPU also waits for other threads and processes. The profiler has no part in it; at the "
         "pace of the recorded steps (own_code_share of them).", lambda window: scale_to_recorded_ns(window, own_time_ns(window))),
    fact("own_code_share", "share", "own_code_ns as a share of a plain step.",
         lambda window: measure_share_of_plain(window, own_time_ns(window))),
    fact_of(without_own_code_ns, "ns"),
    fact_of(without_chains_ns, "ns"),
    fact("dispatch_idle_ns", "ns", "The rest of host_idle_ns: Python, the framework and launch calls between ops that follow one another, "
         "at the pace of the recorded steps (dispatch_idle_share of them).",
         at_plain_pace(dispatching_ns)),
    fact("dispatch_idle_share", "share", "dispatch_idle_ns as a share of a plain step.", plain_share(dispatching_ns)),
    fact("profiler_in_host_ns", "ns", "The part of the recorded idle time that may be the profiler's and is not in host_idle_ns.",
         lambda window: issuing_ns(window) - host_idle_ns(window)),
    fact("as_one_graph_ns", "ns", "Time saved with the step as one CUDA graph, at the pace of a plain step: what-if launch=0 (else that "
         "idle time and the gaps between kernels with work queued beyond 1 us each), less the profiler's part.",
         at_plain_pace(as_graph_ns)),
    fact("compiled_plain_ns", "ns", "Time saved if launching the work cost nothing and chains of element-wise ops were one kernel each: "
         "what-ifs host=0 and fused, on a CPU the dispatch of small ops too, without own_code_ns; the host's part of it less what the "
         "profiler adds.",
         lambda window: (at_plain_pace(without_dispatching_ns)(window)
                         + max(0.0, compiled_ns(window) - without_launch_ns(window)))),
    fact("reads_per_step", "count", "Reads of results that waited for the device, or held it up, per analysed step.",
         per_step(lambda window: find_reads(window).filter(WAITED))),
    fact("reads_amid_per_step", "count", "Reads of results within the forward and backward passes, per analysed step: no graph captures "
         "them. One of the loss after is none.", per_step(find_reads_amid_passes)),
    fact("synchronizations_per_step", "count", "Synchronisations that the program asked for, per analysed step.",
         per_step(find_synchronizations)),
    fact("shape_waits_per_step", "count", "Waits for the size of a result that held up the host or the device, per analysed step.",
         per_step(lambda window: find_shape_syncs(window).filter(WAITED))),
    fact("shape_reads_per_step", "count", "Calls that ask for the size of a result, whether they wait or not, per analysed step: no graph "
         "captures them.", per_step(find_shape_syncs)),
)
# fmt: on
