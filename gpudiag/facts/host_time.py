"""Facts about the host's time: calls that wait for the device, and idle time without what the profiler adds to it.

A profiler slows the host that issues work, not the device. What it adds to the analysed steps is known where plain steps ran beside them;
it is taken out of the idle time that the host is to blame for, of each kind by its part.
"""

from __future__ import annotations

import polars as pl

from gpudiag.attribution.names import decode_names, match_column
from gpudiag.facts.idle_time import as_graph_ns, compiled_ns, without_launch_ns
from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window

NOT_CORRECTED = {
    "host_idle_share": "issuing_share",
    "host_idle_ns": "issuing_ns",
    "shape_idle_share": "shape_wait_cost_share",
    "shape_idle_ns": "shape_wait_cost_ns",
    "read_idle_share": "read_cost_share",
    "read_idle_ns": "read_cost_ns",
    "synchronize_idle_share": "synchronize_cost_share",
    "synchronize_idle_ns": "synchronize_cost_ns",
}
"""Corrected fact -> the same as it was recorded."""


MOSTLY = 0.5
"""Part of the calls of an op with one shape that are bound by overhead, from which all of them are."""


def measure_dispatch_ns(window: Window) -> float:
    """Return the time in ns that ops of a CPU too small to do anything else spend on being dispatched; 0 on a GPU.

    Time of ops bound by overhead beyond their roofline: it lies inside the op there, and in the idle time of a GPU. Calls of one shape are
    taken together: one that the system interrupted is not longer for what it does.
    """
    if not window.on_cpu:
        return 0.0
    kind = ("op_name", "signature")
    small = window.kernels.filter((pl.col("bound") == "overhead").mean().over(*kind) > MOSTLY)
    return float((small["time_ns"] - small["t_roof_ns"].fill_null(0.0)).clip(lower_bound=0).sum())


def measure_issued_ns(window: Window) -> float:
    """Return the time in ns in which Python, the framework and launches hold up the device, as recorded."""
    require(window.wall_ns > 0, "no complete step was recorded")
    return window.analysis.breakdown.buckets_ns.idle_launch + measure_dispatch_ns(window)


def estimate_added_ns(window: Window) -> float:
    """Return what the profiler added to the analysed steps in ns: (slow-down - 1) x the plain step, for each of them.

    Raises NotKnownError where no plain steps were recorded to compare with.
    """
    slowdown = window.analysis.profiler_slowdown
    if slowdown is None:
        raise NotKnownError("what the profiler added to the steps is not known: only profiled steps were recorded; use gpudiag.profile")
    return window.wall_ns * (1 - 1 / slowdown) if slowdown > 1 else 0.0


def subtract_profiler_ns(window: Window, recorded_ns: float) -> float:
    """Return what is left of `recorded_ns`, idle time that the host is to blame for, without the profiler's part; all where unknown."""
    if not window.analysis.profiler_slowdown:
        return recorded_ns
    blamed = measure_issued_ns(window) + window.analysis.breakdown.buckets_ns.idle_sync
    return recorded_ns * max(0.0, 1 - estimate_added_ns(window) / blamed) if blamed > 0 else 0.0


def measure_share_of_plain(window: Window, left_ns: float) -> float:
    """Return `left_ns` over the wall time of the analysed steps without what the profiler added, at most 1."""
    plain = window.wall_ns - (estimate_added_ns(window) if window.analysis.profiler_slowdown else 0.0)
    if window.on_cpu:  # nothing of the process ran then: the system ran others, whatever the step does
        plain -= window.analysis.breakdown.buckets_ns.idle_unexplained
    return min(left_ns / plain, 1.0) if plain > 0 else 0.0


def scale_to_recorded_pace(window: Window, saved_ns: float) -> float:
    """Return the saving in ns, at the pace of the recorded steps, that a plain step has by the share `saved_ns` of the recorded ones.

    A ceiling is read as a share of the step: the profiler's part is in neither, or in both.
    """
    return measure_share_of_plain(window, subtract_profiler_ns(window, saved_ns)) * window.wall_ns


@fact("profiler_added_ns", unit="ns")
def profiler_added_ns(window: Window) -> float:
    """What the profiler added to the analysed steps: (slow-down - 1) x the plain step for each; 0 where they were no slower."""
    return estimate_added_ns(window)


@fact("issuing_ns", unit="ns")
def issuing_ns(window: Window) -> float:
    """Time that Python, the framework and launches hold up the device, the profiler's part included: idle_launch_ns.

    On a CPU-only run also the dispatch inside small ops: time of overhead-bound ops beyond their roofline.
    """
    return measure_issued_ns(window)


@fact("issuing_share", unit="share")
def issuing_share(window: Window) -> float:
    """issuing_ns over the wall time of the analysed steps."""
    return min(measure_issued_ns(window) / window.wall_ns, 1.0)


@fact("host_idle_ns", unit="ns")
def host_idle_ns(window: Window) -> float:
    """issuing_ns without what the profiler may have added to it; equal to it where the slow-down is not known or below 1.

    profiler_added_ns is taken out of issuing_ns and of the idle time by synchronisation, of each by its part.
    """
    return subtract_profiler_ns(window, measure_issued_ns(window))


@fact("host_idle_share", unit="share")
def host_idle_share(window: Window) -> float:
    """host_idle_ns over the wall time of the analysed steps without profiler_added_ns: the share of a plain step."""
    return measure_share_of_plain(window, host_idle_ns(window))  # type: ignore[arg-type]


@fact("profiler_in_host_ns", unit="ns")
def profiler_in_host_ns(window: Window) -> float:
    """The part of issuing_ns that may be the profiler's: issuing_ns - host_idle_ns."""
    return measure_issued_ns(window) - subtract_profiler_ns(window, measure_issued_ns(window))


@fact("read_idle_ns", unit="ns")
def read_idle_ns(window: Window) -> float:
    """read_cost_ns without what the profiler may have added to it (see host_idle_ns)."""
    return subtract_profiler_ns(window, float(read_cost_ns(window)))


@fact("read_idle_share", unit="share")
def read_idle_share(window: Window) -> float:
    """read_idle_ns over the wall time of the analysed steps without profiler_added_ns."""
    return measure_share_of_plain(window, subtract_profiler_ns(window, float(read_cost_ns(window))))


@fact("synchronize_idle_ns", unit="ns")
def synchronize_idle_ns(window: Window) -> float:
    """synchronize_cost_ns without what the profiler may have added to it (see host_idle_ns)."""
    return subtract_profiler_ns(window, float(synchronize_cost_ns(window)))


@fact("synchronize_idle_share", unit="share")
def synchronize_idle_share(window: Window) -> float:
    """synchronize_idle_ns over the wall time of the analysed steps without profiler_added_ns."""
    return measure_share_of_plain(window, subtract_profiler_ns(window, float(synchronize_cost_ns(window))))


# -- ceilings at the pace of a plain step -----------------------------------------------------------------------------


@fact("without_host_ns", unit="ns")
def without_host_ns(window: Window) -> float:
    """Time saved if Python, the framework, launches and the dispatch of small ops took none, as the share of a plain step.

    What-if host=0 (else idle_launch_ns), on a CPU with the small ops at their roofline, less the profiler's part.
    """
    idle_ns = window.analysis.breakdown.buckets_ns.idle_launch
    return scale_to_recorded_pace(window, window.without_idle_ns("host=0", idle_ns=lambda: float(idle_ns)) + measure_dispatch_ns(window))


@fact("without_read_waits_ns", unit="ns")
def without_read_waits_ns(window: Window) -> float:
    """Time saved if no read of a result waited for the device, less the profiler's part: replayed, else read_cost_ns."""
    found = find_reads(window)
    return scale_to_recorded_pace(window, window.without_syncs_ns(found, otherwise=lambda: float(read_cost_ns(window))))


@fact("without_synchronize_waits_ns", unit="ns")
def without_synchronize_waits_ns(window: Window) -> float:
    """Time saved without the synchronisations that are asked for, less the profiler's part: replayed, else synchronize_cost_ns."""
    found = find_synchronizations(window)
    return scale_to_recorded_pace(window, window.without_syncs_ns(found, otherwise=lambda: float(synchronize_cost_ns(window))))


@fact("shape_idle_ns", unit="ns")
def shape_idle_ns(window: Window) -> float:
    """shape_wait_cost_ns without what the profiler may have added to it (see host_idle_ns)."""
    return subtract_profiler_ns(window, float(shape_wait_cost_ns(window)))


@fact("shape_idle_share", unit="share")
def shape_idle_share(window: Window) -> float:
    """shape_idle_ns over the wall time of the analysed steps without profiler_added_ns."""
    return measure_share_of_plain(window, subtract_profiler_ns(window, float(shape_wait_cost_ns(window))))


@fact("without_shape_waits_ns", unit="ns")
def without_shape_waits_ns(window: Window) -> float:
    """Time saved if no op waited for the size of its result, less the profiler's part: replayed, else shape_wait_cost_ns."""
    found = find_shape_syncs(window)
    return scale_to_recorded_pace(window, window.without_syncs_ns(found, otherwise=lambda: float(shape_wait_cost_ns(window))))


@fact("as_one_graph_ns", unit="ns")
def as_one_graph_ns(window: Window) -> float:
    """Time saved with the step as one CUDA graph, less the profiler's part: as_graph_ns at the pace of a plain step."""
    return scale_to_recorded_pace(window, float(as_graph_ns(window)))


@fact("compiled_plain_ns", unit="ns")
def compiled_plain_ns(window: Window) -> float:
    """compiled_ns, and on a CPU the dispatch of small ops; the host's part of it less what the profiler adds."""
    whole, host = float(compiled_ns(window)), float(without_launch_ns(window))
    return scale_to_recorded_pace(window, host + measure_dispatch_ns(window)) + max(0.0, whole - host)


def find_syncs(window: Window) -> pl.DataFrame:
    """Return the syncs of the analysed steps; raises NotKnownError where runtime calls were not recorded."""
    window.require_accelerator()
    found = window.analysis.syncs
    if found is None or not window.analysis.trace.launches.height:
        raise NotKnownError("no runtime calls were recorded: record with activities=[CPU, CUDA]")
    return found.filter(pl.col("step").is_in(window.steps["id"].implode()))


@fact("sync_count", unit="count")
def sync_count(window: Window) -> int:
    """Calls within the analysed steps that held the host up until work of the device was over; a call that found it over does not count."""
    return find_syncs(window).filter(pl.col("waited_ns") > 0).height


@fact("sync_wait_ns", unit="ns")
def sync_wait_ns(window: Window) -> int:
    """Time of the host in such calls while the work that they waited for still ran, summed over the analysed steps.

    No loss by itself: the device works meanwhile. What it costs the device is sync_cost_ns.
    """
    return int(find_syncs(window)["waited_ns"].sum())


@fact("sync_cost_ns", unit="ns")
def sync_cost_ns(window: Window) -> int:
    """Idle time of the device that these calls are charged with: it ran dry while the host could not issue ahead."""
    cost = find_syncs(window)["cost_ns"]
    require(cost.null_count() == 0, "what the waits cost the device was not worked out: no idle time of the device is known")
    return int(cost.sum())


READ_OPS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::tolist")
"""Ops that bring a value to the host whatever they are given (native_functions.yaml; rules.md SYN-01)."""

SHAPE_OPS = (
    "aten::nonzero", "aten::nonzero_numpy", "aten::argwhere", "aten::where", "aten::masked_select", "aten::index", "aten::index_put_",
    "aten::index_put", "aten::_index_put_impl_", "aten::unique_dim", "aten::unique_consecutive", "aten::_unique", "aten::_unique2",
    "aten::repeat_interleave", "aten::bincount", "aten::histc", "aten::masked_scatter",
)  # fmt: skip
"""Ops whose result has a size that depends on values (native_functions.yaml; rules.md SYN-02); indexing where the index is a mask."""


_TO_HOST = r"(?i)DtoH|DeviceToHost"
_ASKED_FOR = r"(?i)(Device|Stream|Event|Ctx)Synchronize$"


def add_sync_names(window: Window) -> pl.DataFrame:
    """Return the syncs of the analysed steps with op_name and kernel_name."""
    found, trace = find_syncs(window), window.analysis.trace
    ops, kernels = decode_names(trace.ops["name"]), decode_names(trace.kernels["name"])
    return found.with_columns(op_name=pl.lit(ops.gather(found["op"])), kernel_name=pl.lit(kernels.gather(found["kernel"])))


def find_reads(window: Window) -> pl.DataFrame:
    """Return the syncs in which the host reads a result: .item(), float(), .cpu(), a condition on a tensor."""
    copied = pl.col("op_name").is_not_null() & pl.col("kernel_name").str.contains(_TO_HOST)
    read = pl.col("op_name").is_in(READ_OPS) | (copied & ~pl.col("op_name").is_in(SHAPE_OPS))
    return add_sync_names(window).filter(read.fill_null(False))


def find_synchronizations(window: Window) -> pl.DataFrame:
    """Return the syncs that belong to no op: torch.cuda.synchronize(), Stream.synchronize(), Event.synchronize()."""
    return add_sync_names(window).filter(pl.col("op").is_null() & match_column("api", _ASKED_FOR))


def _sum_cost_ns(found: pl.DataFrame) -> int:
    require(found["cost_ns"].null_count() == 0, "what the waits cost the device was not worked out: no idle time of the device is known")
    return int(found["cost_ns"].sum())


def _count_per_step(window: Window, found: pl.DataFrame) -> float:
    require(window.steps.height > 0, "no complete step was recorded")
    return found.height / window.steps.height


@fact("read_cost_ns", unit="ns")
def read_cost_ns(window: Window) -> int:
    """Idle time of the device after the host had waited to read a result (.item(), .cpu(), a condition on a tensor)."""
    return _sum_cost_ns(find_reads(window))


@fact("read_cost_share", unit="share")
def read_cost_share(window: Window) -> float:
    """read_cost_ns over the wall time of the analysed steps."""
    return _sum_cost_ns(find_reads(window)) / window.wall_ns


@fact("reads_per_step", unit="count")
def reads_per_step(window: Window) -> float:
    """Reads of results that wait for the device, per analysed step."""
    return _count_per_step(window, find_reads(window))


def filter_amid_steps(window: Window, found: pl.DataFrame) -> pl.DataFrame:
    """Return the syncs of `found` that lie between the first and the last op of the forward and backward passes of their step."""
    ops = window.analysis.trace.ops.select("phase", "step", "start_ns")
    passes = ops.filter(pl.col("phase").is_in(["forward", "backward"])).drop_nulls("step")
    spans = passes.group_by("step").agg(pl.col("start_ns").min().alias("first_ns"), pl.col("start_ns").max().alias("last_ns"))
    return found.join(spans, on="step", how="inner").filter(pl.col("start_ns").is_between("first_ns", "last_ns", closed="none"))


@fact("reads_amid_per_step", unit="count")
def reads_amid_per_step(window: Window) -> float:
    """Reads of results within the forward and backward passes, per analysed step: no graph captures them. One of the loss after is none."""
    return _count_per_step(window, filter_amid_steps(window, find_reads(window)))


@fact("synchronize_cost_ns", unit="ns")
def synchronize_cost_ns(window: Window) -> int:
    """Idle time of the device after a synchronisation that the program asked for (torch.cuda.synchronize and its kin)."""
    return _sum_cost_ns(find_synchronizations(window))


@fact("synchronize_cost_share", unit="share")
def synchronize_cost_share(window: Window) -> float:
    """synchronize_cost_ns over the wall time of the analysed steps."""
    return _sum_cost_ns(find_synchronizations(window)) / window.wall_ns


@fact("synchronizations_per_step", unit="count")
def synchronizations_per_step(window: Window) -> float:
    """Synchronisations that the program asked for, per analysed step."""
    return _count_per_step(window, find_synchronizations(window))


@fact("without_reads_ns", unit="ns")
def without_reads_ns(window: Window) -> float:
    """Time that the analysed steps would save if no read of a result waited for the device: replayed, else read_cost_ns."""
    found = find_reads(window)
    return window.without_syncs_ns(found, otherwise=lambda: _sum_cost_ns(found))


@fact("without_synchronize_ns", unit="ns")
def without_synchronize_ns(window: Window) -> float:
    """Time that the analysed steps would save without the synchronisations that are asked for: replayed, else synchronize_cost_ns."""
    found = find_synchronizations(window)
    return window.without_syncs_ns(found, otherwise=lambda: _sum_cost_ns(found))


def find_shape_syncs(window: Window) -> pl.DataFrame:
    """Return the syncs inside such ops: only one whose size the device must tell waits."""
    return add_sync_names(window).filter(pl.col("op_name").is_in(SHAPE_OPS).fill_null(False))


def sum_shape_cost_ns(window: Window) -> int:
    """Return the idle time of the device in ns that these syncs are charged with."""
    found = find_shape_syncs(window)
    require(found["cost_ns"].null_count() == 0, "what the waits cost the device was not worked out: no idle time of the device is known")
    return int(found["cost_ns"].sum())


@fact("shape_wait_cost_ns", unit="ns")
def shape_wait_cost_ns(window: Window) -> int:
    """Idle time of the device after the host had waited for the size of a result (nonzero, masked_select, indexing by a mask, unique)."""
    return sum_shape_cost_ns(window)


@fact("shape_wait_cost_share", unit="share")
def shape_wait_cost_share(window: Window) -> float:
    """shape_wait_cost_ns over the wall time of the analysed steps."""
    return sum_shape_cost_ns(window) / window.wall_ns


@fact("shape_waits_per_step", unit="count")
def shape_waits_per_step(window: Window) -> float:
    """Waits for the size of a result, per analysed step."""
    require(window.steps.height > 0, "no complete step was recorded")
    return find_shape_syncs(window).height / window.steps.height
