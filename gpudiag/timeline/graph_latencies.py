"""The work of the device as columns, and the normal latencies of a recording: what its own launches, streams and syncs usually take."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.arrays import Bools, Ints
from gpudiag.attribution.names import match_column
from gpudiag.model.graph import encode_node_kind
from gpudiag.model.trace import Trace
from gpudiag.timeline.launch_queue import IssuedLaunches
from gpudiag.trace.kernel_names import HOST_COPY, PEER_COPY

NEVER = np.iinfo(np.int64).min // 4
"""A moment before every recording."""

TOLERANCE_NS = 20_000
"""A wait longer than normal by more than this is a free delay, whatever is normal: a launch that was not waited for takes less (A100,
MI300X recordings: 99 % of the starts on an idle stream within 20 us of each other)."""

LEAST_TOLERANCE_NS = 5_000
"""Starts scatter by a few us around the normal latency: below this no delay is told from noise."""

TOLERANCE_TIMES = 5
"""A wait of more than this many times the normal one (between the two bounds) is a free delay."""

MOST_NORMAL_NS = 50_000
"""No normal launch latency, spacing or return is longer: what takes longer waited for something (launches onto an idle stream take 5 to
20 us on A100, H100 and MI300X recordings)."""

QUEUE_PENDING = 256
"""With fewer pieces of work issued and not over no launch call waits for a place in the queue (CUDA's holds about a thousand)."""

SURROUNDINGS = ("kernel", "copy", "graph")
"""Latencies differ between kernels, copies and memsets, and graph launches (their first kernel; the spacing within a graph)."""


class DeviceWork(NamedTuple):
    """Columns of `kernels` as arrays; -1 stands for null, for call_start and call_end NEVER."""

    start: Ints
    end: Ints
    stream: Ints
    launch: Ints
    op: Ints
    step: Ints
    kind: npt.NDArray[np.int8]
    """Code of the kind of node."""
    around: npt.NDArray[np.int8]
    """Index into SURROUNDINGS."""
    call_start: Ints
    call_end: Ints
    thread: Ints
    order: Ints
    """Rows by stream, start, end."""
    previous: Ints
    """The row before in the same stream; -1: none."""
    reached: Ints
    """The latest end in the stream before this row; NEVER: none."""


class NormalLatencies(NamedTuple):
    """Usual times in ns; the arrays go by SURROUNDINGS."""

    launch: Ints
    """From the end of the call to the start of its work on a stream that had nothing to do."""
    spacing: Ints
    """From work to work of a stream, both issued in time."""
    call: int
    """A launch call."""
    sync_return: int
    """From the end of the work to the begin of the sync's own time at its end."""
    sync_call: int
    """A sync that had nothing to wait for."""


def estimate_tolerance(normal: Ints) -> Ints:
    """Return by how much a wait may be longer than `normal` and still be noise, in ns."""
    found: Ints = np.clip(TOLERANCE_TIMES * normal, LEAST_TOLERANCE_NS, TOLERANCE_NS)
    return found


def estimate_usual(values: Ints) -> int:
    """Return the usual one of `values` in ns: the mean of those that are no free delay against it, 0 where there are none.

    The mean, not the median: a step of a thousand syncs takes a thousand times the mean, and waits have a long tail.
    """
    values = values[values <= MOST_NORMAL_NS]
    if not len(values):
        return 0
    found = int(np.median(values))
    for _ in range(3):
        near = values[values <= found + estimate_tolerance(np.array(found))]
        found = int(near.mean()) if len(near) else found
    return found


def accumulate_maximum(values: Ints, same: Bools) -> Ints:
    """Return the running maximum of `values`, begun anew where one is not of the `same` group as the one before it."""
    if not len(values):
        return values
    base = int(values.min())
    lift = np.append(0, np.cumsum(~same)) * (int(values.max()) - base + 1)  # lifts each group above the one before
    found: Ints = np.maximum.accumulate(values - base + lift) - lift + base
    return found


def read_device_work(trace: Trace) -> DeviceWork:
    """Return the device work of `trace` (the analysed device alone)."""
    kernels = trace.kernels
    columns = {name: kernels[name].fill_null(-1).to_numpy() for name in ("start_ns", "end_ns", "stream", "launch", "op", "step")}
    start, end, stream, launch = columns["start_ns"], columns["end_ns"], columns["stream"], columns["launch"]
    order = np.lexsort((end, start, stream))
    previous, reached = np.full(len(end), -1, dtype=np.int64), np.full(len(end), NEVER, dtype=np.int64)
    same = stream[order][1:] == stream[order][:-1]
    previous[order[1:]] = np.where(same, order[:-1], -1)
    reached[order[1:]] = np.where(same, accumulate_maximum(end[order], same)[:-1], NEVER)
    calls = [np.append(trace.launches[name].to_numpy(), NEVER) for name in ("start_ns", "end_ns")]
    thread = np.append(trace.launches["thread"].fill_null(-1).to_numpy(), -1)
    copies = (kernels["kind"] != "kernel").to_numpy()
    around = np.where(kernels["replay"].to_numpy(), 2, np.where(copies, 1, 0)).astype(np.int8)
    # The kind of node of each kernel: copy for host <-> device, communication for collectives, else kernel
    host_copy = (pl.col("kind") == "memcpy") & match_column("name", HOST_COPY) & ~match_column("name", PEER_COPY)
    kind = (
        pl.when(pl.col("collective").fill_null(False))
        .then(encode_node_kind("communication"))
        .when(host_copy)
        .then(encode_node_kind("copy"))
        .otherwise(encode_node_kind("kernel"))
    )
    found: npt.NDArray[np.int8] = kernels.select(kind.cast(pl.Int8)).to_series().to_numpy()
    return DeviceWork(
        start, end, stream, launch, columns["op"], columns["step"], found, around,
        calls[0][launch], calls[1][launch], thread[launch], order, previous, reached,
    )  # fmt: skip


def estimate_normal_latencies(work: DeviceWork, syncs: pl.DataFrame, calls: IssuedLaunches, queue_limit: int) -> NormalLatencies:
    """Return the normal latencies of the recording; a kind of which nothing was seen takes the figure of kernels."""
    linked = work.launch >= 0
    first = np.zeros(len(linked), dtype=bool)
    by_start = np.lexsort((work.start, work.launch))
    first[by_start[np.unique(work.launch[by_start], return_index=True)[1]]] = True
    met_idle = linked & first & (work.reached <= work.call_start)
    delay = np.maximum(work.start - work.call_end, 0)
    launch = _estimate_by_surroundings(delay, work.around, met_idle)
    late = work.call_end + launch[work.around] > work.reached
    same_launch = (work.previous >= 0) & linked & (work.launch == work.launch[work.previous])
    queued = (work.reached > NEVER) & (work.start >= work.reached) & ((linked & ~late) | same_launch)
    pair = np.where(same_launch, 2, np.maximum(work.around % 2, np.where(work.previous >= 0, work.around[work.previous] % 2, 0)))
    spacing = _estimate_by_surroundings(work.start - work.reached, pair, queued)
    lengths = calls.end - calls.start
    ahead = (count_pending(work, calls.start) >= QUEUE_PENDING) | calls.are_near(queue_limit)
    ahead |= np.isin(calls.row, syncs["launch"].drop_nulls().to_numpy())  # a copy that waits for its stream takes as long as the wait
    call = estimate_usual(lengths if ahead.all() else lengths[~ahead])
    # A sync call by those that found their work over, else at most what the quickest return took
    kernel = syncs["kernel"].fill_null(-1).to_numpy()
    start, end = syncs["start_ns"].to_numpy(), syncs["end_ns"].to_numpy()
    over = np.append(work.end, NEVER)[kernel]
    waited = (over > start) & (over <= end)
    free = ~waited & (over <= start)
    returns = (end - over)[waited]
    lowest = int(np.percentile(returns, 5)) if len(returns) else 0
    sync_call = int(np.median((end - start)[free])) if free.any() else lowest
    if not len(returns):
        return NormalLatencies(launch, spacing, call, 0, sync_call)
    sync_call = min(sync_call, lowest)
    return NormalLatencies(launch, spacing, call, estimate_usual(np.maximum(returns - sync_call, 0)), sync_call)


def count_pending(work: DeviceWork, moments: Ints) -> Ints:
    """Return how many pieces of work had been issued and were not over at each moment."""
    linked = work.launch >= 0
    issued = np.searchsorted(np.sort(work.call_end[linked]), moments, "right")
    found: Ints = issued - np.searchsorted(np.sort(work.end[linked]), moments, "right")
    return found


def _estimate_by_surroundings(values: Ints, around: Ints | npt.NDArray[np.int8], chosen: Bools) -> Ints:
    found = [
        estimate_usual(values[chosen & (around == code)]) if (chosen & (around == code)).any() else -1 for code in range(len(SURROUNDINGS))
    ]
    everything = max(found[0], 0) if found[0] >= 0 else estimate_usual(values[chosen])
    return np.array([everything if value < 0 else value for value in found], dtype=np.int64)
