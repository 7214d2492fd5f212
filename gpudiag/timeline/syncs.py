"""Host calls that wait for the device: what each waited for, for how long, and who wrote it.

What blocks (CUDA Runtime API, "API synchronization behavior"; HIP runtime API): every *Synchronize, plain cudaMemcpy and ROCm's
hipMemcpyWithStream; cudaMemcpyAsync from or to pageable memory where it does not return before the copy is over. Its direction alone does
not tell: small copies from pageable memory are staged and return at once. cudaMalloc and cudaFree are allocation, cudaEventQuery and
cudaStreamWaitEvent do not wait.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from gpudiag.arrays import Ints
from gpudiag.attribution.call_sites import Sites, find_frame_threads, find_user_frames
from gpudiag.attribution.names import decode_column, decode_names, match_names
from gpudiag.attribution.nesting import find_innermost, find_nearest, nest, null_missing
from gpudiag.attribution.steps import assign_steps
from gpudiag.model.trace import Trace, build_empty_table, build_table_schema
from gpudiag.trace import kernel_names

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
    to_device = pl.col("copy_name").str.contains(r"(?i)HtoD|HostToDevice|H2D")
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
    found = np.where(calls["api"].str.contains(_ONE_STREAM).to_numpy(), _find_last_issued(hinted, work, "stream"), found)
    # Else the work that ended last before each call returned, was issued before it, and, for a wait for a stream, was its stream's last:
    # work that a call waited for ends shortly before it returns
    following = work.select(pl.col("issued_ns").shift(-1).over("stream").fill_null(np.iinfo(np.int64).max)).to_series().to_numpy()
    order = np.argsort(work["end_ns"].to_numpy(), kind="stable")
    rows, issues, over, then = (column[order] for column in (*(work[c].to_numpy() for c in ("row", "issued_ns", "end_ns")), following))
    start, stream = calls["start_ns"].to_numpy(), calls["api"].str.contains(_ONE_STREAM).to_numpy()
    place = np.searchsorted(over, limit, side="right") - 1
    latest, open_ = np.full(len(place), -1, dtype=np.int64), np.ones(len(place), dtype=bool)
    for _ in range(MAX_STEPS_BACK):
        open_ &= (place >= 0) & (over[place] > start)
        if not open_.any():
            break
        fits = open_ & (issues[place] < start) & (~stream | (then[place] >= start))
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
