"""What the device did and why it was idle: breakdown, causes, calls that wait, queue, critical path and replay of one window."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.attribution.sites import Frames, Sites
from gpudiag.model.breakdown import Breakdown
from gpudiag.model.graph import Graph
from gpudiag.model.replay import QueueStats, ReplayTrust
from gpudiag.model.trace import Trace
from gpudiag.timeline.breakdown import breakdown, unknown_breakdown
from gpudiag.timeline.charge import with_costs
from gpudiag.timeline.critical import critical_path
from gpudiag.timeline.graph import build_all, graph_warnings
from gpudiag.timeline.host_events import host_events, own_frames
from gpudiag.timeline.idle import explain
from gpudiag.timeline.queue import queue_stats
from gpudiag.timeline.replay import replay_trust
from gpudiag.timeline.syncs import find_syncs
from gpudiag.trace.garbage import give_back


class Found(NamedTuple):
    """The window before its timeline: costed tables, where the device worked, what was recorded beside the trace."""

    trace: Trace
    """Stage cost."""
    steps: pl.DataFrame
    gaps: pl.DataFrame
    work: pl.Series | npt.NDArray[np.int64]
    """Rows of kernels, one for each of `spans`."""
    spans: intervals.Spans
    sites: Sites
    site_window: tuple[Trace, pl.DataFrame] | None
    host_marks: pl.DataFrame | None
    on_cpu: bool
    silent: bool
    """The device's work was not recorded."""
    frames: Frames | None = None
    """Those of `trace`, where their nesting was asked for before."""


class Timeline(NamedTuple):
    """The parts of an Analysis that tell time."""

    idle: pl.DataFrame
    syncs: pl.DataFrame
    breakdown: Breakdown
    graphs: tuple[Graph, ...]
    run_graph: Graph | None
    critical_path: pl.DataFrame | None
    queue: QueueStats | None
    replay: ReplayTrust | None
    warnings: tuple[str, ...]


def timeline(found: Found) -> Timeline:
    """Return breakdown, idle causes, calls that wait, queue, dependency graphs, critical path and replay of `found`."""
    trace, steps, window = found.trace, found.steps, intervals.of(found.steps.filter("analysed"))
    syncs = find_syncs(trace, steps, found.sites)
    own = own_frames(trace)
    frames = found.frames if found.frames is not None and own.table is trace.frames else own
    events = host_events(trace, frames, found.host_marks, on_cpu=found.on_cpu)
    idle = explain(
        trace, found.gaps.clear() if found.silent else found.gaps, window, steps, syncs=syncs, host_marks=found.host_marks,
        sites=found.sites, site_window=found.site_window, on_cpu=found.on_cpu, frames=frames, events=events,
    )  # fmt: skip
    frames.forget()
    give_back()  # the graphs that follow need the memory
    bounds = trace.kernels["bound"].gather(found.work)
    parts = unknown_breakdown(window) if found.silent else breakdown(bounds, found.spans, window, idle)
    parts.validate()
    graphs, run_graph = ((), None) if found.silent else build_all(trace, steps, idle, syncs, found.on_cpu, found.host_marks, events)
    give_back()
    return Timeline(
        idle=idle,
        syncs=with_costs(syncs, idle),
        breakdown=parts,
        graphs=graphs,
        run_graph=run_graph,
        critical_path=critical_path(graphs, trace) if graphs else None,
        queue=None if found.on_cpu or found.silent else queue_stats(trace, steps, window),
        replay=replay_trust(graphs, steps, run_graph),
        warnings=() if found.silent else graph_warnings(trace, steps, on_cpu=found.on_cpu),
    )
