"""The launch queue: how far the host runs ahead of the device, launch delay, depth, and the depth at which launches block. And the host
calls that wait for the device: what each waited for, for how long, and who wrote it.

What blocks (CUDA Runtime API, "API synchronization behavior"; HIP runtime API): every *Synchronize, plain cudaMemcpy and ROCm's
hipMemcpyWithStream; cudaMemcpyAsync from or to pageable memory where it does not return before the copy is over. Its direction alone does
not tell: small copies from pageable memory are staged and return at once. cudaMalloc and cudaFree are allocation, cudaEventQuery and
cudaStreamWaitEvent do not wait.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from gpudiag.arrays import Bools, Ints
from gpudiag.attribution import intervals
from gpudiag.attribution.call_sites import Sites, find_frame_threads, find_user_frames
from gpudiag.attribution.names import decode_column, decode_names, match_names
from gpudiag.attribution.nesting import find_innermost, find_nearest, nest, null_missing
from gpudiag.attribution.steps import assign_steps
from gpudiag.model.graph import QUEUE_LIMIT
from gpudiag.model.timeline import QueueStats
from gpudiag.model.trace import Trace, build_empty_table, build_table_schema
from gpudiag.trace import kernel_names

CURVE_POINTS = 512

LATENCY_FACTOR = 1.5
"""A kernel counts as waited for up to this many times the median latency of kernels that met an idle device: half of those lie above the
median, few far above it (90th percentile below twice the median in most of the real traces that the tests look at)."""

LEAST_LATENCY_NS, MOST_LATENCY_NS = 5_000, 50_000
"""Bounds of the normal latency from launch call to kernel: no GPU starts one in less than about 5 us (lowest twentieth in traces of V100
to H100 and MI300X), and above 50 us something else was in the way."""


def measure_queue(trace: Trace, steps: pl.DataFrame, window: intervals.Spans) -> QueueStats | None:
    """Return how far the host ran ahead within `window` (the analysed `steps`); None where no launch of the device's work was recorded.

    `trace` at stage 'link' with the kernels of the analysed device alone. Kernels that a graph launch started count for the depth; for
    the delay only the first one does. Work whose launch was not recorded counts for the depth from its start.
    """
    kernels = trace.kernels.select("kind", "launch", "start_ns", "end_ns").filter(pl.col("kind") != "cpu")
    # The work that has a launch record. A call that returned after its work had begun had issued it by then
    calls = trace.launches.select(pl.col("id").alias("launch"), pl.col("start_ns").alias("called"), pl.col("end_ns").alias("issued"))
    frame = kernels.select("launch", "start_ns", "end_ns").join(calls, on="launch", how="inner")
    frame = frame.sort("start_ns", "launch")
    issued = pl.min_horizontal("issued", "start_ns").clip(upper_bound=pl.col("end_ns"))
    columns = frame.select("called", issued, "start_ns", "end_ns", "launch")
    called, given, start, end, launch = (columns[name].to_numpy() for name in columns.columns)
    inside = intervals.measure_covered(window, called, called + 1) > 0 if len(called) else np.zeros(0, dtype=bool)
    if not len(window) or not inside.any():
        return None
    firsts = np.zeros(len(launch), dtype=bool)
    firsts[np.unique(launch, return_index=True)[1]] = True
    first = firsts & inside
    delay = np.maximum(start - given, 0)[first]
    count = max(int(steps["analysed"].sum()), 1)
    # (moments, depth from each on): work issued and not yet over. The first moment lies before all work, at depth 0
    unlinked = kernels.filter(pl.col("launch").is_null())
    ups = np.concatenate((given, unlinked["start_ns"].to_numpy()))
    downs = np.concatenate((end, unlinked["end_ns"].to_numpy()))
    moments, place = np.unique(np.concatenate((ups, downs)), return_inverse=True)
    change = np.bincount(place[: len(ups)], minlength=len(moments)) - np.bincount(place[len(ups) :], minlength=len(moments))
    before = np.iinfo(np.int64).min // 2
    t, depth = (np.concatenate(([before], moments)), np.concatenate(([0], np.cumsum(change))))
    lengths = intervals.measure_covered(window, t, np.append(t[1:], np.iinfo(np.int64).max // 2))  # how long each depth lasts in it
    by_depth = np.argsort(depth, kind="stable")
    lasted = np.cumsum(lengths[by_depth])
    low, middle, high = (int(value) for value in np.percentile(delay, [10, 50, 90], method="nearest"))
    at, curve = _draw_curve(t, depth, window)
    # Which work began within the normal latency of its call, so that the device had been waiting for it
    latency = start - called
    # The latest end of the work before each row (rows by start); the smallest integer for the first one
    reached: Ints = np.concatenate(([np.iinfo(np.int64).min], np.maximum.accumulate(end)[:-1]))[: len(end)]
    met_idle = (reached <= called) & firsts
    normal = int(np.median(latency[met_idle])) if met_idle.any() else LEAST_LATENCY_NS
    soon: Bools = latency <= np.clip(LATENCY_FACTOR * normal, LEAST_LATENCY_NS, MOST_LATENCY_NS)
    return QueueStats(
        launches_per_step=int(first.sum()) / count,
        kernels_per_step=int(inside.sum()) / count,
        delay_median_ns=middle,
        delay_p10_ns=low,
        delay_p90_ns=high,
        depth_median=float(depth[by_depth][np.searchsorted(lasted, lasted[-1] / 2)]),
        depth_max=int(depth[lengths > 0].max(initial=0)),
        empty_share=float(lengths[depth == 0].sum()) / intervals.measure_spans(window),
        host_bound_share=float(soon[inside].mean()),
        t_ns=at,
        depth=curve,
    )


def _draw_curve(t: Ints, depth: Ints, window: intervals.Spans) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return (moments from the start of the window, mean depth to the next one), at most CURVE_POINTS."""
    first, last = int(window[0, 0]), int(window[-1, 1])
    edges = np.unique(np.linspace(first, last, min(CURVE_POINTS, last - first) + 1).astype(np.int64))
    # the integral of the depth up to any moment, by the pieces between its changes
    own = np.clip(t, first, last)
    areas = np.concatenate(([0.0], np.cumsum(depth[:-1] * np.diff(own).astype(np.float64))))
    row = np.searchsorted(own, edges, side="right") - 1
    upto = areas[row] + depth[row] * (edges - own[row])
    mean = np.diff(upto) / np.diff(edges)
    return tuple(int(moment) for moment in edges[:-1] - first), tuple(round(float(value), 2) for value in mean)


LEAST_CALLS = 16
"""So many calls must reach a depth, and wait there, to be held up by a queue of that depth."""

LEAST_DEPTH = 8
"""A queue is longer than this: calls that wait with less ahead of them wait for something else."""

PLATEAU_SHARE, PLATEAU = 0.03, 2
"""Calls within 3 % of the depth, or two launches, count as at it: the clocks of host and device differ by a few launches."""

BLOCKED_TIMES = 3
"""Calls at a full queue take at least this many times what calls take far from it."""

BLOCKED_SHARE = 0.9
"""Of the calls that take so long at least this part stands at the full queue: what else holds calls up does so at any depth."""

LAUNCH_CALL_NS = 5_000
"""What a launch call takes on current hosts (3 to 8 us at the median of recordings from V100 to MI300X)."""

FREED_NS = 10_000
"""A call that was held up returns within this time of the begin of some work, which freed its place."""


class IssuedLaunches(NamedTuple):
    """The calls that start work, by row of `launches`, and what stood in the queue when each began."""

    row: Ints
    start: Ints
    end: Ints
    begun: Ints
    """When the first work of each began, at the earliest when the call was over."""
    ahead: Ints
    """Launches that had been issued and had not begun when the call began."""

    def are_near(self, limit: int) -> Bools:
        """Return which calls met a queue that was as good as full."""
        found: Bools = self.ahead >= limit - max(PLATEAU, int(PLATEAU_SHARE * limit))
        return found


def find_issued_launches(launch: Ints, start: Ints, call_start: Ints, call_end: Ints) -> IssuedLaunches:
    """Return the launches of the work (`launch`: row of launches or -1, `start`: of the work; both by work, the calls' times by row)."""
    linked = np.flatnonzero(launch >= 0)
    row, place = np.unique(launch[linked], return_inverse=True)
    first = np.full(len(row), np.iinfo(np.int64).max)
    np.minimum.at(first, place, start[linked])
    begin, end = call_start[row], call_end[row]
    begun = np.maximum(first, end)
    ahead = np.searchsorted(np.sort(end), begin, "right") - np.searchsorted(np.sort(begun), begin, "right")
    return IssuedLaunches(row, begin, end, begun, ahead)


def estimate_queue_limit(calls: IssuedLaunches, blocking: Ints) -> int:
    """Return how many launches can stand in the queue: the depth at which calls block, else QUEUE_LIMIT or what was seen beyond it.

    `blocking`: rows of launches that waited for the device for another reason (copies from pageable memory). A queue is short where
    enough calls reach its depth, none goes beyond, and most calls there take several times the usual and return as some work begins.
    Usual is what calls far from that depth take; where most calls stand at it, hardly any is far, or the queue was full before the
    recording began.
    """
    free = ~np.isin(calls.row, blocking)
    ahead, length = calls.ahead[free], (calls.end - calls.start)[free]
    if len(ahead) < 2 * LEAST_CALLS:
        return QUEUE_LIMIT
    top = int(np.sort(ahead)[-LEAST_CALLS])
    full = calls.are_near(top)[free]
    far = ahead < top / 2
    usual = float(np.median(length[far])) if far.sum() >= LEAST_CALLS else np.inf
    usual = min(usual, LAUNCH_CALL_NS) if full.mean() > 0.5 else usual
    # All calls at the depth wait; or, where places come free many at a time, some do, none elsewhere is so long, and they hold most time
    waited = length > BLOCKED_TIMES * usual
    some = (waited & full).sum() >= max(LEAST_CALLS, BLOCKED_SHARE * waited.sum()) and length[waited & full].sum() > length.sum() / 2
    if top >= LEAST_DEPTH and (some or np.median(length[full]) > BLOCKED_TIMES * usual):
        held_up = full & waited if some else full
        begun, end = np.sort(calls.begun), calls.end[free][held_up]
        since = end - np.append(begun, 0)[np.searchsorted(begun, end, "right") - 1]
        if np.mean((since >= 0) & (since <= FREED_NS)) > 0.5:
            return top
    return max(QUEUE_LIMIT, int(calls.ahead.max(initial=0)))


CLOCK_NS = 2_000
"""How far the end of the work may lie behind the return of the call that waited for it: files of whole microseconds, and the conversion
between the clocks of device and host, are off by up to about this much."""

MAX_STEPS_BACK = 64
"""Pieces of work that are tried, latest end first, to find the one that a call of unknown stream waited for."""

_BLOCKING_COPY = r"(?i)^(cuda|hip)Memcpy(2D|3D)?$|^hipMemcpyWithStream$|^cuMemcpy(HtoD|DtoH)(_v2)?$"
_ASYNC_COPY = r"(?i)^(cuda|hip|cu)Memcpy\w*Async(_v2)?$"
_WHOLE_DEVICE = r"(?i)^(cuda|hip)DeviceSynchronize$|^(cu|hip)CtxSynchronize$"
_ONE_STREAM = r"(?i)StreamSynchronize$"
_PINNED = r"(?i)pinned"


def find_syncs(trace: Trace, steps: pl.DataFrame, sites: Sites | None = None) -> pl.DataFrame:
    """Return the table `syncs` of `trace` (stage 'link'), in time order; cost_ns is null until the idle time has been explained.

    A call that found its work over has waited_ns 0. The wait with which the profiler itself ends a recording is left out.
    """
    calls = _find_blocking_calls(trace)
    waits = calls.filter(pl.col("api").str.contains(_WHOLE_DEVICE))
    if waits.height:
        # The profiler's own: the last wait for the whole device, after all other work and every step (torch/csrc/profiler: prepareTrace
        # and stop wait for the device). Where no step was marked, the one step reaches to the trace's end
        last, launches = waits.row(-1, named=True), trace.launches.select(pl.col("id").alias("launch"), pl.col("start_ns").alias("t"))
        issued = trace.kernels.select("launch").join(launches, on="launch")["t"]
        marked = steps.filter(pl.col("name") != "whole trace")
        inside = (marked["start_ns"] <= last["start_ns"]) & (last["start_ns"] < marked["end_ns"])
        if not (issued > last["start_ns"]).any() and not inside.any():
            calls = calls.filter(pl.col("launch") != last["launch"])
    # Without those inside another one of the same thread (the driver's call inside the runtime's)
    reached = pl.col("end_ns").cum_max().shift(1).over(pl.col("thread").fill_null(-1))
    calls = calls.filter((reached.is_null() | (pl.col("end_ns") > reached)).fill_null(True))
    if not calls.height:
        return build_empty_table("syncs")
    kernel = _find_waited_for(calls, trace.kernels, trace.launches)
    ends = np.append(trace.kernels["end_ns"].to_numpy(), 0)[kernel]
    start, end = calls["start_ns"].to_numpy(), calls["end_ns"].to_numpy()
    waited = np.where(kernel >= 0, np.clip(np.minimum(ends, end) - start, 0, None), 0)
    # For each op the outermost aten:: op at or above it, else the outermost op; one more row at the end is -1. That is what the user's
    # line called: aten::item above aten::_local_scalar_dense, aten::to above aten::copy_
    parent = trace.ops["parent"].fill_null(-1).to_numpy()
    aten = match_names(trace.ops["name"], "^aten::").to_numpy()
    above = np.append(find_nearest(parent, aten), -1)[parent]
    top_aten, root = find_nearest(parent, aten & (above < 0)), find_nearest(parent, parent < 0)
    top = np.append(np.where(top_aten >= 0, top_aten, root), -1)[calls["op"].fill_null(-1).to_numpy()]
    # The user's line: that of the call's op, else that of the Python frames open at its start
    nothing = pl.repeat(None, calls.height, dtype=pl.String, eager=True)
    by_op = nothing if sites is None else sites.site.gather(calls["op"])
    direct = _find_frame_sites(calls, trace) if trace.frames.height else nothing
    found = calls.with_columns(
        id=pl.int_range(calls.height, dtype=pl.Int64),
        op=null_missing(top),
        kernel=null_missing(np.where(waited > 0, kernel, -1)),
        waited_ns=pl.Series(waited, dtype=pl.Int64),
        cost_ns=pl.lit(None, dtype=pl.Int64),
        step=assign_steps(steps, start),
        site=pl.coalesce(pl.lit(by_op), pl.lit(direct)),
    )
    return found.select(list(build_table_schema("syncs")))


def _find_blocking_calls(trace: Trace) -> pl.DataFrame:
    """Return the launches that wait, in time order, with `api` as text and `copy`: the row of the copy that a call made itself."""
    names = trace.launches["api"]
    synchronous = match_names(names, kernel_names.SYNC_CALL) | match_names(names, _BLOCKING_COPY)
    copying = match_names(names, _ASYNC_COPY) | match_names(names, _BLOCKING_COPY)
    calls = trace.launches.with_columns(api=decode_names(names), synchronous=synchronous).filter(synchronous | copying)
    copies = trace.kernels.filter((pl.col("kind") == "memcpy") & pl.col("launch").is_not_null()).unique("launch", keep="first")
    made = copies.select(
        pl.col("launch").alias("id"),
        pl.col("id").alias("copy"),
        pl.col("start_ns").alias("copy_start_ns"),
        pl.col("end_ns").alias("copy_end_ns"),
        decode_column("name").alias("copy_name"),
    )
    calls = calls.join(made, on="id", how="left", maintain_order="left")
    name = pl.col("copy_name")
    # Whether an asynchronous call waited for its copy: over within the call, or, to the device, at least half over (staging)
    half = (pl.col("copy_start_ns") + pl.col("copy_end_ns")) // 2
    to_device = name.str.contains(r"(?i)HtoD|HostToDevice|H2D")
    blocked = pl.col("synchronous") | (
        (name.str.contains(kernel_names.HOST_COPY) & ~name.str.contains(_PINNED))
        & ((pl.col("copy_end_ns") <= pl.col("end_ns")) | (to_device & (half <= pl.col("end_ns"))))
    ).fill_null(False)
    return calls.filter(blocked).rename({"id": "launch"}).sort("start_ns", "launch")


def _find_waited_for(calls: pl.DataFrame, kernels: pl.DataFrame, launches: pl.DataFrame) -> Ints:
    """Return the row of the work whose end each call waited for, -1 where none ended in it."""
    own = calls["copy"].fill_null(-1).to_numpy()
    # The work by time of issue; work without a launch record was issued before the window
    made = launches.select(pl.col("id").alias("launch"), pl.col("start_ns").alias("issued_ns"))
    work = kernels.select(pl.col("id").alias("row"), "kind", "launch", "stream", "start_ns", "end_ns").filter(pl.col("kind") != "cpu")
    work = work.join(made, on="launch", how="left", maintain_order="left")
    work = work.with_columns(pl.col("issued_ns").fill_null(np.iinfo(np.int64).min)).sort("issued_ns", "start_ns", "row")
    if not work.height:
        return own
    limit = calls["end_ns"].to_numpy() + CLOCK_NS
    found = np.where(calls["api"].str.contains(_WHOLE_DEVICE).to_numpy(), _find_last_issued(calls, work, None), -1)
    # The stream of the copy that the same thread issued last before each call, under the same op; null where there is none. The framework
    # waits for the stream on which it has just put a copy (aten::_local_scalar_dense, aten::copy_)
    copies = kernels.filter(pl.col("kind") == "memcpy").select("launch", "stream").drop_nulls("launch").unique("launch", keep="first")
    issued = launches.join(copies, left_on="id", right_on="launch", how="inner").select("thread", "start_ns", "stream", "op")
    asked = calls.select("thread", "start_ns", pl.col("op").alias("waiting_op")).with_row_index("place").sort("start_ns")
    by_thread = asked.join_asof(
        issued.sort("start_ns"), on="start_ns", by="thread", strategy="backward", allow_exact_matches=False, check_sortedness=False
    )
    same = pl.col("op").eq_missing(pl.col("waiting_op")) & pl.col("op").is_not_null()
    hinted = calls.with_columns(stream=by_thread.sort("place").select(pl.when(same).then("stream").alias("stream")).to_series())
    one_stream = calls["api"].str.contains(_ONE_STREAM).to_numpy()
    found = np.where(one_stream, _find_last_issued(hinted, work, "stream"), found)
    # Else the work that ended last before each call returned, was issued before it, and, for a wait for a stream, was its stream's last:
    # work that a call waited for ends shortly before it returns
    following = work.select(pl.col("issued_ns").shift(-1).over("stream").fill_null(np.iinfo(np.int64).max)).to_series().to_numpy()
    order = np.argsort(work["end_ns"].to_numpy(), kind="stable")
    rows, issues, over, then = (column[order] for column in (*(work[c].to_numpy() for c in ("row", "issued_ns", "end_ns")), following))
    start = calls["start_ns"].to_numpy()
    place = np.searchsorted(over, limit, side="right") - 1
    latest, open_ = np.full(len(place), -1, dtype=np.int64), np.ones(len(place), dtype=bool)
    for _ in range(MAX_STEPS_BACK):
        open_ &= (place >= 0) & (over[place] > start)
        if not open_.any():
            break
        fits = open_ & (issues[place] < start) & (~one_stream | (then[place] >= start))
        latest = np.where(fits, rows[place], latest)
        open_ &= ~fits
        place = np.maximum(place - 1, -1)
    ends = np.append(kernels["end_ns"].to_numpy(), np.iinfo(np.int64).max)
    return np.where(own >= 0, own, np.where(ends[found] <= limit, found, latest))


def _find_last_issued(calls: pl.DataFrame, work: pl.DataFrame, stream: str | None) -> Ints:
    """Return for each call the work that ends last among what was issued before it (on its stream), -1 where there is none."""
    key = pl.col("stream") if stream else pl.lit(0)
    latest = pl.col("end_ns").cum_max().over(key)
    reached = work.with_columns(last=pl.when(pl.col("end_ns") == latest).then("row").forward_fill().over(key))
    asked = calls.select(pl.col("start_ns").alias("issued_ns"), *(["stream"] if stream else [])).with_row_index("place")
    joined = asked.sort("issued_ns").join_asof(
        reached.select("issued_ns", "stream", "last") if stream else reached.select("issued_ns", "last"),
        on="issued_ns",
        by=stream,
        strategy="backward",
        allow_exact_matches=False,
        check_sortedness=False,
    )
    result: Ints = joined.sort("place")["last"].fill_null(-1).to_numpy()
    return result


def _find_frame_sites(calls: pl.DataFrame, trace: Trace) -> pl.Series:
    """Return the user's frame that is open on the calling thread at each call's start; only frames around some call are nested."""
    starts = calls["start_ns"].to_numpy()
    begun = np.searchsorted(starts, trace.frames["start_ns"].to_numpy()).astype(np.int32)  # of millions of frames
    over = np.searchsorted(starts, trace.frames["end_ns"].to_numpy(), "right")
    frames = trace.frames.filter(pl.Series(begun < over, dtype=pl.Boolean))
    del begun, over
    threads = find_frame_threads(trace, calls["thread"].fill_null(-2).to_numpy())
    nesting = nest(frames)
    own = np.append(find_user_frames(frames, nesting), -1)[find_innermost(nesting, threads, starts)]
    found: pl.Series = decode_names(frames["name"]).gather(null_missing(own))
    return found
