"""Facts about why the device was idle: the idle time of the analysed steps by cause (timeline.idle)."""

from __future__ import annotations

from gpudiag.facts.registry import fact, require
from gpudiag.facts.window import Window

EXPLAINED_ENOUGH = 0.05
"""Share of the steps below which unexplained idle time cannot hide a cause that is worth a finding (the least of the rules is 2 %)."""


def _ns(window: Window, *causes: str) -> int:
    require(window.wall_ns > 0, "no complete step was recorded")
    return sum(getattr(window.analysis.breakdown.buckets_ns, cause) for cause in causes)


@fact("causes_told", unit="bool")
def causes_told(window: Window) -> bool:
    """True where most of the idle time has a known cause, or all but 5 % of the steps; never false: else it is not known.

    A rule about one cause passes only where this holds: `when: idle_gc_share > 0.03 or not causes_told`.
    """
    unexplained, idle = _ns(window, "idle_unexplained"), window.analysis.breakdown.idle_ns
    require(
        unexplained <= max(idle / 2, EXPLAINED_ENOUGH * window.wall_ns),
        "most of the idle time has no known cause: nothing was recorded on the host then; record with activities=[CPU, CUDA] and Python "
        "stacks, or with gpudiag.profile",
    )
    return True


@fact("idle_unexplained_share", unit="share")
def idle_unexplained_share(window: Window) -> float:
    """Idle time without a known cause over the wall time of the analysed steps."""
    return _ns(window, "idle_unexplained") / window.wall_ns


@fact("idle_launch_ns", unit="ns")
def idle_launch_ns(window: Window) -> int:
    """Idle time of the device while the host was busy in Python, the framework or the launch itself, and had issued nothing more.

    On a CPU-only run: time of Python and the framework between ops.
    """
    return _ns(window, "idle_launch")


@fact("idle_launch_share", unit="share")
def idle_launch_share(window: Window) -> float:
    """idle_launch_ns over the wall time of the analysed steps."""
    return _ns(window, "idle_launch") / window.wall_ns


@fact("idle_sync_share", unit="share")
def idle_sync_share(window: Window) -> float:
    """Idle time that calls which waited for the device caused (CPU: waits for other threads) over the wall time of the analysed steps."""
    return _ns(window, "idle_sync") / window.wall_ns


@fact("idle_allocation_ns", unit="ns")
def idle_allocation_ns(window: Window) -> int:
    """Idle time of the device while the host allocated device memory from the driver or gave it back (cudaMalloc, cudaFree)."""
    window.require_accelerator()
    return _ns(window, "idle_allocation")


@fact("idle_allocation_share", unit="share")
def idle_allocation_share(window: Window) -> float:
    """idle_allocation_ns over the wall time of the analysed steps."""
    window.require_accelerator()
    return _ns(window, "idle_allocation") / window.wall_ns


@fact("idle_compile_ns", unit="ns")
def idle_compile_ns(window: Window) -> int:
    """Idle time of the device while torch.compile, Triton or the driver compiled or loaded code."""
    return _ns(window, "idle_compile")


@fact("idle_compile_share", unit="share")
def idle_compile_share(window: Window) -> float:
    """idle_compile_ns over the wall time of the analysed steps."""
    return _ns(window, "idle_compile") / window.wall_ns


@fact("stall_ns", unit="ns")
def stall_ns(window: Window) -> int:
    """Idle time of the device while Python collected garbage, or the program wrote files: checkpoints, logs."""
    return _ns(window, "idle_gc", "idle_io")


@fact("stall_share", unit="share")
def stall_share(window: Window) -> float:
    """stall_ns over the wall time of the analysed steps."""
    return _ns(window, "idle_gc", "idle_io") / window.wall_ns


@fact("idle_gc_ns", unit="ns")
def idle_gc_ns(window: Window) -> int:
    """The part of stall_ns in which Python collected garbage."""
    return _ns(window, "idle_gc")


@fact("idle_io_ns", unit="ns")
def idle_io_ns(window: Window) -> int:
    """The part of stall_ns in which the program wrote files."""
    return _ns(window, "idle_io")


@fact("stalls_recorded", unit="bool")
def stalls_recorded(window: Window) -> bool:
    """True where garbage collections and file writes were recorded, so that there being none means something; else it is not known."""
    analysis = window.analysis
    require(
        analysis.host_marks is not None or analysis.trace.frames.height > 0 or window.analysis.breakdown.idle_ns == 0,
        "garbage collections and file writes are not in this trace: record with gpudiag.profile, or with Python stacks",
    )
    return True
