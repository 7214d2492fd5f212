"""The words of the idle table: which thread, op and line of the user's held most of each piece, and the event that shows its cause."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution.names import matches, text, texts
from gpudiag.attribution.nesting import innermost, nest, nulled
from gpudiag.attribution.sites import Sites
from gpudiag.model import tables
from gpudiag.model.trace import Trace
from gpudiag.timeline.carried import Carried
from gpudiag.timeline.host_events import in_ms
from gpudiag.timeline.host_threads import NOBODY, Host
from gpudiag.timeline.segments import most_held, outermost, rows_of
from gpudiag.trace import kernel_names
from gpudiag.trace.garbage import give_back

Ints = npt.NDArray[np.int64]

LONG_CALL_NS = 1_000_000
"""A launch call of more than this is itself what is told of a piece: launches cost some microseconds."""

ON_THE_HOST = ("idle_launch", "idle_sync", "idle_io", "idle_data", "idle_gc", "idle_compile", "idle_allocation", "idle_profiler")


def labelled(
    pieces: pl.DataFrame,
    bounds: pl.DataFrame,
    trace: Trace,
    host: Host,
    events: pl.DataFrame,
    carried: Carried,
    syncs: pl.DataFrame | None,
    sites: Sites | None,
) -> pl.DataFrame:
    """Return the `idle` table of `pieces` (in time order)."""
    known = bounds.unique("gap", keep="first").select("gap", "kind", "kernel", gap_op="op")
    frame = pieces.join(known, on="gap", how="left", maintain_order="left")
    held = _held(frame, host)
    give_back()  # what held most is the largest question
    charged = _from_events(frame["event"], events), _from_syncs(frame["sync"], syncs, trace)
    frame = pl.concat([frame, held, *charged, _from_ranges(frame, host), _from_calls(frame, trace)], how="horizontal")
    del held, charged
    give_back()  # the words that follow need the memory
    frame = pl.concat([frame, _from_pauses(frame, carried)], how="horizontal").with_columns(
        op=pl.coalesce("held_op", "gap_op"), on_host=pl.col("cause").is_in(ON_THE_HOST)
    )
    site_of_op = pl.lit(None, dtype=pl.String) if sites is None else pl.lit(sites.site.gather(frame["op"]))
    of_cause = pl.col("cause").replace_strict(carried.sites, default=None, return_dtype=pl.String) if carried.sites else pl.lit(None)
    found = pl.coalesce("event_site", "sync_site", "frame_site", "pause_site", of_cause, site_of_op)
    lead = pl.when(pl.col("lead") == NOBODY).then(None).otherwise("lead")
    frame = frame.with_columns(
        id=pl.int_range(frame.height, dtype=pl.Int64),
        site=pl.when("on_host").then(found),
        thread=pl.when("on_host").then(pl.coalesce("event_thread", "held_thread", lead)),
        evidence=_words(trace, frame),
    )
    return frame.select([pl.col(name).cast(dtype) for name, dtype in tables.schema("idle").items()])


def _words(trace: Trace, frame: pl.DataFrame) -> pl.Expr:
    """Return the evidence of each piece; null for unexplained."""
    held, following = (pl.lit(texts(trace.ops["name"].gather(frame[column]))) for column in ("held_op", "gap_op"))
    launch = pl.coalesce(
        "call_words",
        "frame_words",
        "pause_words",
        pl.format("in {}", held),
        pl.format("between ops in range {}", "range_name"),
        pl.format("between ops, before {}", following),
        pl.lit("between ops"),
    )
    return (
        pl.when(pl.col("cause") == "idle_unexplained")
        .then(None)
        .when(pl.col("cause") == "idle_launch")
        .then(launch)
        .otherwise(pl.coalesce("evidence", "event_words", "sync_words"))
    )


def _from_events(rows: pl.Series, events: pl.DataFrame) -> pl.DataFrame:
    return rows_of(events.select(event_words="evidence", event_site="site", event_thread="thread"), rows)


def _from_syncs(rows: pl.Series, syncs: pl.DataFrame | None, trace: Trace) -> pl.DataFrame:
    """Return (sync_words, sync_site) of the calls that are charged."""
    if syncs is None or not syncs.height:
        empty = pl.repeat(None, len(rows), dtype=pl.String, eager=True)
        return pl.DataFrame({"sync_words": empty, "sync_site": empty})
    order = syncs.sort("id")
    name = texts(trace.kernels["name"]).gather(order["kernel"]).str.slice(0, 60)
    words = order.select(sync_words=pl.format("{} waited for {}", "api", pl.lit(name)), sync_site="site")
    found = np.searchsorted(order["id"].to_numpy(), rows.fill_null(-1).to_numpy())
    return rows_of(words, nulled(np.where(rows.is_null().to_numpy(), -1, found)))


def _from_calls(frame: pl.DataFrame, trace: Trace) -> pl.DataFrame:
    """Return (call_words): of pieces that lie for the most part in one long launch call of the responsible thread."""
    long = (pl.col("end_ns") - pl.col("start_ns") > LONG_CALL_NS) & matches("api", kernel_names.KERNEL_LAUNCH)
    calls = trace.launches.filter(long).select("start_ns", "end_ns", "thread", words=pl.format("the launch call itself took {}", in_ms()))
    spans, rows = outermost(calls["start_ns"].to_numpy(), calls["end_ns"].to_numpy())
    start, end = frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy()
    call, held = most_held(start, end, spans, rows)
    found = rows_of(calls.select("thread", call_words="words"), pl.Series(np.where(2 * held > end - start, call, -1)).replace(-1, None))
    return found.select(pl.when(pl.col("thread") == pl.lit(frame["lead"])).then("call_words").alias("call_words"))


def _from_pauses(frame: pl.DataFrame, carried: Carried) -> pl.DataFrame:
    """Return (pause_words, pause_site) from the site window, for pieces in which no op was open."""
    told = carried.of_pieces(frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy())
    between = frame["held_op"].is_null()
    told = told.with_columns(pl.when(pl.lit(between)).then(pl.all()))
    return told.select(pause_words=pl.format("{} (by the site window)", "evidence"), pause_site="site")


def _from_ranges(frame: pl.DataFrame, host: Host) -> pl.DataFrame:
    """Return (range_name): the innermost of the user's ranges around each piece."""
    nesting = nest(host.ranges)
    thread = np.where(np.isin(frame["lead"].to_numpy(), [*host.crew, NOBODY]), host.crew[0], frame["lead"].to_numpy())
    rows = innermost(nesting, thread, frame["start_ns"].to_numpy())
    names = host.ranges.select(range_name=text("name").str.slice(0, 60))
    return rows_of(names, nulled(rows))


def _held(frame: pl.DataFrame, host: Host) -> pl.DataFrame:
    """Return (held_op, held_thread, frame_words, frame_site): what held most of each piece among the threads that are responsible."""
    start, end, lead = frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy(), frame["lead"].to_numpy()
    op, thread, leaf, site = (np.full(frame.height, -1, dtype=np.int64) for _ in range(4))
    held = np.zeros(frame.height, dtype=np.int64)
    shared = np.isin(lead, [*host.crew, NOBODY])
    for number in dict.fromkeys((*host.crew, *np.unique(lead[~shared]).tolist())):
        rows = np.flatnonzero(shared if number in host.crew else lead == number)
        found, time = most_held(start[rows], end[rows], *host.ops_of(number))
        better = (found >= 0) & (time > held[rows])
        op[rows[better]], held[rows[better]], thread[rows[better]] = found[better], time[better], number
        frames = host.held_frames(number, start[rows], end[rows])
        new = (leaf[rows] < 0) | better
        leaf[rows[new]], site[rows[new]] = frames[0][new], frames[1][new]
    host.forget()  # the words that follow need the memory
    words = host.words()
    asked = pl.DataFrame({"leaf": leaf, "user": site})
    asked = asked.join(words.select(leaf="code", frame_words="told"), on="leaf", how="left", maintain_order="left")
    asked = asked.join(words.select(user="code", frame_site="text"), on="user", how="left", maintain_order="left")
    nulled = [pl.Series(name, rows).replace(-1, None) for name, rows in (("held_op", op), ("held_thread", thread))]
    return asked.select("frame_words", "frame_site").with_columns(nulled)
