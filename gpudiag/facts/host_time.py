"""Facts about the host's time without what the profiler adds to it: what OVH and SYN rules compare.

A profiler slows the host that issues work, not the device. What it adds to the analysed steps is known where plain steps ran beside them;
it is taken out of the idle time that the host is to blame for, of each kind by its part.
"""

from __future__ import annotations

import polars as pl

from gpudiag.facts.ceilings import as_graph_ns, compiled_ns, without_launch_ns
from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.shape_syncs import shape_syncs, shape_wait_cost_ns
from gpudiag.facts.waits import asked_for, read_cost_ns, reads, synchronize_cost_ns
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


def dispatch_ns(window: Window) -> float:
    """Return the time in ns that ops of a CPU too small to do anything else spend on being dispatched; 0 on a GPU.

    Time of ops bound by overhead beyond their roofline: it lies inside the op there, and in the idle time of a GPU. Calls of one shape are
    taken together: one that the system interrupted is not longer for what it does.
    """
    if not window.on_cpu:
        return 0.0
    kind = ("op_name", "signature")
    small = window.kernels.filter((pl.col("bound") == "overhead").mean().over(*kind) > MOSTLY)
    return float((small["time_ns"] - small["t_roof_ns"].fill_null(0.0)).clip(lower_bound=0).sum())


def issued_ns(window: Window) -> float:
    """Return the time in ns in which Python, the framework and launches hold up the device, as recorded."""
    require(window.wall_ns > 0, "no complete step was recorded")
    return window.analysis.breakdown.buckets_ns.idle_launch + dispatch_ns(window)


def added_ns(window: Window) -> float:
    """Return what the profiler added to the analysed steps in ns: (slow-down - 1) x the plain step, for each of them.

    Raises NotKnownError where no plain steps were recorded to compare with.
    """
    slowdown = window.analysis.profiler_slowdown
    if slowdown is None:
        raise NotKnownError("what the profiler added to the steps is not known: only profiled steps were recorded; use gpudiag.profile")
    return window.wall_ns * (1 - 1 / slowdown) if slowdown > 1 else 0.0


def left_of(window: Window, recorded_ns: float) -> float:
    """Return what is left of `recorded_ns`, idle time that the host is to blame for, without the profiler's part; all where unknown."""
    if not window.analysis.profiler_slowdown:
        return recorded_ns
    blamed = issued_ns(window) + window.analysis.breakdown.buckets_ns.idle_sync
    return recorded_ns * max(0.0, 1 - added_ns(window) / blamed) if blamed > 0 else 0.0


def share_of_plain(window: Window, left_ns: float) -> float:
    """Return `left_ns` over the wall time of the analysed steps without what the profiler added, at most 1."""
    plain = window.wall_ns - (added_ns(window) if window.analysis.profiler_slowdown else 0.0)
    if window.on_cpu:  # nothing of the process ran then: the system ran others, whatever the step does
        plain -= window.analysis.breakdown.buckets_ns.idle_unexplained
    return min(left_ns / plain, 1.0) if plain > 0 else 0.0


def as_recorded(window: Window, saved_ns: float) -> float:
    """Return the saving in ns, at the pace of the recorded steps, that a plain step has by the share `saved_ns` of the recorded ones.

    A ceiling is read as a share of the step: the profiler's part is in neither, or in both.
    """
    return share_of_plain(window, left_of(window, saved_ns)) * window.wall_ns


@fact("profiler_added_ns", unit="ns")
def profiler_added_ns(window: Window) -> float:
    """What the profiler added to the analysed steps: (slow-down - 1) x the plain step for each; 0 where they were no slower."""
    return added_ns(window)


@fact("issuing_ns", unit="ns")
def issuing_ns(window: Window) -> float:
    """Time that Python, the framework and launches hold up the device, the profiler's part included: idle_launch_ns.

    On a CPU-only run also the dispatch inside small ops: time of ops bound by overhead beyond their roofline.
    """
    return issued_ns(window)


@fact("issuing_share", unit="share")
def issuing_share(window: Window) -> float:
    """issuing_ns over the wall time of the analysed steps."""
    return min(issued_ns(window) / window.wall_ns, 1.0)


@fact("host_idle_ns", unit="ns")
def host_idle_ns(window: Window) -> float:
    """issuing_ns without what the profiler may have added to it; equal to it where the slow-down is not known or below 1.

    profiler_added_ns is taken out of issuing_ns and of the idle time by synchronisation, of each by its part.
    """
    return left_of(window, issued_ns(window))


@fact("host_idle_share", unit="share")
def host_idle_share(window: Window) -> float:
    """host_idle_ns over the wall time of the analysed steps without profiler_added_ns: the share of a plain step."""
    return share_of_plain(window, host_idle_ns(window))  # type: ignore[arg-type]


@fact("profiler_in_host_ns", unit="ns")
def profiler_in_host_ns(window: Window) -> float:
    """The part of issuing_ns that may be the profiler's: issuing_ns - host_idle_ns."""
    return issued_ns(window) - left_of(window, issued_ns(window))


@fact("read_idle_ns", unit="ns")
def read_idle_ns(window: Window) -> float:
    """read_cost_ns without what the profiler may have added to it (see host_idle_ns)."""
    return left_of(window, float(read_cost_ns(window)))


@fact("read_idle_share", unit="share")
def read_idle_share(window: Window) -> float:
    """read_idle_ns over the wall time of the analysed steps without profiler_added_ns."""
    return share_of_plain(window, left_of(window, float(read_cost_ns(window))))


@fact("synchronize_idle_ns", unit="ns")
def synchronize_idle_ns(window: Window) -> float:
    """synchronize_cost_ns without what the profiler may have added to it (see host_idle_ns)."""
    return left_of(window, float(synchronize_cost_ns(window)))


@fact("synchronize_idle_share", unit="share")
def synchronize_idle_share(window: Window) -> float:
    """synchronize_idle_ns over the wall time of the analysed steps without profiler_added_ns."""
    return share_of_plain(window, left_of(window, float(synchronize_cost_ns(window))))


# -- ceilings at the pace of a plain step -----------------------------------------------------------------------------


@fact("without_host_ns", unit="ns")
def without_host_ns(window: Window) -> float:
    """Time saved if Python, the framework, launches and the dispatch of small ops took none, as the share of a plain step.

    What-if host=0 (else idle_launch_ns), on a CPU with the small ops at their roofline, less the profiler's part.
    """
    idle_ns = window.analysis.breakdown.buckets_ns.idle_launch
    return as_recorded(window, window.without_idle_ns("host=0", idle_ns=lambda: float(idle_ns)) + dispatch_ns(window))


@fact("without_read_waits_ns", unit="ns")
def without_read_waits_ns(window: Window) -> float:
    """Time saved if no read of a result waited for the device, less the profiler's part: replayed, else read_cost_ns."""
    found = reads(window)
    return as_recorded(window, window.without_syncs_ns(found, otherwise=lambda: float(read_cost_ns(window))))


@fact("without_synchronize_waits_ns", unit="ns")
def without_synchronize_waits_ns(window: Window) -> float:
    """Time saved without the synchronisations that are asked for, less the profiler's part: replayed, else synchronize_cost_ns."""
    found = asked_for(window)
    return as_recorded(window, window.without_syncs_ns(found, otherwise=lambda: float(synchronize_cost_ns(window))))


@fact("shape_idle_ns", unit="ns")
def shape_idle_ns(window: Window) -> float:
    """shape_wait_cost_ns without what the profiler may have added to it (see host_idle_ns)."""
    return left_of(window, float(shape_wait_cost_ns(window)))


@fact("shape_idle_share", unit="share")
def shape_idle_share(window: Window) -> float:
    """shape_idle_ns over the wall time of the analysed steps without profiler_added_ns."""
    return share_of_plain(window, left_of(window, float(shape_wait_cost_ns(window))))


@fact("without_shape_waits_ns", unit="ns")
def without_shape_waits_ns(window: Window) -> float:
    """Time saved if no op waited for the size of its result, less the profiler's part: replayed, else shape_wait_cost_ns."""
    found = shape_syncs(window)
    return as_recorded(window, window.without_syncs_ns(found, otherwise=lambda: float(shape_wait_cost_ns(window))))


@fact("as_one_graph_ns", unit="ns")
def as_one_graph_ns(window: Window) -> float:
    """Time saved with the step as one CUDA graph, less the profiler's part: as_graph_ns at the pace of a plain step."""
    return as_recorded(window, float(as_graph_ns(window)))


@fact("compiled_plain_ns", unit="ns")
def compiled_plain_ns(window: Window) -> float:
    """compiled_ns, and on a CPU the dispatch of small ops; the host's part of it less what the profiler adds."""
    whole, host = float(compiled_ns(window)), float(without_launch_ns(window))
    return as_recorded(window, host + dispatch_ns(window)) + max(0.0, whole - host)
