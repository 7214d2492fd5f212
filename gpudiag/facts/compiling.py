"""Facts about time that compilation takes from the steps (OVH-05), whatever else happens under it."""

from __future__ import annotations

import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.attribution.names import matches
from gpudiag.facts.causes import idle_compile_ns
from gpudiag.facts.ceilings import without_compile_ns
from gpudiag.facts.registry import fact
from gpudiag.facts.trust import COMPILATION
from gpudiag.facts.window import Window


def _compiling_ns(window: Window) -> int:
    """Return the time in ns under compile events in which the device was idle (on a CPU: all of it), at least idle_compile_ns."""
    trace = window.analysis.trace
    frames = (frame.filter(matches("name", COMPILATION)).select("start_ns", "end_ns") for frame in (trace.ops, trace.marks))
    events = spans.of(pl.concat(frames))
    under = spans.overlap(events, window.step_spans if window.on_cpu else spans.of(window.idle))
    return min(max(under, int(idle_compile_ns(window))), window.wall_ns)


@fact("compiling_ns", unit="ns")
def compiling_ns(window: Window) -> int:
    """Idle time of the device while code was compiled or loaded, with garbage that was collected meanwhile.

    On a CPU all time under the events of torch.compile: what it computes then is not training.
    """
    return _compiling_ns(window)


@fact("compiling_share", unit="share")
def compiling_share(window: Window) -> float:
    """compiling_ns over the wall time of the analysed steps."""
    return _compiling_ns(window) / window.wall_ns


@fact("without_compiling_ns", unit="ns")
def without_compiling_ns(window: Window) -> float:
    """Time saved if nothing was compiled: the larger of without_compile_ns (replayed) and compiling_ns."""
    return max(float(without_compile_ns(window)), float(_compiling_ns(window)))
