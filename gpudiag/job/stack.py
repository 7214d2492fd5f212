"""The ranks of a job with their messages under one another, in as few bytes as they take: 500 ranks have some millions.

>>> pile = Pile()
>>> pile.add(summary)          # of each rank, as it comes: what its messages hold beyond the table is let go
>>> ranks = pile.stack()       # a sequence of summaries, by rank
>>> ranks.messages             # table MESSAGES_OF_ALL
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution.names import of_distinct
from gpudiag.job.keys import Ints, keys, runs, values
from gpudiag.job.splits import Splits, find_splits
from gpudiag.model.rank import MESSAGES, RankSummary
from gpudiag.trace.message_kinds import KINDS

BETWEEN = "\x1f"
"""Stands between the parts of a party's text; process groups have no such names."""

CODES = {kind: code for code, kind in enumerate(KINDS)}
NO_KIND = -1

BATCH_ROWS = 200_000
"""Rows of whole ranks that are worked on at a time: what a step of the work needs beside the table stays small."""

_WHOLE = ("step", "seq", "size", "bytes", "source", "target", "exposed_ns", "sent", "received")
"""Columns of whole numbers, kept in as few bytes as their values take."""

_WORDS = ("kind", "group", "members", "name", "phase")

_ENDS = (("source", "group"), ("target", "members"))
"""Columns that tell who takes part in a message of a pair, and of a group."""

_WIDTHS = (pl.Int8(), pl.Int16(), pl.Int32(), pl.Int64())

_EMPTY = pl.DataFrame(schema={column.name: column.dtype for column in MESSAGES})


class Stack(Sequence[RankSummary]):
    """The summaries of the ranks, by rank, without their messages; made by Pile or `stacked`.

    `messages` has the messages of all of them, by rank and start: rank, step, number (of the step in the training), kind (index into KINDS,
    NO_KIND), party (index into `parties`; -1: none is named), uneven (what an all-to-all sends stands in `splits`), start and end (since
    `base_ns`), and name, phase, seq, bytes, source, target, exposed_ns, exposed_by, sent, received as in MESSAGES.
    """

    def __init__(self, summaries: list[RankSummary], messages: pl.DataFrame, base_ns: int, splits: dict[int, Splits]) -> None:
        self._summaries = summaries
        self.base_ns = base_ns
        self.splits = splits
        """By rank: those that have uneven all-to-alls."""
        told, begins = np.unique(messages["rank"].to_numpy(), return_index=True)
        self.first: dict[int, int] = dict(zip(told.tolist(), begins.tolist(), strict=True))
        """By rank: its first row of `messages`."""
        party, self.parties = _parties(messages)
        """Texts: 'P', source and target of a pair, or 'G', name, members and size of a group."""
        self.messages = messages.drop("group", "members", "size").with_columns(party=party)

    def forget(self, *columns: str) -> None:
        """Let go of `columns` of the messages: nobody asks for them any more, and what follows needs the memory."""
        self.messages = self.messages.drop(columns)

    @overload
    def __getitem__(self, index: int) -> RankSummary: ...
    @overload
    def __getitem__(self, index: slice) -> list[RankSummary]: ...
    def __getitem__(self, index: int | slice) -> RankSummary | list[RankSummary]:
        """Return a summary, without its messages."""
        return self._summaries[index]

    def __len__(self) -> int:
        """Return the number of ranks."""
        return len(self._summaries)

    def batches(self) -> Iterator[tuple[int, int]]:
        """Yield (first row, number of rows) of whole ranks, some BATCH_ROWS at a time."""
        begin = 0
        for end in (*list(self.first.values())[1:], self.messages.height):
            if end - begin >= BATCH_ROWS or begin < end == self.messages.height:
                yield begin, end - begin
                begin = end


def stacked(summaries: Iterable[RankSummary]) -> Stack:
    """Return the ranks of a job with their messages under one another."""
    if isinstance(summaries, Stack):
        return summaries
    pile = Pile()
    for summary in summaries:
        pile.add(summary)
    return pile.stack()


class Pile:
    """Summaries as they come."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[RankSummary, dict[str, pl.Series], int]] = {}
        self._twice: list[RankSummary] = []
        self._splits: dict[int, Splits] = {}

    def add(self, summary: RankSummary) -> None:
        """Take the summary of one rank."""
        found, small = summary.messages, msgspec.structs.replace(summary, messages=_EMPTY)
        if summary.rank in self._parts:
            self._twice.append(small)
            return
        zero = int(found["start_ns"].min() or 0)  # type: ignore[arg-type]
        self._parts[summary.rank] = (small, _columns(found, summary.steps["number"], zero), zero)
        splits = find_splits(found, summary.rank)
        if splits is not None:
            self._splits[summary.rank] = splits

    def stack(self) -> Stack:
        """Return all of them; nothing can be added any more."""
        parts = [self._parts[rank] for rank in sorted(self._parts)]
        base = min((zero for _, columns, zero in parts if len(columns["start"])), default=0)
        heights = [len(columns["start"]) for _, columns, _ in parts]
        ranks = np.repeat(np.array([summary.rank for summary, _, _ in parts], dtype=np.int32), heights)
        later = np.repeat(np.array([zero - base for _, _, zero in parts], dtype=np.int64), heights)
        made = {"rank": pl.Series("rank", ranks)}
        for name, nothing in _columns(_EMPTY, pl.Series(dtype=pl.Int64), 0).items():
            made[name] = _under_one_another([nothing, *(columns.pop(name) for _, columns, _ in parts)])
        for name in ("start", "end"):
            made[name] = made[name].cast(pl.Int64) + pl.Series(later)
        made["kind"] = _codes(made["kind"])
        summaries = sorted((*(summary for summary, _, _ in parts), *self._twice), key=lambda summary: summary.rank)
        return Stack(summaries, pl.DataFrame(list(made.values())), base, self._splits)


def _columns(found: pl.DataFrame, numbers: pl.Series, zero: int) -> dict[str, pl.Series]:
    """Return the columns of the messages of one rank that are kept, small; `numbers`: of its steps. Times count from `zero`."""
    number = numbers.gather(found["step"]) if found.height else pl.Series(dtype=pl.Int64)
    made = {name: found[name].shrink_dtype() for name in _WHOLE} | {"number": number.alias("number").shrink_dtype()}
    made |= {name: found[name] for name in (*_WORDS, "exposed_by")}
    made |= {name: (found[f"{name}_ns"] - zero).alias(name).shrink_dtype() for name in ("start", "end")}
    split = found["in_splits"].is_not_null() & found["members"].is_not_null() & (found["kind"] == "all_to_all").fill_null(False)
    return made | {"uneven": split.alias("uneven")}


def _under_one_another(parts: list[pl.Series]) -> pl.Series:
    """Return one column; whole numbers of as many bytes as the longest needs."""
    if parts[0].dtype.is_integer():
        wide = max((part.dtype for part in parts), key=_WIDTHS.index)
        parts = [part.cast(wide) for part in parts]
    return pl.concat(parts, rechunk=True)


def _codes(kinds: pl.Series) -> pl.Series:
    found = of_distinct(kinds, lambda distinct: distinct.replace_strict(CODES, default=NO_KIND, return_dtype=pl.Int8))
    return found.fill_null(NO_KIND)


def _parties(messages: pl.DataFrame) -> tuple[pl.Series, list[str]]:
    """Return the party of each message, and the texts of the parties, those of the lowest ranks first.

    A text is made once for each party: the members of a large group are some thousand letters.
    """
    pair = (messages["kind"] == CODES["point_to_point"]).to_numpy()
    found = runs(keys(_naming(messages, pair)))
    begins = found.order[found.starts]
    texts = messages[begins].select("rank", _party_text().alias("text")).with_row_index("run").drop_nulls("text").sort("rank", "text")
    number = np.full(len(begins), -1, dtype=np.int32)
    number[texts["run"].to_numpy()] = np.arange(texts.height)
    party = np.empty(messages.height, dtype=np.int32)
    party[found.order] = np.repeat(number, found.lengths)
    return pl.Series("party", party).shrink_dtype(), texts["text"].to_list()


def _naming(messages: pl.DataFrame, pair: npt.NDArray[np.bool_]) -> Iterator[Ints]:
    """Yield what names a party: the ends of a pair, name, members and size of a group; and whether there is any name."""
    told = (messages["kind"] != NO_KIND).to_numpy()
    both = np.ones(messages.height, dtype=bool)
    for of_pair, of_group in _ENDS:
        end = np.where(pair, values(messages[of_pair], -1), values(messages[of_group], -1))
        told, both = told | (end >= 0), both & (end >= 0)
        yield end
    yield np.where(pair, -1, values(messages["size"], -1))
    yield np.where(pair, 2 * both, told).astype(np.int64)


def _party_text() -> pl.Expr:
    """Return what a message says about who takes part; null where it says nothing and its kind is not told either."""
    given = [pl.col(name).cast(pl.String).fill_null("") for name in ("group", "members", "size")]
    group = pl.concat_str([pl.lit("G"), *given], separator=BETWEEN)
    pair = pl.concat_str([pl.lit("P"), pl.col("source").cast(pl.String), pl.col("target").cast(pl.String)], separator=BETWEEN)
    named = (pl.col("kind") != NO_KIND) | pl.col("group").is_not_null() | pl.col("members").is_not_null()
    return pl.when(pl.col("kind") == CODES["point_to_point"]).then(pair).when(named).then(group)
