"""launch=0: the work of a step is issued by one CUDA graph; between 0 and 1: launching costs that share."""

from __future__ import annotations

import msgspec
import numpy as np

from gpudiag.model.graph import Graph, edge_kind
from gpudiag.timeline.whatif.context import Context
from gpudiag.timeline.whatif.host import host_nodes
from gpudiag.timeline.whatif.setting import Kind, Setting, number
from gpudiag.timeline.whatif.times import Bools, Times, of_kind, scaled

GRAPH_SPACING_NS = 1_000
"""Kernel-to-kernel latency inside a CUDA graph: about 1 us (rules.md OVH-02; NVIDIA, Getting Started with CUDA Graphs)."""

_PHASES = ("forward", "backward", "optimizer")
_VANISHING = ("host", "launch", "allocation", "compile", "profiler")
"""What a graph replay does not do. Loading data, collecting garbage, writing files and waiting for results stay."""


def _region(graph: Graph, context: Context) -> Bools:
    """Return the nodes of host threads between the first and the last launch of forward, backward and optimizer of their step.

    Where no launch of a step is known to be of these phases, of any launch.
    """
    launches = of_kind(graph, "launch") & (graph.kernel < 0)
    of_phase = launches & context.in_phases(*_PHASES)[graph.op]
    step = np.searchsorted(np.array(graph.begins_ns, dtype=np.int64), graph.start_ns, "right")
    told = np.zeros(graph.step_count, dtype=np.bool_)
    told[step[of_phase]] = True
    launches = np.where(told[step], of_phase, launches)
    first, last = np.full(graph.step_count, np.iinfo(np.int64).max), np.full(graph.step_count, np.iinfo(np.int64).min)
    np.minimum.at(first, step[launches], graph.start_ns[launches])
    np.maximum.at(last, step[launches], graph.start_ns[launches])
    region: Bools = (graph.lane >= 0) & (graph.start_ns >= first[step]) & (graph.start_ns <= last[step])
    return region


def _edges_to(graph: Graph, nodes: Bools, *kinds: str) -> Bools:
    """Return the edges of `kinds` that end at `nodes`."""
    return nodes[graph.dst] & np.isin(graph.edge_kind, [edge_kind(kind) for kind in kinds])


def _started_by(graph: Graph, launches: Bools) -> Bools:
    """Return the device work that `launches` start."""
    edges = graph.edge_kind == edge_kind("launch")
    started = np.zeros(graph.kind.size, dtype=np.bool_)
    started[graph.dst[edges & launches[graph.src]]] = True
    return started


def _apply(graph: Graph, times: Times, context: Context, setting: Setting) -> Times | None:
    factor = number(setting, 0, 1)
    region = _region(graph, context)
    if not region.any():
        return None
    if factor > 0:
        return scaled(times, region & host_nodes(graph), factor)
    gone = region & of_kind(graph, *_VANISHING) & (graph.kernel < 0)
    started = _started_by(graph, gone)
    spaced = _edges_to(graph, started, "stream", "event")
    silent = _edges_to(graph, gone, "thread", "handoff", "launch")
    times = scaled(times, gone, 0.0)
    # a host that was always late never showed how close two kernels can follow each other: there the 1 us holds, or less where it was less
    seen = np.maximum(graph.start_ns[graph.dst] - graph.start_ns[graph.src] - graph.duration_ns[graph.src], 0)
    spacing = np.minimum(np.where(times.lag_ns > 0, times.lag_ns, seen), GRAPH_SPACING_NS)
    lag = np.where(silent, 0, np.where(spaced, spacing, times.lag_ns))
    free = np.where(silent, 0, times.free_ns)  # what nothing explains no graph takes away
    return msgspec.structs.replace(times, lag_ns=lag, free_ns=free, dropped=times.dropped | _edges_to(graph, gone, "queue_full"))


def _words(setting: Setting) -> str:
    factor = number(setting, 0, 1)
    if factor:
        return f"Python and launch calls between the first and the last launch of the step take {factor:g} x the time"
    return (
        "one CUDA graph issues the step: no Python and no launch calls between its first and its last launch, kernels at most 1 us apart; "
        "Python before and after, data, garbage collection, files, waits for results and waits that nothing explains stay"
    )


KIND = Kind("launch", "0 (CUDA graph) to 1: factor on what it costs to issue the step", "0", _apply, _words, "no launch was recorded")
