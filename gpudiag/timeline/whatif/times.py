"""The times of a graph with some of them changed: what every what-if takes and returns."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from gpudiag.model.graph import Graph, Ints, node_kind

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


class Times(msgspec.Struct, frozen=True):
    """Durations of the nodes and delays of the edges of one graph, in ns, and what is taken out of their order."""

    duration_ns: Ints
    lag_ns: Ints
    free_ns: Ints
    dropped: Bools
    """Edges that hold nobody up any more."""
    own_lane: Bools
    """Nodes that run beside all others: they hold nobody up, and the step is not shorter than their total."""
    samples: float = 1.0
    """Samples of a step over those of the recorded one."""


def unchanged(graph: Graph) -> Times:
    """Return the times of `graph` as measured."""
    none = np.zeros(graph.src.size, dtype=np.bool_)
    return Times(graph.duration_ns, graph.lag_ns, graph.free_ns, none, np.zeros(graph.kind.size, dtype=np.bool_))


def scaled(times: Times, nodes: Bools, factor: float) -> Times:
    """Return `times` with the durations of `nodes` times `factor`, in whole ns."""
    changed = np.where(nodes, np.rint(times.duration_ns * factor), times.duration_ns).astype(np.int64)
    return msgspec.structs.replace(times, duration_ns=changed)


def of_kind(graph: Graph, *kinds: str) -> Bools:
    """Return which nodes are of one of `kinds` (model.graph.NODE_KINDS)."""
    return np.isin(graph.kind, [node_kind(kind) for kind in kinds])


def kernel_sums(graph: Graph, times: Times, busy_ns: Floats) -> Floats:
    """Return the time in ns that each kernel now takes in `graph`, 0 for those that it does not hold.

    `busy_ns`: as recorded (NaN: as in the graph). The graph holds less of a kernel that the next one overlaps, or that began before the
    step: what changes of the part changes of the whole.
    """
    held = graph.kernel >= 0
    rows = graph.kernel[held]
    measured, now = (np.bincount(rows, weights=column[held], minlength=busy_ns.size) for column in (graph.duration_ns, times.duration_ns))
    whole = np.where(np.isnan(busy_ns), measured, busy_ns)
    found: Floats = whole * np.divide(now, measured, out=np.zeros_like(whole), where=measured > 0)
    return found


def with_kernels(graph: Graph, times: Times, new_ns: Floats, busy_ns: Floats) -> Times:
    """Return `times` with kernel row k taking new_ns[k] ns; NaN: as it is. A row that several nodes share is scaled as a whole.

    `busy_ns`: of each kernel as recorded (see kernel_sums).
    """
    before = kernel_sums(graph, times, busy_ns)
    ratio = np.divide(new_ns, before, out=np.ones_like(new_ns), where=(before > 0) & ~np.isnan(new_ns))
    held = graph.kernel >= 0
    factor = np.ones(graph.kind.size)
    factor[held] = ratio[graph.kernel[held]]
    return msgspec.structs.replace(times, duration_ns=np.rint(times.duration_ns * factor).astype(np.int64))
