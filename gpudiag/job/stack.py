"""The messages of all ranks under one another, in numbers: what matching and clocks are told from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from gpudiag.model.rank import RankSummary
from gpudiag.trace.message_kinds import KINDS

BETWEEN = "\x1f"
"""Stands between the parts of a party's text; process groups have no such names."""

STACK = {
    "rank": pl.Int32(), "row": pl.Int32(), "party": pl.Int32(), "kind": pl.Int8(), "bytes": pl.Int64(), "seq": pl.Int64(),
    "source": pl.Int32(), "step": pl.Int32(), "number": pl.Int64(), "start": pl.Int64(), "end": pl.Int64(),
}  # fmt: skip

EVEN = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")
"""Kinds whose tensor is as large on all ranks: their bytes tell calls apart."""

CODES = {kind: code for code, kind in enumerate(KINDS)}
NO_KIND = -1


class Stack:
    """Messages of all ranks (table STACK) and the parties that they name; `party` is an index into `parties`, -1: none is named."""

    def __init__(self, summaries: Sequence[RankSummary]) -> None:
        self._of: dict[str, int] = {}
        self.base_ns = min((int(each.messages["start_ns"].min()) for each in summaries if each.messages.height), default=0)  # type: ignore[arg-type]
        frames = [self._taken(summary) for summary in summaries]
        self.rows = pl.concat([pl.DataFrame(schema=STACK), *frames], rechunk=True)

    @property
    def parties(self) -> list[str]:
        """Return the texts of the parties: 'P', source and target of a pair, or 'G', name, members and size of a group."""
        return list(self._of)

    def _taken(self, summary: RankSummary) -> pl.DataFrame:
        """Return the messages of one rank. Times count from base_ns; bytes are 0 where they do not tell calls apart."""
        found = summary.messages
        number = summary.steps["number"].gather(found["step"]) if found.height else pl.Series("number", [], dtype=pl.Int64)
        even = pl.col("kind").is_in(list(EVEN))
        kind = pl.col("kind").replace_strict(CODES, default=NO_KIND, return_dtype=pl.Int8).fill_null(NO_KIND)
        return found.select(
            pl.lit(summary.rank, dtype=pl.Int32).alias("rank"),
            pl.int_range(pl.len(), dtype=pl.Int32).alias("row"),
            pl.Series("party", self._parties(found), dtype=pl.Int32),
            kind.alias("kind"),
            pl.when(even).then("bytes").otherwise(0).fill_null(0).alias("bytes"),
            "seq",
            pl.col("source").cast(pl.Int32),
            pl.col("step").cast(pl.Int32),
            number,
            (pl.col("start_ns") - self.base_ns).alias("start"),
            (pl.col("end_ns") - self.base_ns).alias("end"),
        )

    def _parties(self, messages: pl.DataFrame) -> np.ndarray:
        texts = messages.select(_party_text().alias("party"))["party"]
        distinct = texts.drop_nulls().unique().sort()
        numbers = np.array([*(self._of.setdefault(text, len(self._of)) for text in distinct.to_list()), -1], dtype=np.int64)
        found: np.ndarray = numbers[texts.rank("dense").cast(pl.Int64).fill_null(0).to_numpy() - 1]
        return found


def _party_text() -> pl.Expr:
    """Return what a message says about who takes part; null where it says nothing and its kind is not told either."""
    given = [pl.col(name).cast(pl.String).fill_null("") for name in ("group", "members", "size")]
    group = pl.concat_str([pl.lit("G"), *given], separator=BETWEEN)
    pair = pl.concat_str([pl.lit("P"), pl.col("source").cast(pl.String), pl.col("target").cast(pl.String)], separator=BETWEEN)
    named = pl.col("kind").is_not_null() | pl.col("group").is_not_null() | pl.col("members").is_not_null()
    return pl.when(pl.col("kind") == "point_to_point").then(pair).when(named).then(group)
