"""What-ifs at the pace of the run without the profiler: it slows the host that issues work, not the device.

A step that the slowed host holds up gains nothing from faster kernels, while the plain step may be all the device's: what a change of the
device's work gives has to be asked of the latter.
"""

from __future__ import annotations

import msgspec
import numpy as np

from gpudiag.model.graph import Graph
from gpudiag.timeline.whatif.host import host_nodes
from gpudiag.timeline.whatif.study import Study

FASTEST = 0.5
"""Least part of what the slow-down alone leaves of the host's time (heuristic: recording without stacks at most doubles it). Where the
device fills the plain step, the host can be this fast and nothing would show it."""

WITHIN = 0.02
"""Part of the plain step by which a replay may be shorter and still meet it (heuristic: the scatter of a median of few steps)."""

_HALVINGS = 5
"""1/32 of the range that is searched: finer than the slow-down is known."""


def at_plain_pace(study: Study, slowdown: float) -> Study:
    """Return `study` with the host as fast as the steps without the profiler allow, those being `slowdown` (> 1) times as short."""
    plain = study.mean_ns / slowdown
    return _paced(study, _factor(study, plain * (1 - WITHIN), FASTEST / slowdown, 1 / slowdown))


def _factor(study: Study, least_ns: float, low: float, high: float) -> float:
    """Return the smallest factor on the host's time, `low` to `high`, with which a step still takes `least_ns`.

    It takes longer with a slower host, never shorter; with `high`, 1 / slow-down, it is not shorter than the plain step, for no more than
    all of it can shrink by that.
    """
    if _paced(study, low).mean_ns >= least_ns:
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _paced(study, middle).mean_ns >= least_ns else (middle, high)
    return high


def _paced(study: Study, factor: float) -> Study:
    return study.with_graphs(lambda graph: _with_host(graph, factor))


def _with_host(graph: Graph, factor: float) -> Graph:
    held = np.where(host_nodes(graph), np.rint(graph.duration_ns * factor), graph.duration_ns).astype(np.int64)
    return msgspec.structs.replace(graph, duration_ns=held)
