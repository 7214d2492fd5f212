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


class Explained(NamedTuple):
    """Where the time of the window went, and what the host did meanwhile."""

    idle: pl.DataFrame
    syncs: pl.DataFrame
    breakdown: Breakdown
    events: pl.DataFrame
    """host_events of the trace."""


class Timeline(NamedTuple):
    """What the graphs of the steps tell, and the syncs with their costs."""

    syncs: pl.DataFrame
    graphs: tuple[Graph, ...]
    run_graph: Graph | None
    critical_path: pl.DataFrame | None
    queue: QueueStats | None
    replay: ReplayTrust | None
    warnings: tuple[str, ...]


def explained(found: Found) -> Explained:
    """Return breakdown, idle causes and calls that wait of `found`: the last that is asked of its Python frames."""
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
    give_back()
    bounds = trace.kernels["bound"].gather(found.work)
    parts = unknown_breakdown(window) if found.silent else breakdown(bounds, found.spans, window, idle)
    parts.validate()
    return Explained(idle, syncs, parts, events)


def timeline(
    trace: Trace, steps: pl.DataFrame, host: Explained, host_marks: pl.DataFrame | None, *, on_cpu: bool, silent: bool
) -> Timeline:
    """Return dependency graphs, critical path, replay, queue and calls that wait of a window; `on_cpu`, `silent`: see Found."""
    window = intervals.of(steps.filter("analysed"))
    graphs, run_graph = ((), None) if silent else build_all(trace, steps, host.idle, host.syncs, on_cpu, host_marks, host.events)
    give_back()
    return Timeline(
        syncs=with_costs(host.syncs, host.idle),
        graphs=graphs,
        run_graph=run_graph,
        critical_path=critical_path(graphs, trace) if graphs else None,
        queue=None if on_cpu or silent else queue_stats(trace, steps, window),
        replay=replay_trust(graphs, steps, run_graph),
        warnings=() if silent else graph_warnings(trace, steps, on_cpu=on_cpu),
    )
