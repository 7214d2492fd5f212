"""Idle time of the device in pieces of one cause each: what the host threads that issue its work did meanwhile.

A gap has a host part, up to the moment at which the launch of the work that ends it should have taken effect, and a device part. In the
host part the most specific event on the responsible threads is the cause; in the device part the work had been issued and did not start."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from gpudiag.arrays import Ints
from gpudiag.attribution import intervals
from gpudiag.attribution.call_sites import Frames, Sites
from gpudiag.attribution.intervals import cut_by_layer, find_most_held, find_outermost
from gpudiag.attribution.names import match_column
from gpudiag.attribution.nesting import null_missing
from gpudiag.model.trace import Trace, build_empty_table
from gpudiag.timeline import host_threads
from gpudiag.timeline.host_events import EVENT_CAUSES, find_host_events, find_own_frames
from gpudiag.timeline.host_threads import MAX_THREADS, NOBODY, HostActivity
from gpudiag.timeline.idle_evidence import SiteWindowPauses, label_pieces
from gpudiag.trace.table_store import release_memory

PIECE_SCHEMA = {
    "gap": pl.Int64(), "start_ns": pl.Int64(), "end_ns": pl.Int64(), "cause": pl.String(), "event": pl.Int64(), "lead": pl.Int64(),
    "sync": pl.Int64(), "evidence": pl.String(),
}  # fmt: skip


def explain_idle(
    trace: Trace,
    gaps: pl.DataFrame,
    window: intervals.Spans,
    steps: pl.DataFrame,
    *,
    syncs: pl.DataFrame | None = None,
    host_marks: pl.DataFrame | None = None,
    sites: Sites | None = None,
    site_window: tuple[Trace, pl.DataFrame] | None = None,
    on_cpu: bool = False,
    frames: Frames | None = None,
    events: pl.DataFrame | None = None,
) -> pl.DataFrame:
    """Return the `idle` table: `gaps` cut to `window` (the analysed steps) and into pieces of one cause each.

    `trace` and `site_window` (with its steps) at stage 'link'. `syncs`: of find_syncs; None charges no call. `host_marks`: the bundle's.
    `on_cpu`: the ops themselves are the device's work. `frames`, `events`: find_own_frames and find_host_events of `trace`, if made.
    """
    # The parts of the gaps in the window, in order: `gap` is their row, `begun_ns` where the whole gap began
    start, end, known = pl.col("start_ns"), pl.col("end_ns"), gaps.with_columns(begun_ns="start_ns")
    cut = [
        known.filter((start < last) & (end > first)).with_columns(start.clip(lower_bound=first), end.clip(upper_bound=last))
        for first, last in window.tolist()
    ]
    bounds = pl.concat([*cut, known.clear()]).rename({"id": "gap"}).sort("start_ns")
    bounds = bounds.with_columns(row=pl.int_range(bounds.height, dtype=pl.Int64))
    if not bounds.height:
        return build_empty_table("idle")
    frames = find_own_frames(trace) if frames is None else frames
    events = find_host_events(trace, frames, host_marks, on_cpu=on_cpu) if events is None else events
    host = HostActivity(trace, frames, intervals.build_spans(bounds))
    release_memory()
    carried = SiteWindowPauses(trace, steps, None if trace.frames.height else site_window, host, events, host_marks, on_cpu=on_cpu)
    events = pl.concat([events, carried.events])
    bounds = add_launch_latency(bounds, trace, host.crew[0], on_cpu=on_cpu)
    # The pieces of the host part of every gap, by what the threads that are responsible for it did
    told = intervals.build_spans(carried.pairs)  # the pauses that the site window knows
    parts = [explain_device_part(bounds, trace)]
    for (lead,), rows in bounds.filter(pl.col("flight_ns") > pl.col("start_ns")).group_by("lead", maintain_order=True):
        threads = host.crew if lead == NOBODY or lead in host.crew else (int(lead),)
        parts.append(_explain_by_threads(rows, threads, host, events, told if threads == host.crew else intervals.NO_SPANS))
    found = pl.concat(parts).sort("start_ns", "end_ns")
    del parts
    release_memory()
    if syncs is not None and not on_cpu:
        found = charge_syncs(move_unseen_waits(found, syncs), bounds, syncs, trace)
    release_memory()
    return label_pieces(found, bounds, trace, host, events, carried, syncs, sites)


def _explain_by_threads(
    rows: pl.DataFrame, threads: tuple[int, ...], host: HostActivity, events: pl.DataFrame, told: intervals.Spans
) -> pl.DataFrame:
    """Return the pieces of the host part of gaps for which `threads` are responsible; `told`: pauses that a site window explains."""
    own = events.with_row_index("event").filter(pl.col("thread").is_null() | pl.col("thread").is_in(list(threads)))
    layers, numbers = [], []
    for cause in EVENT_CAUSES:
        of_cause = own.filter(pl.col("cause") == cause)
        spans, chosen = find_outermost(of_cause["start_ns"].to_numpy(), of_cause["end_ns"].to_numpy())
        layers.append(intervals.merge_spans(spans))
        numbers.append((spans, of_cause["event"].to_numpy()[chosen].astype(np.int64)))
    in_flight = rows.select(start_ns="issued_ns", end_ns="flight_ns").drop_nulls()
    layers.append(intervals.merge_spans(np.concatenate((host.active(threads), told, intervals.build_spans(in_flight)))))
    host_part = rows.select("start_ns", pl.col("flight_ns").alias("end_ns")).to_numpy().astype(np.int64)
    cut = cut_by_layer(host_part, layers)
    # The event that holds most of each piece
    event = np.full(len(cut.start), -1, dtype=np.int64)
    for index, (spans, chosen) in enumerate(numbers):
        held = cut.layer == index
        if held.any():
            event[held] = find_most_held(cut.start[held], cut.end[held], spans, chosen)[0]
    words = pl.Series([*EVENT_CAUSES, "idle_launch", "idle_unexplained"])
    return _build_pieces(cut, rows, cause=words.gather(cut.layer), event=pl.Series(event).replace(-1, None))


def _build_pieces(cut: intervals.LayeredPieces, rows: pl.DataFrame, **columns: pl.Series | pl.Expr) -> pl.DataFrame:
    """Return the pieces of `rows` (gaps) with the columns that are told, others null."""
    made = pl.DataFrame({"start_ns": cut.start, "end_ns": cut.end, "layer": cut.layer}).with_columns(
        gap=rows["gap"].gather(cut.row), lead=rows["lead"].gather(cut.row), **columns
    )
    made = made.with_columns(pl.lit(None).alias(name) for name in PIECE_SCHEMA if name not in made.columns)
    return made.select(list(PIECE_SCHEMA)).cast(PIECE_SCHEMA)  # type: ignore[arg-type]


LATENCY_MOST_NS = 50_000
"""A launch takes effect on an idle device within some microseconds (2.5 to 15 on current devices); beyond this it needs a cause."""

SPACING_LEAST_NS = 1_000
"""Two kernels back to back leave about 1 us between them (kernel-to-kernel latency in a CUDA graph; rules.md OVH-02)."""

SPACING_MOST_NS = 10_000
"""Up to this time between two pieces of work that were both issued is their order on the device: 1 to 5 us on NVIDIA, up to 11 us
between small copies and kernels of an MI300X, as real traces show. A longer pause needs a cause."""

OUTSIDE_LEAST_NS = 1_000_000
"""The first work of a stream that was issued so long before it began, while the device did nothing that was recorded, waited for work
outside the recording: of before it began, or of another process."""

STAGING_BYTE_PER_NS = 1.0
"""A host copies into pinned staging memory at 1 GB/s at least (recordings show 4 to 20 GB/s)."""

ACROSS_STREAMS_NS = 50_000
"""An event that another stream waits for takes effect within this time; a longer wait was for something else."""

_QUANTILE = 0.9
_ENOUGH = 10


def add_launch_latency(bounds: pl.DataFrame, trace: Trace, main: int, *, on_cpu: bool) -> pl.DataFrame:
    """Return `bounds` with `flight_ns`, where the host's part of each gap ends, `lead`, the thread that issued the work, and `spacing`.

    The host is responsible until the call that starts the work has returned or its normal latency has passed. A gap within the normal
    spacing of two kernels is the device's own. Work whose launch came before the recording had been issued.
    """
    if on_cpu:
        return bounds.with_columns(
            flight_ns="end_ns", lead=pl.lit(main), spacing=pl.lit(0), issued=pl.lit(False), issued_ns=pl.lit(None, dtype=pl.Int64)
        )
    calls = trace.launches.select(pl.col("id").alias("launch"), "thread", issued_ns="start_ns", returned_ns="end_ns")
    frame = bounds.join(calls, on="launch", how="left", maintain_order="left")
    # The normal latency: from a launch call's begin to the start of its work on an idle device, at most 50 us, and 50 us where the trace
    # shows it too seldom. The normal spacing: between two pieces of work that had both been issued, 1 to 10 us
    waits = (frame["end_ns"] - frame["issued_ns"]).filter(frame["kind"] == "host_wait").drop_nulls()
    usual: Any = waits.quantile(_QUANTILE) if len(waits) >= _ENOUGH else None
    latency = LATENCY_MOST_NS if usual is None else int(min(usual, LATENCY_MOST_NS))
    followed = frame.filter((pl.col("kind") == "queued") & (pl.col("returned_ns") <= pl.col("begun_ns")))
    usual = followed.select((pl.col("end_ns") - pl.col("begun_ns")).quantile(_QUANTILE)).item()
    spacing = int(min(max(usual or 0, SPACING_LEAST_NS), SPACING_MOST_NS))
    # A copy that begins inside its own call waited there for earlier work; without that it takes no longer to issue than staging does
    copied = trace.kernels["bytes"].gather(frame["kernel"]).set(trace.kernels["kind"].gather(frame["kernel"]) != "memcpy", None)
    staged = pl.col("issued_ns") + latency + pl.Series(copied / STAGING_BYTE_PER_NS).cast(pl.Int64)
    returned = pl.when(pl.col("end_ns") <= pl.col("returned_ns")).then(pl.min_horizontal("returned_ns", staged)).otherwise("returned_ns")
    flight = pl.max_horizontal(returned, pl.col("issued_ns") + latency)
    # Which gaps end in work without a launch record that was issued before the recording: before the oldest recorded call
    oldest = trace.launches.filter(pl.col("correlation") > 0)["correlation"].min()
    number = trace.kernels["correlation"].gather(frame["kernel"])
    early = ((frame["kind"] == "unlinked") & (number < (0 if oldest is None else oldest))).fill_null(False)
    # Whether the gap may end in work that waited for what was not recorded: the first of its stream, or issued before the recording. Later
    # work of a stream waits for the stream's own order
    first = trace.kernels.select((pl.col("start_ns") == pl.col("start_ns").min().over("stream")).alias("first"))["first"]
    issued = early | first.gather(frame["kernel"]).fill_null(False)
    known = pl.col("launch").is_not_null()
    flight = pl.when(known).then(flight).otherwise(pl.when(early).then(pl.col("start_ns")).otherwise(pl.col("end_ns")))
    short = (pl.col("kind") != "host_wait") & (pl.col("kernel").is_not_null()) & (pl.col("end_ns") - pl.col("start_ns") <= spacing)
    flight = pl.when(short).then(pl.col("start_ns")).otherwise(flight.clip("start_ns", "end_ns"))
    # The thread that is responsible for each gap; NOBODY where it is not known, or not among the MAX_THREADS with most gaps
    threads = frame["thread"]
    most = threads.drop_nulls().value_counts(sort=True)[threads.name].head(MAX_THREADS)
    return frame.with_columns(
        flight_ns=flight, lead=threads.set(~threads.is_in(most.implode()).fill_null(False), NOBODY), spacing=pl.lit(spacing), issued=issued
    )


def explain_device_part(bounds: pl.DataFrame, trace: Trace) -> pl.DataFrame:
    """Return the pieces of every gap after its host part: normal spacing, stream order, the profiler, and what nothing explains.

    And work outside the recording, which is no idle time: see OUTSIDE_LEAST_NS.
    """
    frame = bounds.filter(pl.col("flight_ns") < pl.col("end_ns")).with_columns(start_ns=pl.max_horizontal("flight_ns", "start_ns"))
    flushes = trace.marks.filter((pl.col("category") == "overhead") & match_column("name", host_threads.OVERHEAD_PATTERNS["idle_profiler"]))
    # How long the order of the device's own work explains each gap (`allowed`, ns), and by what (`evidence`)
    replay = trace.kernels["replay"].gather(frame["kernel"])
    # Whether each gap ends in work that could start only after the work before the gap, which ran on another stream. A stream-wait call
    # stands between the launch and the one before it on the thread; of work without a launch record only the streams tell
    order = trace.kernels.select("start_ns", "end_ns", "stream").filter(pl.col("end_ns") > pl.col("start_ns")).sort("end_ns")
    before = np.searchsorted(order["end_ns"].to_numpy(), frame["begun_ns"].to_numpy(), side="right") - 1
    before_stream = order["stream"].gather(null_missing(before))
    other = (before_stream != trace.kernels["stream"].gather(frame["kernel"])).fill_null(False)
    # Whether the thread that launched the work called a stream wait after its launch before that one
    waits = trace.launches.filter(match_column("api", host_threads.STREAM_WAIT_CALL))
    waits = waits.select("thread", wait_ns="start_ns")
    launched = trace.launches.select("id", "thread", "start_ns").filter(
        pl.col("id").is_in(trace.kernels["launch"].drop_nulls().unique().implode())
    )
    launched = launched.select("thread", launch="id", issued_ns="start_ns", before_ns=pl.col("start_ns").shift(1).over("thread"))
    asked = launched.join(frame.select("row", "launch"), on="launch", how="inner").sort("issued_ns").drop_nulls("thread")
    found = asked.join_asof(waits.sort("wait_ns"), left_on="issued_ns", right_on="wait_ns", by="thread", check_sortedness=False).filter(
        pl.col("wait_ns") > pl.col("before_ns").fill_null(-1)
    )
    across = other & (frame["row"].is_in(found["row"].implode()) | (frame["kind"] == "unlinked"))
    allowed = frame.select(
        allowed=pl.when(pl.lit(across)).then(ACROSS_STREAMS_NS).when(pl.col("kernel").is_null()).then(0).otherwise(SPACING_MOST_NS),
        evidence=pl.when(pl.lit(across))
        .then(pl.lit("the stream waited for an event of another stream"))
        .when(pl.lit(replay).fill_null(False))
        .then(pl.lit("order of the work inside a graph"))
        .otherwise(pl.lit("normal spacing of work that was issued")),
    )
    normal = frame.with_columns(end_ns=pl.min_horizontal("end_ns", pl.col("start_ns") + allowed["allowed"]))
    spans = frame.select("start_ns", "end_ns").to_numpy().astype(np.int64)
    cut = cut_by_layer(spans, [intervals.build_spans(normal), intervals.build_spans(flushes)])
    # a long wait of work that had been issued: the device was held by what was not recorded
    held = frame.select(pl.col("issued") & (pl.col("end_ns") - pl.col("start_ns") >= OUTSIDE_LEAST_NS)).to_series()
    rest = pl.when(pl.Series(held.gather(cut.row))).then(pl.lit("outside_recording")).otherwise(pl.lit("idle_unexplained"))
    words = pl.Series(["idle_dependency", "idle_profiler", None])
    flushed = pl.when(pl.col("layer") == 1).then(pl.lit("the profiler wrote its buffers"))
    evidence = pl.when(pl.col("layer") == 0).then(pl.lit(allowed["evidence"].gather(cut.row))).otherwise(flushed)
    return _build_pieces(cut, frame, evidence=evidence, cause=pl.coalesce(pl.lit(words.gather(cut.layer)), rest))


def move_unseen_waits(pieces: pl.DataFrame, syncs: pl.DataFrame) -> pl.DataFrame:
    """Return `pieces` with the host's time in calls that waited for the device while nothing recorded ran as work outside the recording."""
    unseen = syncs.filter(pl.col("kernel").is_null() & (pl.col("end_ns") - pl.col("start_ns") >= OUTSIDE_LEAST_NS))
    if not unseen.height:
        return pieces
    cut = cut_by_layer(pieces.select("start_ns", "end_ns").to_numpy(), [intervals.build_spans(unseen)])
    parts = pieces[cut.row].with_columns(pl.Series("start_ns", cut.start), pl.Series("end_ns", cut.end))
    moved = pl.lit(pl.Series(cut.layer == 0)) & pl.col("cause").is_in(CHARGEABLE)
    return parts.with_columns(cause=pl.when(moved).then(pl.lit("outside_recording")).otherwise("cause"))


CHARGEABLE = ("idle_launch", "idle_unexplained")
"""What a more specific cause holds is not the call's doing."""

_MOST_OPEN = 64
"""Calls whose effect is followed at the same time."""


def charge_syncs(pieces: pl.DataFrame, bounds: pl.DataFrame, syncs: pl.DataFrame, trace: Trace) -> pl.DataFrame:
    """Return `pieces` with the host's time, latency of the launch included, charged to the calls of `syncs` that waited for the device.

    Without the call the host would have been earlier by its length at most: so it is charged up to that, from the gap that begins in it or
    next after it, until the host is as far ahead of the device again as the call was long. Another such call that follows before that
    takes its place; of the earlier one stays what it was longer. Time in which nothing is recorded of the host is charged only until the
    host had issued the next work: a pause after that is its own.
    """
    waiting = syncs.filter(pl.col("kernel").is_not_null() & (pl.col("waited_ns") > 0)).sort("start_ns")
    rows = pieces.with_row_index("piece").join(
        bounds.unique("gap", keep="first").select("gap", "kind", "flight_ns", "begun_ns"), on="gap", how="left", maintain_order="left"
    )
    late = pl.col("kind").is_in(["host_wait", "edge"]) & (pl.col("end_ns") <= pl.col("flight_ns"))
    rows = rows.filter(late & pl.col("cause").is_in(CHARGEABLE))
    if not waiting.height or not rows.height:
        return pieces
    # When the host had last issued work, by a call that did not wait itself, of what began before each row's gap
    calls = trace.launches.select(pl.col("id").alias("launch"), issued_ns="start_ns")
    calls = calls.filter(~pl.col("launch").is_in(waiting["launch"].implode()))
    work = trace.kernels.select("start_ns", "launch").join(calls, on="launch", how="inner").sort("start_ns")
    latest = np.append(np.iinfo(np.int64).min, work["issued_ns"].cum_max().to_numpy())
    issued = latest[np.searchsorted(work["start_ns"].to_numpy(), rows["begun_ns"].to_numpy())]
    taken = _split_charges(rows, waiting, _measure_lead(rows, trace), issued)
    # The charged parts are cut off at the front of the pieces
    pieces, until = pieces.with_row_index("piece"), pl.col("taken_ns").cum_sum().over("piece")
    parts = pieces.join(taken.with_columns(until=until), on="piece", how="inner", maintain_order="right")
    parts = parts.with_columns(
        end_ns=pl.col("start_ns") + pl.col("until"),
        start_ns=pl.col("start_ns") + pl.col("until") - pl.col("taken_ns"),
        cause=pl.lit("idle_sync"),
        sync="by",
        event=pl.lit(None, dtype=pl.Int64),
    )
    sums = taken.group_by("piece").agg(pl.col("taken_ns").sum())
    rest = pieces.join(sums, on="piece", how="left").with_columns(start_ns=pl.col("start_ns") + pl.col("taken_ns").fill_null(0))
    rest = rest.filter(pl.col("start_ns") < pl.col("end_ns"))
    return pl.concat([parts.select(pieces.columns), rest.select(pieces.columns)]).sort("start_ns", "end_ns").drop("piece")


def _split_charges(rows: pl.DataFrame, waiting: pl.DataFrame, regained: Ints, issued: Ints) -> pl.DataFrame:
    """Return (piece, by, taken_ns) in order: the calls that each piece is charged to, and for how much of it."""
    calls = list(waiting.select("id", "start_ns", "end_ns").iter_rows())
    found: list[tuple[int, int, int]] = []
    open_calls: list[tuple[int, int, int, int]] = []  # (call, its end, its length, what is left), the latest last
    following = 0
    paused = np.where((rows["cause"] == "idle_unexplained").to_numpy(), issued, np.iinfo(np.int64).min)
    columns = (rows["piece"].to_list(), rows["begun_ns"].to_list(), (rows["end_ns"] - rows["start_ns"]).to_list(), regained.tolist())
    for piece, begun, length, ahead, since in zip(*columns, paused.tolist(), strict=True):
        open_calls = [call for call in open_calls if ahead < call[2]]
        while following < len(calls) and calls[following][1] <= begun:
            call, start, end = calls[following]
            own = end - start
            # the host waits for the device anyway, so earlier calls count only for what they exceed this one by
            open_calls = [*((*one, left - own) for *one, left in open_calls if left > own), (call, end, own, own)]
            following += 1
        while length and open_calls and open_calls[-1][1] > since:
            call, end, whole, left = open_calls.pop()
            part = min(left, length)
            found.append((piece, call, part))
            length -= part
            if left > part:
                open_calls.append((call, end, whole, left - part))
        open_calls = open_calls[-_MOST_OPEN:]
    return pl.DataFrame(found, schema={"piece": pl.UInt32, "by": pl.Int64, "taken_ns": pl.Int64}, orient="row")


def _measure_lead(rows: pl.DataFrame, trace: Trace) -> Ints:
    """Return for each row the longest time in ns that work had been issued ahead of its start since the row's gap before it ended."""
    calls = trace.launches.select(pl.col("id").alias("launch"), issued_ns="end_ns")
    work = trace.kernels.select("start_ns", pl.when(~pl.col("replay")).then("launch"))
    work = work.join(calls, on="launch", how="inner").sort("start_ns")
    starts, ahead = work["start_ns"].to_numpy(), (work["start_ns"] - work["issued_ns"]).to_numpy()
    begun, ended = rows["begun_ns"].to_numpy(), rows["start_ns"].to_numpy()
    before = np.concatenate(([np.iinfo(np.int64).min], ended[:-1])) if len(ended) else ended
    first, last = np.searchsorted(starts, before, side="left"), np.searchsorted(starts, begun, side="left")
    found = np.zeros(len(begun), dtype=np.int64)
    some = last > first
    if some.any():
        edges = np.stack((first[some], last[some]), axis=1).reshape(-1)
        padded = np.append(ahead, 0)
        found[some] = np.maximum.reduceat(padded, edges)[::2]
    return found


def add_sync_costs(syncs: pl.DataFrame, idle: pl.DataFrame) -> pl.DataFrame:
    """Return `syncs` with cost_ns: the idle time of the device that each call is charged with."""
    sums = idle.drop_nulls("sync").group_by("sync").agg(charged_ns=(pl.col("end_ns") - pl.col("start_ns")).sum())
    found = syncs.join(sums, left_on="id", right_on="sync", how="left", maintain_order="left")
    return found.with_columns(cost_ns=pl.col("charged_ns").fill_null(0)).drop("charged_ns")
