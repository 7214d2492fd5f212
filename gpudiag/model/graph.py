"""The dependency graph of one step: what had to be over before each piece of work could begin."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from gpudiag.arrays import Ints

HOST_KINDS = ("host", "launch", "sync", "data", "gc", "io", "compile", "init", "allocation", "profiler", "unexplained")
"""Time of a host thread. host: Python and framework; launch: the call that starts work, up to the start of that work at most; sync: a call
that waits, without the wait; the others: the idle causes of the same names (unexplained: the thread showed nothing while the device fell
idle; no what-if shortens it)."""

DEVICE_KINDS = ("kernel", "copy", "communication")
"""Work of a device. kernel: also memsets and copies within the device; copy: host <-> device."""

NODE_KINDS = (*HOST_KINDS, *DEVICE_KINDS)

EDGE_KINDS = ("thread", "handoff", "launch", "stream", "event", "sync", "queue_full")
"""thread: the order of one host thread; handoff: one thread waits for another (backward); launch: call -> work; stream: the order of one
stream; event: cudaStreamWaitEvent; sync: work -> the return of the call that waits for it; queue_full: work -> a launch call that had to
wait for a free place."""

QUEUE_LIMIT = 1024
"""Launches that can have been issued and not begun before a launch call blocks: the depth at which CUDA's work queue is full
(seen as 1,022 to 1,024 pending kernels in recordings; the guide of CUDA gives no figure). A recording may show another."""


class Graph(msgspec.Struct, frozen=True, eq=False, weakref=True):
    """A step, or consecutive steps, as nodes and edges.

    A node begins at max over its incoming edges of (end of src + lag), and at `origin_ns` at the earliest.
    Nodes are in topological order: src < dst for every edge. Times in ns from the trace's base.
    """

    step: int
    """Row of steps; of consecutive steps the first."""
    kind: npt.NDArray[np.int8]
    """Index into NODE_KINDS."""
    lane: Ints
    """Host thread (index into TraceMeta.threads), or -1 - k for the k-th stream of `streams`."""
    streams: tuple[int, ...]
    start_ns: Ints
    """As measured."""
    duration_ns: Ints
    """As measured, >= 0; of work that the next piece of its stream overlaps and outlasts, up to the begin of that."""
    kernel: Ints
    """Row of kernels, -1 for host nodes."""
    launch: Ints
    """Row of launches for kinds launch and sync, -1 for the others."""
    op: Ints
    """Row of ops: the op that was open; -1: none."""
    src: Ints
    dst: Ints
    edge_kind: npt.NDArray[np.int8]
    """Index into EDGE_KINDS."""
    lag_ns: Ints
    """Normal latency of the edge: the same for all edges of its kind and surroundings, so not fitted to this one. Below 0 where
    by the clocks the work ends up to 2 us after the call that waited for it."""
    free_ns: Ints
    """What is left between src + lag and the measured start of dst where this edge was the last to be over: the free delay parameter."""
    origin_ns: int
    """Mark k: the begin of the step."""
    end_ns: int
    """Mark k+1, or the end of the step's last work where the run does not wait for it (see timeline.graph)."""
    last_host: int
    """The node whose end is mark k+1 on the thread that steps; -1: none."""
    carried: int = 0
    """Nodes 1 to `carried` are work of the device that was issued before the step; node 0 is the begin of the step and takes no time."""
    queue_limit: int = QUEUE_LIMIT
    """Launches that can be issued ahead of the device, as the recording shows it."""
    alone: bool = False
    """The next step begins when all of this one is over: the only step of a recording, in which nothing shows how far the host would have
    gone on in the meantime."""
    begins_ns: tuple[int, ...] = ()
    """Of consecutive steps the marks between them; origin_ns is then the begin of the first, end_ns the end of the last."""

    @property
    def step_count(self) -> int:
        """Return how many steps the graph holds."""
        return len(self.begins_ns) + 1


def encode_node_kind(name: str) -> int:
    """Return the code of a kind of node; raises ValueError for another word."""
    return NODE_KINDS.index(name)


def encode_edge_kind(name: str) -> int:
    """Return the code of a kind of edge; raises ValueError for another word."""
    return EDGE_KINDS.index(name)
