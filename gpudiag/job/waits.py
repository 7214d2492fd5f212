"""How long each rank waits in each matched message for others that arrive later, and how long the transfer takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl

from gpudiag.job.exposure import exposed_until
from gpudiag.job.match import Matches, empty_matched
from gpudiag.job.stack import BATCH_ROWS, CODES, NO_KIND, Stack, stacked
from gpudiag.model.rank import RankSummary
from gpudiag.trace.message_kinds import KINDS

FROM_ROOT = ("broadcast", "scatter")
"""The others wait for the root alone, and the root for nobody."""

TO_ROOT = ("reduce", "gather")
"""The root waits for all, the others for nobody."""


_RECORDED = ("rank", "step", "kind", "bytes", "source", "phase", "exposed_ns", "exposed_by", "start", "end")


def matched_table(summaries: Sequence[RankSummary], matches: Matches) -> pl.DataFrame:
    """Return the table MATCHED: each matched message on each rank, on the clock of the job's first rank."""
    stack = stacked(summaries)
    texts = pl.Series(
        "group", [group_text(group.members, pair=group.pair) for _, group in sorted(matches.groups.items())], dtype=pl.Categorical
    )
    arrivals = _arrivals(stack, matches)
    frames = [_of_ranks(stack, matches, at, arrivals, texts) for at in stack.batches()]
    return pl.concat([empty_matched(), *frames])


def of_ranks(matched: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Yield the rows of MATCHED of whole ranks, some BATCH_ROWS at a time."""
    matched = matched if matched["rank"].is_sorted() else matched.sort("rank", maintain_order=True)
    rank = matched["rank"].to_numpy()
    begin = 0
    for end in (*(np.flatnonzero(rank[1:] != rank[:-1]) + 1).tolist(), matched.height):
        if end - begin >= BATCH_ROWS or end == matched.height:
            yield matched.slice(begin, end - begin)
            begin = end


def call_table(matched: pl.DataFrame) -> pl.DataFrame:
    """Return the calls of `matched`: call, kind, group, size, rank and row of the first rank, bytes, skew, waiting, transfer, last, inside.

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


def group_text(members: Sequence[int], *, pair: bool = False) -> str:
    """Return '0,1,2', or 'source>target' of a pair."""
    return (">" if pair else ",").join(map(str, members))


def _batch(stack: Stack, matches: Matches, at: tuple[int, int]) -> pl.DataFrame:
    """Return the matched messages of some ranks (first row, number of rows), start and end on one clock (else null)."""
    recorded = stack.messages.slice(*at).select(_RECORDED)
    rows = recorded.with_columns(matches.rows.slice(*at).select("call", "group")).with_columns(
        pl.col("start").alias("start_ns"), pl.col("end").alias("end_ns"), pl.int_range(pl.len(), dtype=pl.Int32).over("rank").alias("row")
    )
    return matches.aligned.common(rows.drop_nulls("call"), "start", "end")


def _arrivals(stack: Stack, matches: Matches) -> pl.DataFrame:
    """Return of each call size, last (arrival; null: clocks cannot be compared) and root (when that arrived), by the number of the call."""
    rows = matches.rows.select("call", "rank", "source", "start").drop_nulls("call")
    rows = matches.aligned.common(rows, "start")
    found = rows.group_by("call").agg(
        pl.len().alias("size"), pl.when(pl.col("start").null_count() == 0).then(pl.col("start").max()).alias("last")
    )
    roots = rows.filter(pl.col("rank") == pl.col("source")).unique("call", keep="first", maintain_order=True)
    return found.join(roots.select("call", root="start"), on="call", how="left").sort("call")


def _with_waits(rows: pl.DataFrame, arrivals: pl.DataFrame) -> pl.DataFrame:
    """Return `rows` with size, wait and fresh: the wait less what earlier ones held."""
    rows = rows.with_columns(arrivals.select(pl.col("size", "last", "root").gather(rows["call"])))
    known = pl.col("source").is_not_null()
    from_root, to_root = (known & pl.col("kind").is_in([CODES[kind] for kind in kinds]) for kinds in (FROM_ROOT, TO_ROOT))
    is_root = pl.col("rank") == pl.col("source")
    until = pl.when(from_root).then("root").when(to_root & ~is_root).then("start").otherwise("last")
    until = pl.when(pl.col("last").is_not_null()).then(until)
    rows = rows.with_columns(wait=(until - pl.col("start")).clip(lower_bound=0))
    rows = rows.with_columns(
        pl.when(pl.col("wait") > pl.col("end") - pl.col("start")).then(pl.col("end") - pl.col("start")).otherwise("wait").alias("wait")
    )
    rows = rows.sort("rank", "start", nulls_last=True)
    until = pl.col("start") + pl.col("wait")
    held = until.cum_max().shift(1).over("rank")
    return rows.with_columns(fresh=(until - pl.max_horizontal("start", held)).clip(lower_bound=0))


def _of_ranks(stack: Stack, matches: Matches, at: tuple[int, int], arrivals: pl.DataFrame, texts: pl.Series) -> pl.DataFrame:
    """Return the rows of some ranks (first row, number of rows) as in MATCHED; `texts`: of the groups."""
    rows = _with_waits(_batch(stack, matches, at), arrivals)
    kinds = pl.Series(KINDS, dtype=pl.Categorical)
    rows = rows.with_columns(exposed_wait_ns=_exposed(rows))
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


def _exposed(messages: pl.DataFrame) -> pl.Expr:
    """Return the exposed part of each wait; of waits in several messages at once, what the earlier one holds counts there."""
    share = pl.when(pl.col("wait") > 0).then(pl.col("fresh") / pl.col("wait")).otherwise(0.0)
    found = (exposed_until(messages, pl.col("wait")) * share).round().cast(pl.Int64)
    return pl.when(pl.col("wait").is_not_null()).then(found)
