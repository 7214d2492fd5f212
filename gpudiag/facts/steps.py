"""Facts about the steps and how the device spends them."""

from __future__ import annotations

from gpudiag.attribution.steps import WHOLE_TRACE
from gpudiag.facts.registry import fact, require
from gpudiag.facts.window import Window
from gpudiag.model.breakdown import BUSY_BUCKETS


@fact("wall_ns", unit="ns")
def wall_ns(window: Window) -> int:
    """Wall time of the analysed steps."""
    return window.wall_ns


@fact("steps_analysed", unit="count")
def steps_analysed(window: Window) -> int:
    """Complete steps that the figures rest on; a trace in which no steps were found counts as one."""
    return window.steps.height


@fact("step_ns", unit="ns")
def step_ns(window: Window) -> float:
    """Mean wall time of an analysed step."""
    require(window.steps.height > 0, "no complete step was recorded")
    return window.wall_ns / window.steps.height


@fact("a_step", unit="text")
def a_step(window: Window) -> str:
    """What the analysed time is called in a sentence: 'a step', or 'the recorded window' where no steps were found."""
    return "the recorded window" if window.analysis.steps_source == WHOLE_TRACE else "a step"


@fact("device_word", unit="text")
def device_word(window: Window) -> str:
    """What the device is called in a sentence: GPU or CPU."""
    return "CPU" if window.on_cpu else "GPU"


@fact("idle_ns", unit="ns")
def idle_ns(window: Window) -> int:
    """Time of the analysed steps in which the device did nothing (on a CPU: no op ran)."""
    require(window.wall_ns > 0, "no complete step was recorded")
    return window.analysis.breakdown.idle_ns


@fact("idle_share", unit="share")
def idle_share(window: Window) -> float:
    """idle_ns over the wall time of the analysed steps."""
    return window.analysis.breakdown.idle_ns / window.wall_ns


@fact("busy_ns", unit="ns")
def busy_ns(window: Window) -> int:
    """Time of the analysed steps in which the device did anything: wall time minus idle time."""
    return window.busy_ns


@fact("largest_busy_bucket", unit="text")
def largest_busy_bucket(window: Window) -> str:
    """Name of the bucket of the breakdown, idle causes aside, that holds the most time."""
    buckets = window.analysis.breakdown.buckets_ns
    require(window.busy_ns > 0, "the device did nothing in the analysed steps")
    return max(BUSY_BUCKETS, key=lambda name: getattr(buckets, name)).replace("_", " ")


@fact("unknown_kernel_share", unit="share")
def unknown_kernel_share(window: Window) -> float:
    """Time in kernels without a cost model over the wall time of the analysed steps."""
    return window.analysis.breakdown.buckets_ns.unknown / window.wall_ns
