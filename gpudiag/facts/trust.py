"""Facts about the measurement itself: what rule EFF-03 looks at."""

from __future__ import annotations

import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.attribution.names import contains, matches
from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window

COMPILATION = r"entire_frame_compile|backend_compile|_compile\.compile_inner|\(dynamo_timed\)"
"""Events of torch.compile at work (rules.md A.1)."""

_LOADING = r"(?i)lazy.?function.?loading|module.?loading"
"""Kineto's names of the driver's overhead records for code that is loaded at its first launch (CUpti_ActivityOverheadKind)."""

_STARTS_WORK = r"^(cuda|hip)(Launch|GraphLaunch|ExtLaunch|ExtModuleLaunch|ModuleLaunch|Memcpy|Memset)|^cu(LaunchKernel|GraphLaunch)"


@fact("device_events_missing", unit="bool")
def device_events_missing(window: Window) -> bool:
    """Whether an accelerator was given work (runtime calls say so) but not one kernel, copy or memset was recorded.

    A run that used no accelerator is no fault: false.
    """
    trace = window.analysis.trace
    if trace.kernels.filter(pl.col("kind") != "cpu").height:
        return False
    called = contains(trace.launches["api"], _STARTS_WORK).any()
    return bool(called) or not window.on_cpu


@fact("profiler_slowdown", unit="ratio")
def profiler_slowdown(window: Window) -> float:
    """Median profiled step over median unprofiled step of the same run."""
    slowdown = window.analysis.profiler_slowdown
    if slowdown is None:
        raise NotKnownError("how much the profiler slowed the run is not known: only profiled steps were recorded; use gpudiag.profile")
    return slowdown


@fact("compilation_step_share", unit="share")
def compilation_step_share(window: Window) -> float:
    """Part of the analysed steps in which torch.compile was at work."""
    trace = window.analysis.trace
    require(trace.ops.height > 0, "no ops were recorded: record with activities=[CPU, CUDA]")
    require(window.steps.height > 0, "no complete step was recorded")
    events = pl.concat([frame.filter(matches("name", COMPILATION)).select("start_ns", "end_ns") for frame in (trace.ops, trace.marks)])
    at_work = spans.covered(spans.of(events), window.steps["start_ns"].to_numpy(), window.steps["end_ns"].to_numpy())
    return float((at_work > 0).sum()) / window.steps.height


def _walls(window: Window) -> pl.Series:
    return window.steps.select((pl.col("end_ns") - pl.col("start_ns")).cast(pl.Float64)).to_series()


@fact("step_variation", unit="share")
def step_variation(window: Window) -> float:
    """Coefficient of variation of the analysed steps' wall time: standard deviation over mean."""
    walls = _walls(window)
    require(len(walls) >= 2, "fewer than 2 steps: their scatter cannot be told")
    deviation, mean = walls.std(), walls.mean()
    if not isinstance(deviation, float) or not isinstance(mean, float) or mean <= 0:
        raise NotKnownError("steps without duration")
    return deviation / mean


@fact("first_step_ratio", unit="ratio")
def first_step_ratio(window: Window) -> float:
    """Wall time of the first recorded step, where it is analysed, over the median of the others; 1 where it was left out."""
    steps, walls = window.analysis.steps.sort("start_ns"), _walls(window)
    require(len(walls) >= 2, "fewer than 2 steps: the first cannot be compared")
    if not steps["analysed"][0]:
        return 1.0
    median = walls[1:].median()
    if not isinstance(median, float) or median <= 0:
        raise NotKnownError("steps without duration")
    return float(walls[0]) / median


@fact("stacks_recorded", unit="bool")
def stacks_recorded(window: Window) -> bool:
    """Whether Python stacks were recorded in the window that the times come from: they slow the host."""
    trace = window.analysis.trace
    return trace.meta.with_stack or trace.frames.height > 0


@fact("memory_recorded", unit="bool")
def memory_recorded(window: Window) -> bool:
    """Whether allocations were recorded in the window that the times come from (profile_memory): they slow the host."""
    return window.analysis.trace.meta.profile_memory


@fact("loading_ns", unit="ns")
def loading_ns(window: Window) -> int:
    """Time of the analysed steps in which the driver loaded kernels at their first launch (lazy loading), where it recorded that."""
    named = matches("name", _LOADING)
    events = window.analysis.trace.marks.filter((pl.col("category") == "overhead") & named)
    return spans.overlap(spans.of(events), window.step_spans)


@fact("profiler_overhead_share", unit="share")
def profiler_overhead_share(window: Window) -> float:
    """Time of the profiler's own events (buffer flushes, instrumentation) over the wall time of the analysed steps."""
    events = window.analysis.trace.marks.filter(pl.col("category") == "overhead")
    return spans.overlap(spans.of(events), window.step_spans) / window.wall_ns
