"""The matched messages: how long each rank waits in them, how long the transfer takes, and the bandwidth of each kind and group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from gpudiag.arrays import Ints
from gpudiag.facts.communication import ONE_MACHINE
from gpudiag.job.message_matching import EMPTY_MATCHED, Matches
from gpudiag.job.message_table import BATCH_ROWS, CODES, NO_KIND, PARTY_SEPARATOR, MessageTable, measure_sent_bytes, stack_summaries
from gpudiag.job.rank_summary import measure_exposed_until
from gpudiag.model.analysis import RankSummary
from gpudiag.model.job import MOST_SQUARE, MessageRow, Traffic
from gpudiag.trace.collectives import MESSAGE_KINDS, compute_bandwidths

FROM_ROOT = ("broadcast", "scatter")
"""The others wait for the root alone, and the root for nobody."""

TO_ROOT = ("reduce", "gather")
"""The root waits for all, the others for nobody."""


_RECORDED = ("rank", "step", "kind", "bytes", "source", "phase", "exposed_ns", "exposed_by", "start", "end")


def build_matched(summaries: Sequence[RankSummary], matches: Matches) -> pl.DataFrame:
    """Build the table MATCHED: each matched message on each rank, on the clock of the job's first rank."""
    stack = stack_summaries(summaries)
    texts = pl.Series(
        "group", [format_group(group.members, pair=group.pair) for _, group in sorted(matches.groups.items())], dtype=pl.Categorical
    )
    # Of each call size, last (arrival; null: clocks cannot be compared) and root (when that arrived), by the number of the call
    rows = matches.rows.select("call", "rank", "source", "start").drop_nulls("call")
    rows = matches.aligned.common(rows, "start")
    found = rows.group_by("call").agg(
        pl.len().alias("size"), pl.when(pl.col("start").null_count() == 0).then(pl.col("start").max()).alias("last")
    )
    roots = rows.filter(pl.col("rank") == pl.col("source")).unique("call", keep="first", maintain_order=True)
    arrivals = found.join(roots.select("call", root="start"), on="call", how="left").sort("call")
    frames = [_build_rank_rows(stack, matches, at, arrivals, texts) for at in stack.batches()]
    return pl.concat([EMPTY_MATCHED, *frames])


def iterate_ranks(matched: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Yield the rows of MATCHED of whole ranks, some BATCH_ROWS at a time."""
    matched = matched if matched["rank"].is_sorted() else matched.sort("rank", maintain_order=True)
    rank = matched["rank"].to_numpy()
    begin = 0
    for end in (*(np.flatnonzero(rank[1:] != rank[:-1]) + 1).tolist(), matched.height):
        if end - begin >= BATCH_ROWS or end == matched.height:
            yield matched.slice(begin, end - begin)
            begin = end


def build_calls(matched: pl.DataFrame) -> pl.DataFrame:
    """Build the calls of `matched`: call, kind, group, size, rank and row of the first rank, bytes, skew, waiting, transfer, last, inside.

    skew, waiting (mean), transfer and last (the rank that arrived last, of several the lowest) are null where clocks cannot be compared;
    inside: all ranks made it in an analysed step.
    """
    last = pl.col("arrival_ns").max()
    comparable = pl.col("arrival_ns").null_count() == 0
    return matched.group_by("call", maintain_order=True).agg(
        pl.col("kind", "group", "size", "rank", "row").first(),
        pl.col("bytes").max(),
        pl.when(comparable).then(last - pl.col("arrival_ns").min()).alias("skew"),
        pl.when(comparable).then(pl.col("wait_ns").mean()).alias("waiting"),
        pl.when(comparable).then(pl.col("end_ns").max() - last).alias("transfer"),
        pl.when(comparable).then(pl.col("rank").get(pl.col("arrival_ns").arg_max())).alias("last"),
        (pl.col("step").null_count() == 0).alias("inside"),
    )


def format_group(members: Sequence[int], *, pair: bool = False) -> str:
    """Return '0,1,2', or 'source>target' of a pair."""
    return (">" if pair else ",").join(map(str, members))


def _build_rank_rows(stack: MessageTable, matches: Matches, at: tuple[int, int], arrivals: pl.DataFrame, texts: pl.Series) -> pl.DataFrame:
    recorded = stack.messages.slice(*at).select(_RECORDED)
    rows = recorded.with_columns(matches.rows.slice(*at).select("call", "group")).with_columns(
        pl.col("start").alias("start_ns"), pl.col("end").alias("end_ns"), pl.int_range(pl.len(), dtype=pl.Int32).over("rank").alias("row")
    )
    rows = matches.aligned.common(rows.drop_nulls("call"), "start", "end")
    # the wait: for the root, for all, or for nobody, and never longer than the message
    rows = rows.with_columns(arrivals.select(pl.col("size", "last", "root").gather(rows["call"])))
    known, length = pl.col("source").is_not_null(), pl.col("end") - pl.col("start")
    from_root, to_root = (known & pl.col("kind").is_in([CODES[kind] for kind in kinds]) for kinds in (FROM_ROOT, TO_ROOT))
    is_root = pl.col("rank") == pl.col("source")
    until = pl.when(from_root).then("root").when(to_root & ~is_root).then("start").otherwise("last")
    until = pl.when(pl.col("last").is_not_null()).then(until)
    rows = rows.with_columns(wait=(until - pl.col("start")).clip(lower_bound=0))
    rows = rows.with_columns(pl.when(pl.col("wait") > length).then(length).otherwise("wait").alias("wait"))
    # of waits in several messages at once, what the earlier one holds counts there
    rows = rows.sort("rank", "start", nulls_last=True)
    until = pl.col("start") + pl.col("wait")
    fresh = (until - pl.max_horizontal("start", until.cum_max().shift(1).over("rank"))).clip(lower_bound=0)
    share = pl.when(pl.col("wait") > 0).then(fresh / pl.col("wait")).otherwise(0.0)
    kinds = pl.Series(MESSAGE_KINDS, dtype=pl.Categorical)
    found = (measure_exposed_until(rows, pl.col("wait")) * share).round().cast(pl.Int64)
    rows = rows.with_columns(exposed_wait_ns=pl.when(pl.col("wait").is_not_null()).then(found))
    return rows.select(
        "call",
        "rank",
        "row",
        pl.col("step").cast(pl.Int32),
        kinds.gather(rows["kind"].replace(NO_KIND, None)).alias("kind"),
        texts.gather(rows["group"]),
        pl.col("size").cast(pl.Int32),
        pl.col("bytes").cast(pl.Int64),
        "phase",
        (pl.col("start") + stack.base_ns).alias("arrival_ns"),
        (pl.col("end") + stack.base_ns).alias("end_ns"),
        pl.col("wait").alias("wait_ns"),
        "exposed_wait_ns",
        (pl.col("end") - pl.col("start") - pl.col("wait")).alias("transfer_ns"),
    )


MOST_ROWS = 200
"""Kinds and groups that are told, those that take most time; a job of a thousand ranks has as many pairs."""

ABOVE_ERROR = 5
"""A bandwidth is told where the transfer takes at least this many times the clocks' error: it is then right within a fifth or so."""


def build_message_rows(summaries: Sequence[RankSummary], matches: Matches, calls: pl.DataFrame) -> tuple[tuple[MessageRow, ...], int]:
    """Build the rows, those that take most time first, and how many more there are. `calls`: see job.messages.

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
    # and the calls of single ranks in the analysed steps without a partner on every other rank
    single = matches.rows.filter(pl.col("call").is_null() & pl.col("step").is_not_null())
    single = single.group_by("kind", "group").agg(pl.len().alias("unmatched"))
    texts = {number: format_group(group.members, pair=group.pair) for number, group in matches.groups.items()}
    kind = pl.col("kind").replace_strict({code: kind for kind, code in CODES.items()}, default=None, return_dtype=pl.String)
    text = pl.col("group").replace_strict(texts, default=None, return_dtype=pl.String) if texts else pl.lit(None, dtype=pl.String)
    single = single.with_columns(kind.alias("kind"), text.alias("group")).group_by("kind", "group").agg(pl.col("unmatched").sum())
    found = found.join(single, on=["kind", "group"], how="full", coalesce=True, nulls_equal=True)
    time = (pl.col("waiting") + pl.col("transfer")) * pl.col("count")
    found = found.sort([time.fill_null(-1), pl.col("unmatched"), pl.col("kind"), pl.col("group")], descending=[True, True, False, False])
    stack = stack_summaries(summaries)
    of_rank = {summary.rank: summary for summary in stack}
    error = matches.aligned.clocks.error_ns
    rows = []
    for row in found.head(MOST_ROWS).iter_rows(named=True):
        name = stack.messages["name"][stack.first[row["rank"]] + int(row["row"])] if row["count"] else None  # of the first message
        rows.append(_build_message_row(row, of_rank, name or "", error))
    return tuple(rows), max(0, found.height - MOST_ROWS)


def _build_message_row(found: dict[str, Any], of_rank: dict[int, RankSummary], name: str, error_ns: int | None) -> MessageRow:
    text = found["group"] or ""
    members = tuple(int(rank) for rank in text.replace(">", ",").split(",")) if text else ()
    kind, unmatched = found["kind"] or "not told", int(found["unmatched"] or 0)
    if not found["count"]:
        return MessageRow(kind=kind, group=text, members=members, unmatched=unmatched)
    size = None if found["bytes"] is None else round(found["bytes"])
    time = round(found["transfer"])
    algorithm, bus = None, None
    if size is not None and error_ns is not None and time >= ABOVE_ERROR * error_ns and all(rank in of_rank for rank in members):
        sort = "send" if found["kind"] == "point_to_point" else found["kind"] or ""
        algorithm, bus = compute_bandwidths(sort, size, len(members), time) or (None, None)
    # the rate of the slowest link of the members in byte/s; None where it is not known, or they are on several machines. Where
    # machines are not recorded a group as large as one machine holds counts as on one (as in fact link_bytes_per_second)
    ranks = [of_rank[rank] for rank in members if rank in of_rank]
    hosts = {summary.host for summary in ranks}
    apart = len(hosts) > 1 or (hosts == {""} and len(members) > ONE_MACHINE)
    rates = [summary.link_byte_per_s for summary in ranks]
    known = [rate for rate in rates if rate]
    link = min(known) if known and len(known) == len(rates) and not apart else None
    return MessageRow(
        kind=kind,
        name=name,
        group=text,
        members=members,
        count=int(found["count"]),
        unmatched=unmatched,
        bytes=size,
        skew_ns=round(found["skew"]),
        skew_p95_ns=round(found["skew_p95"]),
        waiting_ns=round(found["waiting"]),
        transfer_ns=max(0, time),
        algbw_byte_per_s=algorithm,
        busbw_byte_per_s=bus,
        link_share=bus / link if bus is not None and link else None,
        last_rank=int(found["last"]),
        last_share=float(found["last_share"]),
    )


_EVEN_FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""Parts of S/n that a rank has for each other rank of its group."""

_KEYS = ("rank", "kind", "party", "source", "target")


_NOBODY: Ints = np.empty(0, dtype=np.int64)


class _Sent(NamedTuple):
    rank: int
    begin: int
    """The sender: this rank, or one that was not read."""
    others: Ints
    size: float
    untold: int
    """Messages that do not tell whom or how much they send."""


def find_traffic(summaries: Sequence[RankSummary], world: int | None) -> Traffic | None:
    """Find the bytes of a mean step from rank to rank (blocks of ranks above MOST_SQUARE); None where no message tells its bytes.

    `world`: ranks of the job. Each rank tells what it sends; what it receives counts where the sender was not read.
    """
    stack = stack_summaries(summaries)
    read = {summary.rank for summary in stack}
    ranks = max(world or 0, max(read, default=0) + 1)
    block = 1  # neighbours that are one row: as many as it takes for at most MOST_SQUARE; a power of two, as nodes have
    while -(-ranks // block) > MOST_SQUARE:
        block *= 2
    square, missing = np.zeros((-(-ranks // block),) * 2), 0
    steps = {summary.rank: summary.steps.height for summary in stack}
    uneven = [_Sent(rank, rank, _NOBODY, 0.0, split.missing) for rank, split in stack.splits.items()]
    uneven += [_Sent(rank, rank, np.array([other]), size, 0) for rank, split in stack.splits.items() for other, size in split.sent]
    for rank, begin, others, size, untold in (*_list_even(stack, read), *uneven):
        if not steps[rank]:
            continue
        missing += untold
        there = others[(others >= 0) & (others < ranks)]
        if 0 <= begin < ranks:
            square[begin // block] += np.bincount(there // block, minlength=len(square)) * (size / steps[rank])
    if not square.any():
        return None
    last = [min(first + block, ranks) - 1 for first in range(0, ranks, block)]
    names = (str(to) if block == 1 or to == number * block else f"{number * block}-{to}" for number, to in enumerate(last))
    table = tuple(tuple(round(value) for value in row) for row in square.tolist())
    notes, unread = ["collectives as nccl-tests counts them, spread evenly over the ranks of their group"], ranks - len(read)
    if missing:
        notes.append(f"{missing:,} {'message' if missing == 1 else 'messages'} without recorded bytes or ranks not counted")
    if unread > 0:
        notes.append(f"what {unread:,} {'rank' if unread == 1 else 'ranks'} sent that could not be read is not counted")
    return Traffic(ranks=tuple(names), bytes=table, note="; ".join(notes))


def _list_even(stack: MessageTable, read: set[int]) -> Iterator[_Sent]:
    """Yield what the ranks sent in the analysed steps, without uneven all-to-alls.

    And without what other ranks that were read sent to this one alone: they tell it.
    """
    groups = []  # the ranks of each group as recorded; none for a pair
    for sort, rest in (party.split(PARTY_SEPARATOR, 1) for party in stack.parties):
        members = rest.rsplit(PARTY_SEPARATOR, 2)[1] if sort == "G" else ""
        groups.append(np.array([int(rank) for rank in members.split(",")], dtype=np.int64) if members else _NOBODY)
    asked = stack.messages.select(*_KEYS, "bytes", "step", "uneven", "sent", "received")
    asked = asked.filter(pl.col("step").is_not_null() & ~pl.col("kind").is_in([NO_KIND, CODES["barrier"]]) & ~pl.col("uneven"))
    received = (pl.col("kind") == CODES["point_to_point"]) & (pl.col("source") != pl.col("rank")) & pl.col("source").is_in(list(read))
    asked = asked.filter(~received.fill_null(False))
    whole = pl.col("bytes").cast(pl.Float64)
    size = pl.when(pl.col("kind") == CODES["all_to_all"]).then(measure_sent_bytes()).otherwise(whole).alias("bytes")
    sums = (pl.col("bytes").sum(), pl.col("bytes").null_count().alias("untold"), pl.len().alias("count"))
    summed = asked.with_columns(size).group_by(_KEYS).agg(sums).sort(_KEYS)
    for rank, kind, party, source, target, total, untold, count in summed.iter_rows():
        sent = _split_sent(rank, MESSAGE_KINDS[kind], groups[party] if party >= 0 else _NOBODY, (source, target))
        if sent is None:
            yield _Sent(rank, rank, _NOBODY, 0.0, count)
        else:
            begin, others, part = sent
            yield _Sent(rank, begin, others, part * total, untold)


def _split_sent(rank: int, kind: str, group: Ints, ends: tuple[int | None, int | None]) -> tuple[int, Ints, float] | None:
    source, target = ends
    if kind == "point_to_point":
        return None if source is None or target is None or source == target else (source, np.array([target]), 1.0)
    if rank not in group:
        return None
    others = group[group != rank]
    if kind in _EVEN_FACTORS:
        return rank, others, _EVEN_FACTORS[kind] / len(group)
    if kind not in ("broadcast", "scatter", "reduce", "gather") or source is None:
        return None
    part = 1.0 if kind in ("broadcast", "reduce") else 1 / len(group)
    if kind in ("broadcast", "scatter"):
        return rank, others if rank == source else _NOBODY, part
    return rank, np.array([source]) if rank != source else _NOBODY, part
