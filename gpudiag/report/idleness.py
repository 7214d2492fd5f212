"""Report rows about why the device was idle: places by cause, calls that wait, what changes would give."""

from __future__ import annotations

import polars as pl

from gpudiag.attribution.names import text, texts
from gpudiag.facts.idle_places import by_place, split_site
from gpudiag.facts.replayed import Replays
from gpudiag.facts.window import Window
from gpudiag.model.analysis import Analysis
from gpudiag.model.breakdown import IDLE_BUCKETS
from gpudiag.model.replay import WhatIf
from gpudiag.model.report import IdleRow, SyncRow

MAX_IDLE_ROWS = 50
MAX_SYNC_ROWS = 50
WORTH_TELLING = 0.01
"""Least gain of a what-if that stands in a report."""


def idle_rows(window: Window) -> tuple[IdleRow, ...]:
    """Return the idle time of the analysed steps by cause and place, the largest first."""
    rows = by_place(window.idle, window.analysis.trace.ops).head(MAX_IDLE_ROWS)
    assert rows["cause"].is_in(IDLE_BUCKETS).all(), "an idle cause without a bucket"  # noqa: S101
    return tuple(
        IdleRow(cause=cause, count=count, idle_ns=time, op=op, file=file, line=line, evidence=evidence)
        for cause, count, time, op, evidence, site in rows.select("cause", "count", "time_ns", "op", "evidence", "site").iter_rows()
        for file, line in [split_site(site)]
    )


def sync_rows(analysis: Analysis) -> tuple[SyncRow, ...]:
    """Return the calls of the analysed steps that waited for the device by call, op and place; the most costly first."""
    if analysis.syncs is None:
        return ()
    ids = analysis.steps.filter("analysed")["id"]
    ops = texts(analysis.trace.ops["name"])
    found = analysis.syncs.filter(pl.col("step").is_in(ids.implode()) & ((pl.col("waited_ns") > 0) | (pl.col("cost_ns").fill_null(0) > 0)))
    found = found.with_columns(text("api"), op_name=pl.lit(ops.gather(found["op"])))
    rows = found.group_by("api", "op_name", "site").agg(
        pl.len().alias("count"),
        (pl.col("end_ns") - pl.col("start_ns")).sum().alias("wall_ns"),
        pl.col("waited_ns").sum(),
        pl.col("cost_ns").fill_null(0).sum(),
    )
    order = ["cost_ns", "wall_ns", "api", "op_name", "site"]
    rows = rows.sort(order, descending=[True, True, False, False, False], nulls_last=True).head(MAX_SYNC_ROWS)
    columns = ("api", "op_name", "count", "wall_ns", "waited_ns", "cost_ns", "site")
    return tuple(
        SyncRow(api=api, op=op, count=count, wall_ns=wall, waited_ns=waited, cost_ns=cost, file=file, line=line)
        for api, op, count, wall, waited, cost, site in rows.select(columns).iter_rows()
        for file, line in [split_site(site)]
    )


def what_ifs(replays: Replays) -> tuple[WhatIf, ...]:
    """Return the standard what-ifs that gain more than 1 %, the largest gain first."""
    return tuple(found for found in replays.standard if found.share > WORTH_TELLING)
