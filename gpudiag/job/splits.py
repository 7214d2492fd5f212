"""What one rank sends in uneven all-to-alls: summed up while its messages are at hand, for each splits its rows in its own way."""

from __future__ import annotations

import msgspec
import polars as pl


class Splits(msgspec.Struct, frozen=True):
    """Of the analysed steps of one rank."""

    sent: tuple[tuple[int, float], ...]
    """(other rank, bytes)."""
    missing: int
    """All-to-alls whose splits do not fit their group, or whose bytes were not recorded."""
    uneven: bool
    """Whether one is uneven on the way out or in."""


def find_splits(messages: pl.DataFrame, rank: int) -> Splits | None:
    """Return what `rank` sends by the rows that it has for each member; None where none of its messages (schema MESSAGES) says splits."""
    if all(messages[name].null_count() == messages.height for name in ("in_splits", "out_splits")):
        return None
    rows = messages.filter((pl.col("kind") == "all_to_all") & pl.col("step").is_not_null())
    uneven = bool(rows.select(pl.any_horizontal(pl.col("in_splits", "out_splits").is_not_null()).any()).item())
    rows = rows.drop_nulls(["members", "in_splits"])
    split = rows.select(
        pl.col("in_splits").str.split(",").cast(pl.List(pl.Int64), strict=False).alias("rows"),
        pl.col("members").cast(pl.String).str.split(",").cast(pl.List(pl.Int64), strict=False).alias("other"),
        sent_bytes().alias("bytes"),
    )
    fits = (pl.col("rows").list.len() == pl.col("other").list.len()) & pl.col("bytes").is_not_null()
    split = split.with_columns(whole=pl.col("rows").list.sum()).filter(fits)
    parts = split.filter(pl.col("whole") > 0).explode("rows", "other").filter(pl.col("other") != rank)
    sums = parts.group_by("other").agg((pl.col("bytes") * pl.col("rows") / pl.col("whole")).sum().alias("bytes")).sort("other")
    return Splits(tuple(sums.iter_rows()), rows.height - split.height, uneven)


def sent_bytes() -> pl.Expr:
    """Return the bytes that a rank sends in an all-to-all: its part of the recorded ones, of the larger of both ways."""
    share = pl.col("sent") / pl.max_horizontal("sent", "received", 1)
    return pl.col("bytes") * share.fill_null(1.0)
