"""Idle time of the device in pieces of one cause each: what the host threads that issue its work did meanwhile.

A gap has a host part, up to the moment at which the launch of the work that ends it should have taken effect, and a device part. In the
host part the most specific event on the responsible threads is the cause; in the device part the work had been issued and did not start.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.attribution.sites import Frames, Sites
from gpudiag.model import tables
from gpudiag.model.trace import Trace
from gpudiag.timeline.carried import Carried
from gpudiag.timeline.charge import charged
from gpudiag.timeline.host_events import CAUSES, host_events, own_frames
from gpudiag.timeline.host_threads import NOBODY, Host
from gpudiag.timeline.labels import labelled
from gpudiag.timeline.segments import layered, most_held, outermost
from gpudiag.timeline.spacing import device_part, with_flight
from gpudiag.trace.garbage import give_back

PIECE = {
    "gap": pl.Int64(), "start_ns": pl.Int64(), "end_ns": pl.Int64(), "cause": pl.String(), "event": pl.Int64(), "lead": pl.Int64(),
    "sync": pl.Int64(), "evidence": pl.String(),
}  # fmt: skip


def explain(
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

    `trace` and `site_window` (with its steps) at stage 'link'. `syncs`: timeline.syncs; None charges no call. `host_marks`: the bundle's.
    `on_cpu`: the ops themselves are the device's work. `frames`, `events`: own_frames and host_events of `trace`, where others ask too.
    """
    bounds = _cut(gaps, window)
    if not bounds.height:
        return tables.empty("idle")
    frames = own_frames(trace) if frames is None else frames
    host = Host(trace, frames, intervals.of(bounds))
    events = host_events(trace, frames, host_marks, on_cpu=on_cpu) if events is None else events
    frames.forget()  # `host` has what it needs of them
    give_back()
    carried = Carried(trace, steps, None if trace.frames.height else site_window, host, events, host_marks, on_cpu=on_cpu)
    events = pl.concat([events, carried.events])
    bounds = with_flight(bounds, trace, host.crew[0], on_cpu=on_cpu)
    pieces = [_host_part(bounds, host, events, carried.spans()), device_part(bounds, trace)]
    found = pl.concat([frame.select(list(PIECE)).cast(PIECE) for frame in pieces]).sort("start_ns", "end_ns")  # type: ignore[arg-type]
    if syncs is not None and not on_cpu:
        found = charged(found, bounds, syncs, trace)
    give_back()
    return labelled(found, bounds, trace, host, events, carried, syncs, sites)


def _cut(gaps: pl.DataFrame, window: intervals.Spans) -> pl.DataFrame:
    """Return the parts of `gaps` that lie in `window`, in order; `gap` is their row, `begun_ns` where the whole gap began."""
    start, end = pl.col("start_ns"), pl.col("end_ns")
    known = gaps.with_columns(begun_ns=start)
    cut = [
        known.filter((start < last) & (end > first)).with_columns(start.clip(lower_bound=first), end.clip(upper_bound=last))
        for first, last in window.tolist()
    ]
    found = pl.concat([*cut, known.clear()]).rename({"id": "gap"}).sort("start_ns")
    return found.with_columns(row=pl.int_range(found.height, dtype=pl.Int64))


def _host_part(bounds: pl.DataFrame, host: Host, events: pl.DataFrame, told: intervals.Spans) -> pl.DataFrame:
    """Return the pieces of the host part of every gap, by what the threads that are responsible for it did."""
    parts = [pl.DataFrame(schema=PIECE)]
    for (lead,), rows in bounds.filter(pl.col("flight_ns") > pl.col("start_ns")).group_by("lead", maintain_order=True):
        threads = host.crew if lead == NOBODY or lead in host.crew else (int(lead),)
        parts.append(_of_threads(rows, threads, host, events, told if threads == host.crew else intervals.NONE))
    return pl.concat(parts)


def _of_threads(rows: pl.DataFrame, threads: tuple[int, ...], host: Host, events: pl.DataFrame, told: intervals.Spans) -> pl.DataFrame:
    """Return the pieces of the host part of gaps for which `threads` are responsible; `told`: pauses that a site window explains."""
    own = events.with_row_index("event").filter(pl.col("thread").is_null() | pl.col("thread").is_in(list(threads)))
    layers, numbers = [], []
    for cause in CAUSES:
        of_cause = own.filter(pl.col("cause") == cause)
        spans, chosen = outermost(of_cause["start_ns"].to_numpy(), of_cause["end_ns"].to_numpy())
        layers.append(intervals.union(spans))
        numbers.append((spans, of_cause["event"].to_numpy()[chosen].astype(np.int64)))
    in_flight = rows.select(start_ns="issued_ns", end_ns="flight_ns").drop_nulls()
    layers.append(intervals.union(np.concatenate((host.active(threads, host.close_ns), told, intervals.of(in_flight)))))
    host_part = rows.select("start_ns", pl.col("flight_ns").alias("end_ns")).to_numpy().astype(np.int64)
    cut = layered(host_part, layers)
    words = pl.Series([*CAUSES, "idle_launch", "idle_unexplained"])
    made = pl.DataFrame({"start_ns": cut.start, "end_ns": cut.end, "layer": cut.layer}).with_columns(
        gap=rows["gap"].gather(cut.row),
        lead=rows["lead"].gather(cut.row),
        cause=words.gather(cut.layer),
        sync=pl.lit(None, dtype=pl.Int64),
        evidence=pl.lit(None, dtype=pl.String),
        event=pl.Series(_events(cut.start, cut.end, cut.layer, numbers)).replace(-1, None),
    )
    return made.select(list(PIECE)).cast(PIECE)  # type: ignore[arg-type]


def _events(start: np.ndarray, end: np.ndarray, layer: np.ndarray, numbers: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return the event that holds most of each piece, -1 for the pieces without one."""
    found = np.full(len(start), -1, dtype=np.int64)
    for index, (spans, rows) in enumerate(numbers):
        chosen = layer == index
        if chosen.any():
            found[chosen] = most_held(start[chosen], end[chosen], spans, rows)[0]
    return found
