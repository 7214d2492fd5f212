"""Bytes that ranks have for each other in a mean step, whatever way the links take them.

Sent by each rank as nccl-tests counts (NVIDIA nccl-tests doc/PERFORMANCE.md): of the whole tensor S in a group of n, all_reduce
2(n-1)/n S, all_gather, reduce_scatter and an even all_to_all (n-1)/n S, spread evenly over the others. A root has S for each of the
others (broadcast) or a part of it (scatter), they have theirs for it (reduce S, gather S/n); uneven all_to_alls and point-to-point
messages have what was recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from gpudiag.model.job import MOST_SQUARE, Traffic
from gpudiag.model.rank import RankSummary

_EVEN = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""Parts of S/n that a rank has for each other rank of its group."""

_ROOTED = ("broadcast", "scatter", "reduce", "gather")
_KEYS = ("kind", "members", "source", "target")


def find_traffic(summaries: Sequence[RankSummary], world: int | None) -> Traffic | None:
    """Return the bytes of a mean step from rank to rank (blocks of ranks above MOST_SQUARE); None where no message tells its bytes.

    `world`: ranks of the job. Each rank tells what it sends; what it receives counts where the sender was not read.
    """
    read = {summary.rank for summary in summaries}
    ranks = max(world or 0, max(read, default=0) + 1)
    block = _block(ranks)
    square, missing = np.zeros((-(-ranks // block),) * 2), 0
    for summary in summaries:
        parts, untold = _told(summary, read)
        missing += untold
        for begin, end, size in parts:
            if max(begin, end) < ranks:
                square[begin // block, end // block] += size
    if not square.any():
        return None
    names = (_name(first, min(first + block, ranks)) for first in range(0, ranks, block))
    table = tuple(tuple(round(value) for value in row) for row in square.tolist())
    return Traffic(ranks=tuple(names), bytes=table, note=_note(ranks - len(read), missing))


def _block(ranks: int) -> int:
    """Return how many neighbours are one row: as many as it takes for at most MOST_SQUARE; a power of two, as nodes have."""
    size = 1
    while -(-ranks // size) > MOST_SQUARE:
        size *= 2
    return size


def _name(first: int, after: int) -> str:
    return str(first) if after == first + 1 else f"{first}-{after - 1}"


def _told(summary: RankSummary, read: set[int]) -> tuple[list[tuple[int, int, float]], int]:
    """Return (sender, receiver, bytes of a mean step) by one rank, and how many of its messages do not tell whom or how much they send."""
    steps = summary.steps.height
    rows = summary.messages.filter(pl.col("step").is_not_null() & pl.col("kind").is_not_null() & (pl.col("kind") != "barrier"))
    if not steps or not rows.height:
        return [], 0
    rows = _sent_bytes(_own(rows, summary.rank, read))
    parts, missing = _uneven(rows.filter(pl.col("uneven").is_not_null()), summary.rank)
    even = rows.filter(pl.col("uneven").is_null()).group_by(_KEYS)
    summed = even.agg(pl.col("bytes").sum(), pl.col("bytes").null_count().alias("untold"), pl.len().alias("count"))
    for kind, members, source, target, size, untold, count in summed.iter_rows():
        group = [int(rank) for rank in members.split(",")] if members else []
        sent = _sent(summary.rank, kind, group, (source, target))
        missing += count if sent is None else untold
        parts += [(begin, end, part * size) for (begin, end), part in (sent or {}).items()]
    return [(begin, end, size / steps) for begin, end, size in parts], missing


def _own(rows: pl.DataFrame, rank: int, read: set[int]) -> pl.DataFrame:
    """Return the rows without what other ranks that were read sent to `rank` alone: they tell it."""
    received = (pl.col("kind") == "point_to_point") & (pl.col("source") != rank) & pl.col("source").is_in(list(read))
    return rows.filter(~received.fill_null(False))


def _sent_bytes(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows with `uneven` (rows for each member, null: even); bytes of an all_to_all are those that this rank sends."""
    exchange = pl.col("kind") == "all_to_all"
    share = (pl.col("sent") / pl.max_horizontal("sent", "received", 1)).fill_null(1.0)
    return rows.with_columns(
        pl.when(exchange & pl.col("members").is_not_null()).then("in_splits").alias("uneven"),
        (pl.col("bytes") * pl.when(exchange).then(share).otherwise(1.0)).alias("bytes"),
    )


def _uneven(rows: pl.DataFrame, rank: int) -> tuple[list[tuple[int, int, float]], int]:
    """Return (rank, other, bytes) of uneven all_to_alls by the rows that it has for each member, and how many do not fit their group."""
    split = rows.select(
        pl.col("uneven").str.split(",").cast(pl.List(pl.Int64), strict=False).alias("rows"),
        pl.col("members").str.split(",").cast(pl.List(pl.Int64), strict=False).alias("other"),
        "bytes",
    )
    fits = (pl.col("rows").list.len() == pl.col("other").list.len()) & pl.col("bytes").is_not_null()
    split = split.with_columns(whole=pl.col("rows").list.sum()).filter(fits)
    parts = split.filter(pl.col("whole") > 0).explode("rows", "other").filter(pl.col("other") != rank)
    sums = parts.group_by("other").agg((pl.col("bytes") * pl.col("rows") / pl.col("whole")).sum().alias("bytes"))
    return [(rank, other, size) for other, size in sums.iter_rows()], rows.height - split.height


def _sent(rank: int, kind: str, group: list[int], ends: tuple[int | None, int | None]) -> dict[tuple[int, int], float] | None:
    """Return the part of S that goes from rank to rank by what `rank` recorded; None where it does not tell."""
    source, target = ends
    if kind == "point_to_point":
        return None if source is None or target is None or source == target else {(source, target): 1.0}
    if rank not in group:
        return None
    others = [other for other in group if other != rank]
    if kind in _EVEN:
        return {(rank, other): _EVEN[kind] / len(group) for other in others}
    if kind not in _ROOTED or source is None:
        return None
    part = 1.0 if kind in ("broadcast", "reduce") else 1 / len(group)
    if kind in ("broadcast", "scatter"):
        return {(rank, other): part for other in others} if rank == source else {}
    return {(rank, source): part} if rank != source else {}


def _note(unread: int, missing: int) -> str:
    parts = ["collectives as nccl-tests counts them, spread evenly over the ranks of their group"]
    if missing:
        parts.append(f"{missing:,} {'message' if missing == 1 else 'messages'} without recorded bytes or ranks not counted")
    if unread > 0:
        parts.append(f"what {unread:,} {'rank' if unread == 1 else 'ranks'} sent that could not be read is not counted")
    return "; ".join(parts)
