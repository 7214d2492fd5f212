"""Facts about how much of the memory a run needs, what could be had otherwise, and data that lives in host memory (offload).

Also forward work that is done again, or that no backward pass needs.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.attribution.autograd import find_autograd_nodes
from gpudiag.attribution.names import match_column, match_names
from gpudiag.attribution.step_patterns import find_training_thread
from gpudiag.facts.hardware_state import NO_CAPACITY, NO_COUNTERS, NO_RESERVE, read_memory
from gpudiag.facts.host_time import READ_OPS, measure_plain_ns, scale_to_recorded_ns
from gpudiag.facts.idle_time import without_loader_ns
from gpudiag.facts.input_pipeline import find_pageable_copies, loader_wait_ns, pinned_copy_ns
from gpudiag.facts.loops import extend_ops, find_outermost_ops
from gpudiag.facts.needless_work import find_work_below
from gpudiag.facts.registry import (
    NotKnownError,
    fact,
    fact_of,
    gpu_only,
    kernel_share,
    kernel_time,
    require,
    require_known,
    with_share,
)
from gpudiag.facts.telemetry import read_peak_share
from gpudiag.facts.window import Window, cache_by_window, copies

USABLE = 0.92
"""Part of the device's memory that a batch may fill: the rest goes to the context, workspaces and fragments (rules.md CAP-01)."""

GROWING_USES = ("activations", "forward_held", "inputs", "temporary")
"""Uses of memory that grow with the batch."""

MOST_GROWTH = 1024.0
"""More than this is nobody's batch; it keeps a tiny program's figure readable."""


NO_USES = "what the memory is used for was not recorded"

NOTICED = 0.01
"""Share of the peak below which a use is not named."""


def allocated_peak_share(window: Window) -> float:
    """Most memory that tensors used at a time, in the whole run, over the memory of the device (max_memory_allocated).

    What the allocator keeps in reserve does not count.
    """
    window.require_accelerator()
    found = read_memory(window)
    capacity = require_known(found.capacity_bytes or None, NO_CAPACITY)
    return max(found.peak_bytes, found.run_peak_bytes or 0) / capacity


def memory_in_use_share(window: Window) -> float:
    """Most memory in use over what there is: allocated_peak_share, else what the driver counts of all processes; CPU: resident memory."""
    if window.on_cpu:
        return read_peak_share(window, "rss_bytes", "host_memory_bytes")
    try:
        return allocated_peak_share(window)
    except NotKnownError:
        return read_peak_share(window, "mem_used_bytes", "memory_bytes")


def batch_growth_room(window: Window) -> float:
    """How many times as large the batch could be until 92 % of the memory is in use; what does not grow with it is counted once."""
    # M(b) = fixed + b x per sample (rules.md CAP-01); where the uses of memory are not told all of it is taken to grow, so it is less
    used, found, growing = memory_in_use_share(window), window.analysis.memory, 1.0
    if not window.on_cpu and found is not None and found.peak_bytes:
        known = {kind: size for kind, size in found.by_category.items() if kind not in ("before_recording", "unknown")}
        if 2 * sum(known.values()) >= found.peak_bytes:
            dark = found.peak_bytes - sum(known.values())
            growing = (sum(known.get(kind, 0) for kind in GROWING_USES) + dark) / found.peak_bytes
    return min(max(1.0, 1 + (USABLE - used) / max(used * growing, 1e-9)), MOST_GROWTH)


def memory_uses(window: Window) -> str:
    """What the memory at its peak is used for: the largest uses with their share of it."""
    found = read_memory(window)
    ranked = sorted((item for item in found.by_category.items() if item[1] >= NOTICED * found.peak_bytes), key=lambda item: -item[1])[:4]
    require(bool(ranked), NO_USES)
    return ", ".join(f"{kind.replace('_', ' ')} {100 * size / found.peak_bytes:.0f} %" for kind, size in ranked)


def measure_reserve_shares(window: Window) -> tuple[float, float]:
    """Return what the allocator had reserved at its peak over the memory of the device; and of it what tensors did not use at theirs."""
    window.require_accelerator()
    found = read_memory(window)
    if found.reserved_peak_bytes is None or not found.capacity_bytes:
        raise NotKnownError(NO_RESERVE)
    unused = max(0, found.reserved_peak_bytes - max(found.peak_bytes, found.run_peak_bytes or 0))
    return found.reserved_peak_bytes / found.capacity_bytes, unused / found.capacity_bytes


def find_repeated_work(window: Window) -> pl.DataFrame:
    """Return the kernels that repeat forward work in the backward pass; raises NotKnownError where no backward pass was seen."""
    work = window.work()
    require((work["phase"] == "backward").any(), "no backward pass was seen in the analysed steps")
    repeated = window.analysis.trace.ops.filter(pl.col("recompute").fill_null(False))["id"]
    return work.filter(pl.col("call").is_in(repeated.implode()))


@cache_by_window
def find_unwalked_ops(window: Window) -> pl.Series:
    """Return the outermost forward ops that made nodes of autograd which no backward pass ran, and those that make none between them.

    With gradients on an op notes the number that the next node will get, and a node takes it and counts on (attribution.autograd). So an
    op at the top of its thread made the nodes from its own number up to that of the next such op. What lies within a pass may lead it by
    its values (the nearest code of a codebook): there only what the host reads counts. Behind the last backward pass nothing is known.
    """
    trace, nodes = window.analysis.trace, pl.Series(find_autograd_nodes(window.recorded_ops), dtype=pl.Boolean)
    require(nodes.any(), "no backward pass was seen in the recording")
    starts = np.sort(trace.ops["start_ns"].filter(nodes).to_numpy())
    walked = np.unique(trace.ops["sequence"].filter(nodes).drop_nulls().to_numpy())
    top = (pl.col("parent").fill_null(-1) < 0) & ~nodes & (pl.col("thread") == find_training_thread(trace))
    forward = top & pl.col("phase").is_in(["forward", "other"]) & (pl.col("start_ns") < starts[-1])
    roots = trace.ops.filter(forward).drop_nulls("sequence").sort("start_ns")
    begin = roots["sequence"].to_numpy()
    until = np.append(begin, begin[-1:])[1:]
    ran = np.searchsorted(walked, until) > np.searchsorted(walked, begin)
    used = pl.when(pl.Series(until > begin)).then(pl.Series(ran))
    unused = ~(used.forward_fill().fill_null(True) | used.backward_fill().fill_null(True))
    roots = roots.select("id", "start_ns", used=used, unused=unused, part=used.fill_null(False).cum_sum())
    # the parts between ops that are used: whether a backward pass or a read lies in each
    limits = np.concatenate([[-1], roots.filter("used")["start_ns"].to_numpy(), starts[-1:]])
    reads = np.sort(trace.ops.filter(pl.col("name").is_in(READ_OPS))["start_ns"].to_numpy())
    apart = np.diff(np.searchsorted(starts, limits)) + np.diff(np.searchsorted(reads, limits)) > 0
    apart[0] = True  # before the first pass
    return roots.filter("unused", pl.Series(apart[roots["part"].to_numpy()], dtype=pl.Boolean))["id"]


def find_unwalked_work(window: Window) -> pl.DataFrame:
    """Return the kernels of find_unwalked_ops."""
    return find_work_below(window, window.recorded_ops["id"].is_in(find_unwalked_ops(window).implode()).to_numpy())


def without_unwalked_ns(window: Window) -> float:
    """Time saved without such ops: replayed, else the time that only they fill; on a CPU with what the program does between them."""
    outermost, saved_ns = find_outermost_ops(window), window.saving_ns(find_unwalked_work(window), pl.lit(0.0))
    stretches = spans.build_spans(extend_ops(outermost, outermost["id"].is_in(find_unwalked_ops(window).implode())))
    return max(saved_ns, scale_to_recorded_ns(window, measure_plain_ns(window, stretches))) if window.on_cpu else saved_ns


LARGE_BYTES = 1 << 20
"""Copies below 1 MiB are scalars, indices and batches of small samples, not offloaded tensors (heuristic)."""

_TO_DEVICE, _TO_HOST = r"HtoD|Host To Device|HOST_TO_DEVICE", r"DtoH|Device To Host|DEVICE_TO_HOST"
find_large_copies = copies(f"{_TO_DEVICE}|{_TO_HOST}", least_bytes=LARGE_BYTES)

_SAMPLING_FRAMES = (
    r"torch_geometric[/.](sampler|loader[/.](neighbor|node|link|hgt|ibmb|cluster|graph_saint|shadow|random_node))"
    r"|(^|[/.])dgl[/.](dataloading|sampling)"
)
_SAMPLING_OPS = r"^(torch_sparse|pyg|dgl)::.*(sample|saint|ego_|random_walk|cluster)"


def offloaded_bytes_per_step(window: Window) -> float:
    """Bytes that travel both ways between host and device in an analysed step, in copies of 1 MiB or more: the lesser of both directions.

    Batches go one way only; offloaded activations, gradients and states go out and come back.
    """
    require(window.steps.height > 0, "no complete step was recorded")
    ways = [float(copies(way, least_bytes=LARGE_BYTES)(window)["bytes"].sum()) for way in (_TO_DEVICE, _TO_HOST)]
    return min(ways) / window.steps.height


def host_optimizer_ns(window: Window) -> int:
    """Return the idle time of the device in ns during optimizer steps: with an optimizer on the CPU, the time that it takes alone."""
    window.require_accelerator()
    marks = window.analysis.trace.marks.filter(match_column("name", r"^Optimizer\.step#"))
    require(marks.height > 0, "no optimizer step was seen in the window")
    return spans.measure_overlap(spans.build_spans(marks), window.idle_spans())


def offload_ns(window: Window) -> float:
    """What offloading costs at most: time that copies of 1 MiB or more between host and device alone fill and, where optimizer steps were
    seen, idle time of the device during these."""
    try:
        alone = float(host_optimizer_ns(window))
    except NotKnownError:
        alone = 0.0
    return window.exposed_ns(find_large_copies(window)) + alone


def without_offload_ns(window: Window) -> float:
    """Part of offload_ns that can go: what pinned memory saves of the copies, what other work can hide of the rest, and the optimizer's."""
    exposed = window.exposed_ns(find_large_copies(window))
    pageable = find_pageable_copies(window)
    try:
        saved = min(max(float(pageable["time_ns"].sum()) - pinned_copy_ns(window), 0.0), exposed)
    except NotKnownError:  # the link's rate
        saved = float(exposed if pageable.height else 0)
    alone = offload_ns(window) - exposed
    return saved + min(exposed - saved, max(window.wall_ns - exposed - alone, 0.0)) + alone


def neighbours_sampled(window: Window) -> bool:
    """Whether batches are cut out of one graph with PyTorch Geometric or DGL, told by ops and Python frames; not small graphs joined."""
    trace = window.analysis.trace
    if match_names(trace.ops["name"], _SAMPLING_OPS).any() or match_names(trace.frames["name"], _SAMPLING_FRAMES).any():
        return True
    packages = manifest.program.packages if (manifest := window.analysis.manifest) and manifest.program else {}
    absent = bool(packages) and not {"torch-geometric", "dgl"} & set(packages)
    require(absent or trace.frames.height > 0, "whether neighbours are sampled is not in the trace: record it with Python stacks")
    return False


# fmt: off
FACTS = (
    fact_of(allocated_peak_share, "share"),
    fact_of(memory_in_use_share, "share"),
    fact_of(batch_growth_room, "ratio"),
    fact_of(memory_uses, "text"),
    fact("largest_memory_use", "text", "Name of the use that takes most memory at the peak: 'activations', 'optimizer_state', "
         "'parameters', ...",
         lambda window: max((size, use) for use, size in require_known(
         read_memory(window).by_category or None, NO_USES).items())[1]),
    fact("out_of_memory_errors", "count", "Times that the allocator ran out of memory, since the process began (num_ooms).",
         gpu_only(lambda window: require_known(read_memory(window).ooms, NO_COUNTERS))),
    fact("unused_reserve_share", "share", "Memory that the allocator had reserved at its peak beyond what tensors used at theirs, over "
         "the memory of the device.", lambda window: measure_reserve_shares(window)[1]),
    fact("reserved_share", "share", "Memory that the allocator had reserved at its peak over the memory of the device.",
         lambda window: measure_reserve_shares(window)[0]),
    kernel_share("recompute_share", "Time in forward work that the backward pass repeats (activation checkpointing)", find_repeated_work),
    fact("without_recompute_ns", "ns", "Time saved if no forward work was repeated: from the replay, else the time that only it fills.",
         lambda window: window.saving_ns(find_repeated_work(window), pl.lit(0.0))),
    *kernel_time("unwalked", "Time in forward ops whose part of autograd's graph no backward pass ran: validation, metrics, statistics, a "
         "pass for its values", find_unwalked_work),
    fact_of(without_unwalked_ns, "ns"),
    fact_of(offloaded_bytes_per_step, "B"),
    *with_share(offload_ns, most=1.0),
    fact_of(without_offload_ns, "ns"),
    fact_of(neighbours_sampled, "bool"),
    fact("feeding_share", "share", "Share of the analysed time that waits for batches, or for their copies to the device: "
         "loader_wait_share and exposed copies.",
         lambda window: (loader_wait_ns(window) / window.wall_ns
                         + window.analysis.breakdown.buckets_ns.exposed_copy / window.wall_ns)),
    fact("without_feeding_ns", "ns", "Time saved if the next batch lay on the device: without_loader_ns and the copies that nothing hides.",
         lambda window: without_loader_ns(window) + window.analysis.breakdown.buckets_ns.exposed_copy),
)
# fmt: on
