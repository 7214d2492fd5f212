"""How each kind of message of each group went on all of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from gpudiag.facts.link_rate import ONE_MACHINE
from gpudiag.job.match import Matches
from gpudiag.job.stack import CODES, Stack, stacked
from gpudiag.job.waits import group_text
from gpudiag.model.job import MessageRow
from gpudiag.model.rank import RankSummary
from gpudiag.roofline.costs.collectives import bandwidths

MOST_ROWS = 200
"""Kinds and groups that are told, those that take most time; a job of a thousand ranks has as many pairs."""

ABOVE_ERROR = 5
"""A bandwidth is told where the transfer takes at least this many times the clocks' error: it is then right within a fifth or so."""

_NO_KIND = "not told"


def message_rows(summaries: Sequence[RankSummary], matches: Matches, calls: pl.DataFrame) -> tuple[tuple[MessageRow, ...], int]:
    """Return the rows, those that take most time first, and how many more there are. `calls`: see job.waits.

    They are of calls whose arrivals can be compared and that all ranks made in analysed steps.
    """
    found = (
        calls.filter(pl.col("inside"))
        .drop_nulls("last")
        .group_by("kind", "group")
        .agg(
            pl.len().alias("count"),
            pl.col("bytes").mean(),
            pl.col("skew").median(),
            pl.col("skew").quantile(0.95, interpolation="nearest").alias("skew_p95"),
            pl.col("waiting").mean(),
            pl.col("transfer").mean(),
            pl.col("last").mode().sort().first(),
            (pl.col("last") == pl.col("last").mode().sort().first()).mean().alias("last_share"),
            pl.col("size").first(),
            pl.col("rank").first(),
            pl.col("row").first(),
        )
    )
    found = found.with_columns(pl.col("kind", "group").cast(pl.String))
    single = _unmatched(matches)
    found = found.join(single, on=["kind", "group"], how="full", coalesce=True, nulls_equal=True)
    time = (pl.col("waiting") + pl.col("transfer")) * pl.col("count")
    found = found.sort([time.fill_null(-1), pl.col("unmatched"), pl.col("kind"), pl.col("group")], descending=[True, True, False, False])
    stack = stacked(summaries)
    of_rank = {summary.rank: summary for summary in stack}
    error = matches.aligned.clocks.error_ns
    rows = tuple(_row(row, of_rank, _name(row, stack), error) for row in found.head(MOST_ROWS).iter_rows(named=True))
    return rows, max(0, found.height - MOST_ROWS)


def _unmatched(matches: Matches) -> pl.DataFrame:
    """Return (kind, group, unmatched): calls of single ranks in the analysed steps without a partner on every other rank."""
    single = matches.rows.filter(pl.col("call").is_null() & pl.col("step").is_not_null())
    counted = single.group_by("kind", "group").agg(pl.len().alias("unmatched"))
    kinds = {code: kind for kind, code in CODES.items()}
    texts = {number: group_text(group.members, pair=group.pair) for number, group in matches.groups.items()}
    kind = pl.col("kind").replace_strict(kinds, default=None, return_dtype=pl.String)
    text = pl.col("group").replace_strict(texts, default=None, return_dtype=pl.String) if texts else pl.lit(None, dtype=pl.String)
    counted = counted.with_columns(kind.alias("kind"), text.alias("group"))
    return counted.group_by("kind", "group").agg(pl.col("unmatched").sum())


def _name(found: dict[str, Any], stack: Stack) -> str:
    """Return the name of the first of the messages; '' where none was matched."""
    if not found["count"]:
        return ""
    return stack.messages["name"][stack.first[found["rank"]] + int(found["row"])] or ""


def _row(found: dict[str, Any], of_rank: dict[int, RankSummary], name: str, error_ns: int | None) -> MessageRow:
    text = found["group"] or ""
    members = tuple(int(rank) for rank in text.replace(">", ",").split(",")) if text else ()
    kind, unmatched = found["kind"] or _NO_KIND, int(found["unmatched"] or 0)
    if not found["count"]:
        return MessageRow(kind=kind, group=text, members=members, unmatched=unmatched)
    complete = all(rank in of_rank for rank in members)
    algorithm, bus = _bandwidths(found, len(members), error_ns) if complete else (None, None)
    link = _link(members, of_rank)
    return MessageRow(
        kind=kind,
        name=name,
        group=text,
        members=members,
        count=int(found["count"]),
        unmatched=unmatched,
        bytes=None if found["bytes"] is None else round(found["bytes"]),
        skew_ns=round(found["skew"]),
        skew_p95_ns=round(found["skew_p95"]),
        waiting_ns=round(found["waiting"]),
        transfer_ns=max(0, round(found["transfer"])),
        algbw_byte_per_s=algorithm,
        busbw_byte_per_s=bus,
        link_share=bus / link if bus is not None and link else None,
        last_rank=int(found["last"]),
        last_share=float(found["last_share"]),
    )


def _bandwidths(found: dict[str, Any], size: int, error_ns: int | None) -> tuple[float | None, float | None]:
    """Return algorithm and bus bandwidth in byte/s; None where the transfer is not well above the clocks' error or bytes are not known."""
    time = round(found["transfer"])
    if error_ns is None or found["bytes"] is None or time < ABOVE_ERROR * error_ns:
        return None, None
    told = bandwidths("send" if found["kind"] == "point_to_point" else found["kind"] or "", round(found["bytes"]), size, time)
    return told if told is not None else (None, None)


def _link(members: Sequence[int], of_rank: dict[int, RankSummary]) -> float | None:
    """Return the rate of the slowest link of the members in byte/s; None where it is not known, or they are on several machines.

    Where machines are not recorded a group as large as one machine holds counts as on one (as in fact link_bytes_per_second).
    """
    ranks = [of_rank[rank] for rank in members if rank in of_rank]
    hosts = {summary.host for summary in ranks}
    apart = len(hosts) > 1 or (hosts == {""} and len(members) > ONE_MACHINE)
    rates = [summary.link_byte_per_s for summary in ranks]
    known = [rate for rate in rates if rate]
    return min(known) if known and len(known) == len(rates) and not apart else None
