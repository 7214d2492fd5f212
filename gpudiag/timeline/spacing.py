"""The device part of a gap: work that had been issued and did not start yet, against what is normal in this trace."""

from __future__ import annotations

import numpy as np
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.attribution.names import matches
from gpudiag.attribution.nesting import nulled
from gpudiag.model.trace import Trace
from gpudiag.timeline import host_patterns
from gpudiag.timeline.host_threads import MAX_THREADS, NOBODY
from gpudiag.timeline.segments import layered

LATENCY_MOST_NS = 50_000
"""A launch takes effect on an idle device within some microseconds (2.5 to 15 on current devices); beyond this it needs a cause."""

SPACING_LEAST_NS = 1_000
"""Two kernels back to back leave about 1 us between them (kernel-to-kernel latency in a CUDA graph; rules.md OVH-02)."""

SPACING_MOST_NS = 10_000
"""Up to this time between two pieces of work that were both issued is their order on the device: 1 to 5 us on NVIDIA, up to 11 us
between small copies and kernels of an MI300X, as real traces show. A longer pause needs a cause."""

ACROSS_STREAMS_NS = 50_000
"""An event that another stream waits for takes effect within this time; a longer wait was for something else."""

_QUANTILE = 0.9
_ENOUGH = 10


def with_flight(bounds: pl.DataFrame, trace: Trace, main: int, *, on_cpu: bool) -> pl.DataFrame:
    """Return `bounds` with `flight_ns`, where the host's part of each gap ends, `lead`, the thread that issued the work, and `spacing`.

    The host is responsible until the call that starts the work has returned or its normal latency has passed. A gap within the normal
    spacing of two kernels is the device's own. Work whose launch came before the recording had been issued.
    """
    if on_cpu:
        return bounds.with_columns(flight_ns="end_ns", lead=pl.lit(main), spacing=pl.lit(0), issued_ns=pl.lit(None, dtype=pl.Int64))
    calls = trace.launches.select(pl.col("id").alias("launch"), "thread", issued_ns="start_ns", returned_ns="end_ns")
    frame = bounds.join(calls, on="launch", how="left", maintain_order="left")
    latency, spacing = normal_latency(frame), normal_spacing(frame)
    flight = pl.max_horizontal("returned_ns", pl.col("issued_ns") + latency)
    early = _issued_before(frame, trace)
    known = pl.col("launch").is_not_null()
    flight = pl.when(known).then(flight).otherwise(pl.when(early).then(pl.col("start_ns")).otherwise(pl.col("end_ns")))
    short = (pl.col("kind") != "host_wait") & (pl.col("kernel").is_not_null()) & (pl.col("end_ns") - pl.col("start_ns") <= spacing)
    flight = pl.when(short).then(pl.col("start_ns")).otherwise(flight.clip("start_ns", "end_ns"))
    return frame.with_columns(flight_ns=flight, lead=_leads(frame["thread"]), spacing=pl.lit(spacing))


def _leads(threads: pl.Series) -> pl.Series:
    """Return the thread that is responsible for each gap; NOBODY where it is not known, or not among the MAX_THREADS with most gaps."""
    most = threads.drop_nulls().value_counts(sort=True)[threads.name].head(MAX_THREADS)
    return threads.set(~threads.is_in(most.implode()).fill_null(False), NOBODY)


def _issued_before(frame: pl.DataFrame, trace: Trace) -> pl.Series:
    """Return which gaps end in work without a launch record that was issued before the recording: before the oldest recorded call."""
    oldest = trace.launches.filter(pl.col("correlation") > 0)["correlation"].min()
    number = trace.kernels["correlation"].gather(frame["kernel"])
    return ((frame["kind"] == "unlinked") & (number < (0 if oldest is None else oldest))).fill_null(False)


def normal_latency(frame: pl.DataFrame) -> int:
    """Return the time in ns from a launch call's begin to the start of its work on an idle device: the 90th percentile, at most 50 us.

    50 us where the trace shows it too seldom.
    """
    waits = (frame["end_ns"] - frame["issued_ns"]).filter(frame["kind"] == "host_wait").drop_nulls()
    usual = waits.quantile(_QUANTILE) if len(waits) >= _ENOUGH else None
    return LATENCY_MOST_NS if usual is None else int(min(usual, LATENCY_MOST_NS))


def normal_spacing(frame: pl.DataFrame) -> int:
    """Return the time in ns between two pieces of work that had both been issued: the 90th percentile, between 1 and 10 us."""
    waits = frame.filter((pl.col("kind") == "queued") & (pl.col("returned_ns") <= pl.col("begun_ns")))
    usual = waits.select((pl.col("end_ns") - pl.col("begun_ns")).quantile(_QUANTILE)).item()
    return int(min(max(usual or 0, SPACING_LEAST_NS), SPACING_MOST_NS))


def device_part(bounds: pl.DataFrame, trace: Trace) -> pl.DataFrame:
    """Return the pieces of every gap after its host part: normal spacing, stream order, the profiler, and what nothing explains."""
    frame = bounds.filter(pl.col("flight_ns") < pl.col("end_ns")).with_columns(start_ns=pl.max_horizontal("flight_ns", "start_ns"))
    flushes = trace.marks.filter((pl.col("category") == "overhead") & matches("name", host_patterns.OVERHEADS["idle_profiler"]))
    allowed = _allowed(frame, trace)
    normal = frame.with_columns(end_ns=pl.min_horizontal("end_ns", pl.col("start_ns") + allowed["allowed"]))
    spans = frame.select("start_ns", "end_ns").to_numpy().astype(np.int64)
    cut = layered(spans, [intervals.of(normal), intervals.of(flushes)])
    words = pl.Series(["idle_dependency", "idle_profiler", "idle_unexplained"])
    flushed = pl.when(pl.col("layer") == 1).then(pl.lit("the profiler wrote its buffers"))
    evidence = pl.when(pl.col("layer") == 0).then(pl.lit(allowed["evidence"].gather(cut.row))).otherwise(flushed)
    return pl.DataFrame({"start_ns": cut.start, "end_ns": cut.end, "layer": cut.layer}).with_columns(
        gap=frame["gap"].gather(cut.row), lead=frame["lead"].gather(cut.row), cause=words.gather(cut.layer), evidence=evidence,
        event=pl.lit(None, dtype=pl.Int64), sync=pl.lit(None, dtype=pl.Int64),
    )  # fmt: skip


def _allowed(frame: pl.DataFrame, trace: Trace) -> pl.DataFrame:
    """Return how long the order of the device's own work explains each gap (`allowed`, ns), and by what (`evidence`)."""
    replay = trace.kernels["replay"].gather(frame["kernel"])
    across = _waited_for_a_stream(frame, trace)
    return frame.select(
        allowed=pl.when(pl.lit(across)).then(ACROSS_STREAMS_NS).when(pl.col("kernel").is_null()).then(0).otherwise(SPACING_MOST_NS),
        evidence=pl.when(pl.lit(across))
        .then(pl.lit("the stream waited for an event of another stream"))
        .when(pl.lit(replay).fill_null(False))
        .then(pl.lit("order of the work inside a graph"))
        .otherwise(pl.lit("normal spacing of work that was issued")),
    )


def _waited_for_a_stream(frame: pl.DataFrame, trace: Trace) -> pl.Series:
    """Return whether each gap ends in work that could start only after the work before the gap, which ran on another stream.

    A stream-wait call stands between the launch and the one before it on the thread; of work without a launch record only the streams tell.
    """
    order = trace.kernels.select("start_ns", "end_ns", "stream").filter(pl.col("end_ns") > pl.col("start_ns")).sort("end_ns")
    before = np.searchsorted(order["end_ns"].to_numpy(), frame["begun_ns"].to_numpy(), side="right") - 1
    before_stream = order["stream"].gather(nulled(before))
    other = (before_stream != trace.kernels["stream"].gather(frame["kernel"])).fill_null(False)
    return other & (_after_stream_wait(frame, trace) | (frame["kind"] == "unlinked"))


def _after_stream_wait(frame: pl.DataFrame, trace: Trace) -> pl.Series:
    """Return whether the thread that launched the work called a stream wait after its launch before that one."""
    waits = trace.launches.filter(matches("api", host_patterns.STREAM_WAIT))
    waits = waits.select("thread", wait_ns="start_ns")
    launched = trace.launches.select("id", "thread", "start_ns").filter(
        pl.col("id").is_in(trace.kernels["launch"].drop_nulls().unique().implode())
    )
    launched = launched.select("thread", launch="id", issued_ns="start_ns", before_ns=pl.col("start_ns").shift(1).over("thread"))
    asked = launched.join(frame.select("row", "launch"), on="launch", how="inner").sort("issued_ns").drop_nulls("thread")
    found = asked.join_asof(waits.sort("wait_ns"), left_on="issued_ns", right_on="wait_ns", by="thread", check_sortedness=False).filter(
        pl.col("wait_ns") > pl.col("before_ns").fill_null(-1)
    )
    return frame["row"].is_in(found["row"].implode())
