"""What-ifs on host time: host, launch, sync, loader, gc, io, allocation, compile, profiler.

A read of a scalar that waits is gone with what issuing it took: without a reader nothing is copied.
"""

from __future__ import annotations

import re

import msgspec
import numpy as np
import polars as pl

from gpudiag.arrays import Bools
from gpudiag.attribution.names import decode_names, match_any_of
from gpudiag.model.graph import Graph, encode_edge_kind
from gpudiag.timeline.whatif.base import (
    Setting,
    Times,
    WhatIfContext,
    WhatIfKind,
    build_scaling_kind,
    find_nodes,
    read_number,
    scale_times,
)


def find_host_nodes(graph: Graph) -> Bools:
    """Return the nodes of Python, framework and launch calls; on a CPU-only run not the ops, which are the work."""
    return find_nodes(graph, "host", "launch") & (graph.kernel < 0)


LATE_HOST = ("idle_launch", "idle_dependency")
"""What the host's own time costs the device: waits for the next launch, and the spacing of work that was launched in time. Waits for data,
results, allocation, files or work outside the recording remain, and so does what nothing explains."""

HOST = build_scaling_kind(
    "host",
    "0 to 10: factor on the time of Python, framework and launch calls",
    "0.5",
    lambda graph, *_: find_host_nodes(graph),
    lambda _, factor: f"Python, framework and launch calls take {factor:g} x the time",
    "no host time was recorded",
    short="host overhead at 50 %",
    gone="Python, the framework and issuing work took no time",
    idle=LATE_HOST,
)


_KINDS_OF_TIME = {
    "loader": (
        "data",
        "waiting for the data loader",
        "the steps hold no wait for a data loader",
        "no waiting for data",
        "the next batch was always ready, so that the host ran ahead",
    ),
    "gc": (
        "gc",
        "collections of Python's garbage collector",
        "the steps hold no garbage collection",
        "no garbage collection",
        "no garbage was collected in the steps",
    ),
    "io": (
        "io",
        "writing files (checkpoints, logs)",
        "the steps write no file",
        "no file I/O",
        "no file was written or read in the steps",
    ),
    "allocation": (
        "allocation",
        "device memory allocations and frees",
        "the steps allocate no device memory from the driver",
        "no memory allocation from the driver",
        "no memory was allocated from the driver in the steps",
    ),
    "compile": (
        "compile",
        "compilation by torch.compile",
        "the steps compile nothing",
        "no compilation",
        "nothing was compiled in the steps",
    ),
    "profiler": ("profiler", "the profiler's own work", "the steps hold no work of the profiler", "no profiler overhead", ""),
}
"""Name -> kind of node, its time in words, what is said where there is none, the short name, what holds without it."""


LOADER, GC, IO, ALLOCATION, COMPILE, PROFILER = (
    build_scaling_kind(
        name,
        "0 (gone) to 10: factor on that time",
        "0",
        lambda graph, _, setting: find_nodes(graph, _KINDS_OF_TIME[setting.name][0]),
        lambda setting, factor: f"{_KINDS_OF_TIME[setting.name][1]}: {f'{factor:g} x the time' if factor else 'none'}",
        absent,
        short=short,
        gone=gone,
        idle=(f"idle_{cause}", *LATE_HOST),
    )
    for name, (cause, _, absent, short, gone) in _KINDS_OF_TIME.items()
)


GRAPH_SPACING_NS = 1_000
"""Kernel-to-kernel latency inside a CUDA graph: about 1 us (rules.md OVH-02; NVIDIA, Getting Started with CUDA Graphs)."""

_GRAPH_PHASES = ("forward", "backward", "optimizer")
_VANISHING = ("host", "launch", "profiler")
"""What a graph replay does not do. No capture holds a first cudaMalloc or the loading of a module: these stay."""


def _find_edges_to(graph: Graph, nodes: Bools, *kinds: str) -> Bools:
    return nodes[graph.dst] & np.isin(graph.edge_kind, [encode_edge_kind(kind) for kind in kinds])


def _apply_launch(graph: Graph, times: Times, context: WhatIfContext, setting: Setting) -> Times | None:
    factor = read_number(setting, 0, 1)
    # The nodes of host threads between the first and the last launch of forward, backward and optimizer of their step. Where no launch of
    # a step is known to be of these phases, of any launch
    launches = find_nodes(graph, "launch") & (graph.kernel < 0)
    phased = context.trace.ops["phase"].cast(pl.String).is_in(_GRAPH_PHASES).fill_null(False).to_numpy()
    of_phase = launches & np.append(phased, False)[graph.op]
    step = np.searchsorted(np.array(graph.begins_ns, dtype=np.int64), graph.start_ns, "right")
    told = np.zeros(graph.step_count, dtype=np.bool_)
    told[step[of_phase]] = True
    launches = np.where(told[step], of_phase, launches)
    first, last = np.full(graph.step_count, np.iinfo(np.int64).max), np.full(graph.step_count, np.iinfo(np.int64).min)
    np.minimum.at(first, step[launches], graph.start_ns[launches])
    np.maximum.at(last, step[launches], graph.start_ns[launches])
    region: Bools = (graph.lane >= 0) & (graph.start_ns >= first[step]) & (graph.start_ns <= last[step])
    if not region.any():
        return None
    if factor > 0:
        return scale_times(times, region & find_host_nodes(graph), factor)
    gone = region & find_nodes(graph, *_VANISHING) & (graph.kernel < 0)
    # The device work that `launches` start
    edges = graph.edge_kind == encode_edge_kind("launch")
    started = np.zeros(graph.kind.size, dtype=np.bool_)
    started[graph.dst[edges & gone[graph.src]]] = True
    spaced = _find_edges_to(graph, started, "stream", "event")
    silent = _find_edges_to(graph, gone, "thread", "handoff", "launch")
    times = scale_times(times, gone, 0.0)
    # a host that was always late never showed how close two kernels can follow each other: there the 1 us holds, or less where it was less
    seen = np.maximum(graph.start_ns[graph.dst] - graph.start_ns[graph.src] - graph.duration_ns[graph.src], 0)
    spacing = np.minimum(np.where(times.lag_ns > 0, times.lag_ns, seen), GRAPH_SPACING_NS)
    lag = np.where(silent, 0, np.where(spaced, spacing, times.lag_ns))
    free = np.where(silent, 0, times.free_ns)  # what nothing explains no graph takes away
    return msgspec.structs.replace(times, lag_ns=lag, free_ns=free, dropped=times.dropped | _find_edges_to(graph, gone, "queue_full"))


LAUNCH = WhatIfKind(
    name="launch",
    values="0 (CUDA graph) to 1: factor on what it costs to issue the step",
    standard="0",
    short="one CUDA graph launches all work",
    conditions={"0": "one CUDA graph issued the work of the step"},
    apply=_apply_launch,
    words=lambda setting: (
        f"Python and launch calls between the first and the last launch of the step take {factor:g} x the time"
        if (factor := read_number(setting, 0, 1))
        else "one CUDA graph issues the step: no Python and no launch calls between its first and its last launch, kernels at most 1 us "
        "apart; Python before and after, data, garbage collection, files, allocation, compilation, waits for results and waits that "
        "nothing explains stay"
    ),
    absent="no launch was recorded",
    idle=(*LATE_HOST, "idle_profiler"),
)


_ALL_SYNCS = ("0", "", "all")
_READS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero")
"""Ops that do nothing but bring a number to the host (ATen: native/Scalar.cpp, TensorProperties.cpp)."""
_CALL_SITE = re.compile(r"(?P<file>.*\.py)(?::(?P<line>\d+))?$")


def _apply_sync(graph: Graph, times: Times, context: WhatIfContext, setting: Setting) -> Times | None:
    text = setting.value
    if text in _ALL_SYNCS:
        return remove_waits(graph, times, context, None)
    if context.syncs is None or not context.syncs.height:
        return None
    # The calls whose site, 'path/file.py(line): function', is at `text`, or whose op, with or without 'aten::', or runtime call it is
    match, at_site = _CALL_SITE.match(text), pl.lit(False)
    if match is not None:
        line = rf"\({match['line']}\)" if match["line"] else r"\((?:\d+|\?)\)"
        at_site = pl.col("site").str.contains(rf"(^|[/\\]){re.escape(match['file'])}{line}").fill_null(False)
    names = decode_names(context.trace.ops["name"])
    ops = [row for row, name in enumerate(names.unique(maintain_order=True).to_list()) if name in (text, f"aten::{text}")]
    chosen = names.is_in([text, f"aten::{text}"]).arg_true().cast(pl.Int64) if ops else pl.Series([], dtype=pl.Int64)
    of_op = pl.col("op").is_in(chosen.implode()).fill_null(False)
    launches = context.syncs.filter(at_site | (pl.col("api") == text).fill_null(False) | of_op)["launch"].drop_nulls().to_numpy()
    return remove_waits(graph, times, context, (graph.launch >= 0) & np.isin(graph.launch, launches))


def remove_waits(graph: Graph, times: Times, context: WhatIfContext, chosen: Bools | None) -> Times | None:
    """Return `times` without the waits of the `chosen` nodes (None: of all); None where none of them waits."""
    waits = graph.edge_kind == encode_edge_kind("sync")
    calls = np.zeros(graph.kind.size, dtype=np.bool_)
    calls[graph.dst[waits]] = True
    calls |= find_nodes(graph, "sync")
    if chosen is not None:
        calls &= chosen
    edges = waits & calls[graph.dst]
    if not (edges.any() or times.duration_ns[calls & find_nodes(graph, "sync")].any()):
        return None
    waiting = calls.copy()
    waiting[graph.dst[edges]] = True
    # The host nodes of the reads that hold the calls `waiting`
    ops = context.trace.ops
    reads = context.make_once("reads", lambda: np.append(match_any_of(ops["name"], _READS).to_numpy(), False))
    parent = np.append(ops["parent"].fill_null(-1).to_numpy(), -1)
    inner = np.unique(graph.op[waiting])
    inner = inner[reads[inner]]
    gone = np.union1d(inner, parent[inner])  # item() and the op below it that copies
    found: Bools = find_nodes(graph, "host", "launch") & (graph.kernel < 0) & reads[graph.op] & np.isin(graph.op, gone)
    times = scale_times(times, (calls & find_nodes(graph, "sync")) | found, 0.0)
    return msgspec.structs.replace(times, dropped=times.dropped | edges)


SYNC = WhatIfKind(
    name="sync",
    values="0 (all), file.py:line, an op such as aten::item, or a call such as cudaStreamSynchronize",
    standard="0",
    short="no host-device sync",
    conditions={"0": "no call waited for the device"},
    apply=_apply_sync,
    words=lambda setting: (
        "no call waits for the device, and nothing is read for the host: it issues work as far ahead as the queue lets it"
        if setting.value in _ALL_SYNCS
        else f"the calls at '{setting.value}' do not wait for the device, and read nothing"
    ),
    absent="no such call waits for the device in the steps",
    names_places=True,
    idle=("idle_sync", *LATE_HOST),
)
