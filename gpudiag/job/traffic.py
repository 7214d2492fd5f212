"""Bytes that ranks have for each other in a mean step, whatever way the links take them.

Sent by each rank as nccl-tests counts (NVIDIA nccl-tests doc/PERFORMANCE.md): of the whole tensor S in a group of n, all_reduce
2(n-1)/n S, all_gather, reduce_scatter and an even all_to_all (n-1)/n S, spread evenly over the others. A root has S for each of the
others (broadcast) or a part of it (scatter), they have theirs for it (reduce S, gather S/n); uneven all_to_alls and point-to-point
messages have what was recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.job.message_table import CODES, NO_KIND, PARTY_SEPARATOR, MessageTable, measure_sent_bytes, stack_summaries
from gpudiag.model.analysis import RankSummary
from gpudiag.model.job import MOST_SQUARE, Traffic
from gpudiag.trace.collectives import MESSAGE_KINDS

_EVEN_FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""Parts of S/n that a rank has for each other rank of its group."""

_KEYS = ("rank", "kind", "party", "source", "target")

Ranks = npt.NDArray[np.int64]

_NOBODY: Ranks = np.empty(0, dtype=np.int64)


class _Sent(NamedTuple):
    rank: int
    begin: int
    """The sender: this rank, or one that was not read."""
    others: Ranks
    size: float
    """For each of `others`, in all steps."""
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


def _split_sent(rank: int, kind: str, group: Ranks, ends: tuple[int | None, int | None]) -> tuple[int, Ranks, float] | None:
    """Return (sender, receivers, the part of S that each gets) by what `rank` recorded; None where it does not tell."""
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
