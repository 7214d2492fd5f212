"""fused: each chain of element-wise kernels becomes one kernel that moves the bytes of the chain's outer inputs and outputs."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from gpudiag.errors import InputError
from gpudiag.model.graph import Graph, edge_kind
from gpudiag.roofline.chains import fused_ns
from gpudiag.timeline.whatif.context import Context
from gpudiag.timeline.whatif.host import host_nodes
from gpudiag.timeline.whatif.setting import Kind, Setting, shown
from gpudiag.timeline.whatif.times import Bools, Times, kernel_sums, scaled, with_kernels

Ints = npt.NDArray[np.int64]


def _apply(graph: Graph, times: Times, context: Context, setting: Setting) -> Times | None:
    if setting.value not in ("", "1"):
        raise InputError(f"{shown(setting)}: it takes no value", "--set fused")
    bandwidth = context.device.bandwidth_byte_per_s if context.device else None
    if bandwidth is None or not context.chains.height:
        return None
    found = context.chains.select("ids", fused_ns(bandwidth).alias("fused_ns")).with_row_index("chain")
    members = found.explode("ids")
    rows, chain = members["ids"].to_numpy(), members["chain"].cast(int).to_numpy()
    now = kernel_sums(graph, times, context.busy_ns)
    here = (now[rows] > 0) & ~_parted(graph, rows, chain)
    rows, chain = rows[here], chain[here]
    return _fused(graph, times, context, rows, chain, found["fused_ns"].to_numpy() * times.samples) if rows.size else None


def _parted(graph: Graph, rows: Ints, chain: Ints) -> Bools:
    """Return the members of chains in which something waits for one that is not the last: the host, or another stream, reads it."""
    waited = np.isin(graph.edge_kind, [edge_kind("sync"), edge_kind("event")])
    last = np.append(chain[1:] != chain[:-1], True)
    apart = chain[np.isin(rows, graph.kernel[graph.src[waited]]) & ~last]
    return np.isin(chain, apart)


def _fused(graph: Graph, times: Times, context: Context, rows: Ints, chain: Ints, floor_ns: npt.NDArray[np.float64]) -> Times:
    """Return `times` with the first kernel of each chain doing the work of all and the others gone, with what it took to issue them."""
    now = kernel_sums(graph, times, context.busy_ns)
    whole = np.bincount(chain, weights=now[rows], minlength=floor_ns.size)
    first = np.concatenate(([True], chain[1:] != chain[:-1]))
    new_ns = np.full(context.kernel_count, np.nan)
    new_ns[rows] = np.where(first, np.minimum(whole, floor_ns)[chain], 0.0)
    gone = np.zeros(context.kernel_count + 1, dtype=np.bool_)
    gone[rows[~first]] = True
    return _unissued(graph, with_kernels(graph, times, new_ns, context.busy_ns), gone, context)


def _unissued(graph: Graph, times: Times, gone: Bools, context: Context) -> Times:
    """Return `times` without the launches and the ops of the kernels that are `gone` (one more place for 'none')."""
    nodes = gone[graph.kernel]
    to = nodes[graph.dst]
    launches = np.zeros(graph.kind.size, dtype=np.bool_)
    launched = graph.edge_kind == edge_kind("launch")
    launches[graph.src[launched & to]] = True
    launches[graph.src[launched & ~to]] = False  # a graph launch that also starts work that stays
    ops = context.trace.kernels["op"].fill_null(-1).to_numpy()
    unneeded = np.zeros(context.trace.ops.height + 1, dtype=np.bool_)
    unneeded[ops[gone[:-1]]] = True
    unneeded[ops[~gone[:-1]]] = False
    host = host_nodes(graph) & (graph.op >= 0) & unneeded[graph.op]
    times = scaled(times, launches | host, 0.0)
    spacing = to & (graph.edge_kind == edge_kind("stream"))
    return msgspec.structs.replace(
        times,
        lag_ns=np.where(spacing, 0, times.lag_ns),
        dropped=times.dropped | (launched & to),
    )


def _words(_: Setting) -> str:
    return "each chain of element-wise kernels of one size is one kernel: no intermediates in memory, 85 % of the bandwidth, one launch"


KIND = Kind("fused", "no value", "", _apply, _words, "no chain of element-wise kernels is known (this needs shapes and the bandwidth)")
