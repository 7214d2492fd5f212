"""copies=overlapped and communication=overlapped: work of that kind runs beside everything else, on a lane of its own."""

from __future__ import annotations

import msgspec
import numpy as np

from gpudiag.attribution.names import contains
from gpudiag.errors import InputError
from gpudiag.model.graph import Graph, edge_kind
from gpudiag.timeline.whatif.context import Context
from gpudiag.timeline.whatif.setting import Kind, Setting, shown
from gpudiag.timeline.whatif.times import Bools, Times, of_kind, scaled

OVERLAPPED = "overlapped"
_TO_HOST = r"(?i)DtoH|DeviceToHost"
"""Names of copies that the host reads the result of (Kineto: 'Memcpy DtoH (Device -> Pinned)', ROCm: 'CopyDeviceToHost')."""


def _check(setting: Setting) -> None:
    if setting.value not in (OVERLAPPED, ""):
        raise InputError(f"{shown(setting)}: the value is '{OVERLAPPED}'", f"for example {setting.name}={OVERLAPPED}")


def _copies(graph: Graph, times: Times, context: Context, setting: Setting) -> Times | None:
    _check(setting)
    copies = of_kind(graph, "copy")  # those of 0 us too, in traces that tell whole us: what they do to the host is not 0
    if not copies.any():
        return None
    read = np.append(contains(context.trace.kernels["name"], _TO_HOST).fill_null(False).to_numpy(), False)
    blocking = (graph.edge_kind == edge_kind("sync")) & (copies & ~read[graph.kernel])[graph.src]
    return _beside(scaled(times, _copying(graph, context, blocking), 0.0), copies, blocking)


def _copying(graph: Graph, context: Context, blocking: Bools) -> Bools:
    """Return the host's time in the calls that the edges `blocking` make wait for their own copy: staging the data is part of it.

    Such a call is a node of its own, before the wait.
    """
    launches = np.append(context.trace.kernels["launch"].fill_null(-1).to_numpy(), -1)
    made = launches[graph.kernel[graph.src[blocking]]]
    found: Bools = of_kind(graph, "sync") & np.isin(graph.launch, made[made >= 0])
    return found


def _communication(graph: Graph, times: Times, _: Context, setting: Setting) -> Times | None:
    _check(setting)
    collectives = of_kind(graph, "communication") & (times.duration_ns > 0)
    return _beside(times, collectives, np.zeros(graph.src.size, dtype=np.bool_)) if collectives.any() else None


def _beside(times: Times, nodes: Bools, dropped: Bools) -> Times:
    return msgspec.structs.replace(times, own_lane=times.own_lane | nodes, dropped=times.dropped | dropped)


def _copy_words(_: Setting) -> str:
    return "copies between host and device run beside all other work, those to the device do not block the host; waits for results stay"


def _communication_words(_: Setting) -> str:
    return "collectives run beside all other work; the step is not shorter than their total"


COPIES = Kind("copies", OVERLAPPED, OVERLAPPED, _copies, _copy_words, "the steps hold no copy between host and device")
COMMUNICATION = Kind("communication", OVERLAPPED, OVERLAPPED, _communication, _communication_words, "the steps hold no collective")
