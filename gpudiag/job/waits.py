"""How long each rank waits in each matched message for others that arrive later, and how long the transfer takes."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from gpudiag.job.exposure import exposed_until
from gpudiag.job.match import MATCHED, Matches
from gpudiag.job.stack import CODES
from gpudiag.model.rank import RankSummary

FROM_ROOT = ("broadcast", "scatter")
"""The others wait for the root alone, and the root for nobody."""

TO_ROOT = ("reduce", "gather")
"""The root waits for all, the others for nobody."""


def matched_table(summaries: Sequence[RankSummary], matches: Matches) -> pl.DataFrame:
    """Return the table MATCHED: each matched message on each rank, on the clock of the job's first rank."""
    rows = matches.rows.drop_nulls("call").drop("party", "seq", "number", "bytes")
    rows = _with_waits(matches.aligned.common(rows, "start", "end"))
    texts = {number: group_text(group.members, pair=group.pair) for number, group in matches.groups.items()}
    parts = rows.partition_by("rank", as_dict=True, include_key=True)
    frames = [_of_rank(parts[summary.rank,], summary, texts, matches.base_ns) for summary in summaries if (summary.rank,) in parts]
    schema = {column.name: column.dtype for column in MATCHED}
    return pl.concat([pl.DataFrame(schema=schema), *frames], rechunk=True)


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


def _with_waits(rows: pl.DataFrame) -> pl.DataFrame:
    """Return `rows` (start and end on one clock, else null) with size, wait and fresh: the wait less what earlier ones held."""
    arrivals = rows.group_by("call").agg(
        pl.len().alias("size"),
        pl.when(pl.col("start").null_count() == 0).then(pl.col("start").max()).alias("last"),
        pl.col("start").filter(pl.col("rank") == pl.col("source")).first().alias("root"),
    )
    rows = rows.join(arrivals, on="call", how="left")
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


def _of_rank(rows: pl.DataFrame, summary: RankSummary, texts: dict[int, str], base_ns: int) -> pl.DataFrame:
    """Return the rows of one rank as in MATCHED, with the text of its own messages."""
    own = summary.messages[rows["row"].cast(pl.Int64).to_numpy()]
    exposed = own.with_columns(rows["wait"], rows["fresh"]).select(_exposed(own))["exposed_wait_ns"]
    return rows.select(
        "call",
        pl.col("rank").cast(pl.Int64),
        pl.col("row").cast(pl.Int64),
        pl.col("step").cast(pl.Int64),
        own["kind"],
        pl.col("group").replace_strict(texts, return_dtype=pl.String),
        pl.col("size").cast(pl.Int64),
        own["bytes"],
        own["phase"],
        (pl.col("start") + base_ns).alias("arrival_ns"),
        (pl.col("end") + base_ns).alias("end_ns"),
        pl.col("wait").alias("wait_ns"),
        exposed,
        (pl.col("end") - pl.col("start") - pl.col("wait")).alias("transfer_ns"),
    )


def _exposed(messages: pl.DataFrame) -> pl.Expr:
    """Return the exposed part of each wait; of waits in several messages at once, what the earlier one holds counts there."""
    share = pl.when(pl.col("wait") > 0).then(pl.col("fresh") / pl.col("wait")).otherwise(0.0)
    found = (exposed_until(messages, pl.col("wait")) * share).round().cast(pl.Int64)
    return pl.when(pl.col("wait").is_not_null()).then(found).alias("exposed_wait_ns")
