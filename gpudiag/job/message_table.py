"""The messages of all ranks in one narrow table, filled as summaries arrive: 500 ranks have some millions.

>>> pile = Pile()
>>> pile.add(summary)          # of each rank, as it comes: what its messages hold beyond the table is let go
>>> ranks = pile.stack()       # a sequence of summaries, by rank
>>> ranks.messages             # table MESSAGES_OF_ALL
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.arrays import Bools, Ints
from gpudiag.attribution.names import map_distinct
from gpudiag.model.analysis import RANK_MESSAGES, RankSummary
from gpudiag.trace.collectives import MESSAGE_KINDS

Whole = npt.NDArray[np.signedinteger[Any]]
"""Whole numbers of any size."""

NO_VALUE = int(np.iinfo(np.int64).min)

_MOST_KEYS = 1 << 62


class KeyRuns(NamedTuple):
    """Rows with equal keys."""

    order: Ints
    starts: Ints
    lengths: Ints


def read_values(column: pl.Series | Whole, none: int = NO_VALUE) -> Ints:
    """Return whole numbers, or codes of categories, as int64; `none` for null."""
    if not isinstance(column, pl.Series):
        return column.astype(np.int64, copy=False)
    if isinstance(column.dtype, pl.Categorical):
        column = column.to_physical()
    found: Ints = column.cast(pl.Int64).fill_null(none).to_numpy()
    return found


def build_keys(columns: Iterable[Ints]) -> Ints:
    """Build a number for each row: equal where all `columns` are, and in their order. They are asked for one after the other."""
    found, span = np.zeros(1, dtype=np.int64), 1
    for column in columns:
        numbers, more = column, 1
        if len(column):
            least, most = int(column.min()), int(column.max())
            # Values within so many of each other are numbered by their distance from the least one, others by their order
            numbers, more = (column - least, most - least + 1) if most - least < 1 << 20 else _number_by_order(column)
        if span * more >= _MOST_KEYS:
            found, span = _number_by_order(found)
        found = found * more + numbers
        span *= more
    return found


def _number_by_order(column: Ints) -> tuple[Ints, int]:
    distinct, place = np.unique(column, return_inverse=True)
    return place.astype(np.int64, copy=False), len(distinct)


def find_runs(key: Ints) -> KeyRuns:
    """Find the rows of each distinct value of `key`."""
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1]))) if len(key) else np.empty(0, dtype=np.int64)
    return KeyRuns(order, starts, np.diff(np.append(starts, len(key))))


def count_before(found: KeyRuns) -> Ints:
    """Return of each row how many rows of the same key come before it."""
    turn = np.empty(len(found.order), dtype=np.int64)
    turn[found.order] = np.arange(len(found.order)) - np.repeat(found.starts, found.lengths)
    return turn


class Splits(msgspec.Struct, frozen=True):
    """Of the analysed steps of one rank."""

    sent: tuple[tuple[int, float], ...]
    """(other rank, bytes)."""
    missing: int
    """All-to-alls whose splits do not fit their group, or whose bytes were not recorded."""
    uneven: bool
    """Whether one is uneven on the way out or in."""


def find_splits(messages: pl.DataFrame, rank: int) -> Splits | None:
    """Find what `rank` sends by the rows that it has for each member; None where none of its messages (RANK_MESSAGES) says splits."""
    if all(messages[name].null_count() == messages.height for name in ("in_splits", "out_splits")):
        return None
    rows = messages.filter((pl.col("kind") == "all_to_all") & pl.col("step").is_not_null())
    uneven = bool(rows.select(pl.any_horizontal(pl.col("in_splits", "out_splits").is_not_null()).any()).item())
    rows = rows.drop_nulls(["members", "in_splits"])
    split = rows.select(
        pl.col("in_splits").str.split(",").cast(pl.List(pl.Int64), strict=False).alias("rows"),
        pl.col("members").cast(pl.String).str.split(",").cast(pl.List(pl.Int64), strict=False).alias("other"),
        measure_sent_bytes().alias("bytes"),
    )
    fits = (pl.col("rows").list.len() == pl.col("other").list.len()) & pl.col("bytes").is_not_null()
    split = split.with_columns(whole=pl.col("rows").list.sum()).filter(fits)
    parts = split.filter(pl.col("whole") > 0).explode("rows", "other").filter(pl.col("other") != rank)
    sums = parts.group_by("other").agg((pl.col("bytes") * pl.col("rows") / pl.col("whole")).sum().alias("bytes")).sort("other")
    return Splits(tuple(sums.iter_rows()), rows.height - split.height, uneven)


def measure_sent_bytes() -> pl.Expr:
    """Measure the bytes that a rank sends in an all-to-all: its part of the recorded ones, of the larger of both ways."""
    share = pl.col("sent") / pl.max_horizontal("sent", "received", 1)
    return pl.col("bytes") * share.fill_null(1.0)


PARTY_SEPARATOR = "\x1f"
"""Stands between the parts of a party's text; process groups have no such names."""

CODES = {kind: code for code, kind in enumerate(MESSAGE_KINDS)}
NO_KIND = -1

BATCH_ROWS = 200_000
"""Rows of whole ranks that are worked on at a time: what a step of the work needs beside the table stays small."""

_WHOLE = ("step", "seq", "size", "bytes", "source", "target", "exposed_ns", "sent", "received")
"""Columns of whole numbers, kept in as few bytes as their values take."""

_WORDS = ("kind", "group", "members", "name", "phase")

_ENDS = (("source", "group"), ("target", "members"))
"""Columns that tell who takes part in a message of a pair, and of a group."""

_INTEGER_TYPES = (pl.Int8(), pl.Int16(), pl.Int32(), pl.Int64())

_EMPTY = pl.DataFrame(schema={column.name: column.dtype for column in RANK_MESSAGES})


class MessageTable(Sequence[RankSummary]):
    """The summaries of the ranks, by rank, without their messages; made by `stack_summaries`.

    `messages` has the messages of all of them, by rank and start: rank, step, number (of the step in the training), kind (index into KINDS,
    NO_KIND), party (index into `parties`; -1: none is named), uneven (what an all-to-all sends stands in `splits`), start and end (since
    `base_ns`), and name, phase, seq, bytes, source, target, exposed_ns, exposed_by, sent, received as in RANK_MESSAGES.
    """

    def __init__(self, summaries: list[RankSummary], messages: pl.DataFrame, base_ns: int, splits: dict[int, Splits]) -> None:
        self._summaries = summaries
        self.base_ns = base_ns
        self.splits = splits
        """By rank: those that have uneven all-to-alls."""
        told, begins = np.unique(messages["rank"].to_numpy(), return_index=True)
        self.first: dict[int, int] = dict(zip(told.tolist(), begins.tolist(), strict=True))
        party, self.parties = _find_parties(messages)
        """Texts: 'P', source and target of a pair, or 'G', name, members and size of a group."""
        self.messages = messages.drop("group", "members", "size").with_columns(party=party)

    @overload
    def __getitem__(self, index: int) -> RankSummary: ...
    @overload
    def __getitem__(self, index: slice) -> list[RankSummary]: ...
    def __getitem__(self, index: int | slice) -> RankSummary | list[RankSummary]:
        return self._summaries[index]

    def __len__(self) -> int:
        return len(self._summaries)

    def batches(self) -> Iterator[tuple[int, int]]:
        """Yield (first row, number of rows) of whole ranks, some BATCH_ROWS at a time."""
        begin = 0
        for end in (*list(self.first.values())[1:], self.messages.height):
            if end - begin >= BATCH_ROWS or begin < end == self.messages.height:
                yield begin, end - begin
                begin = end


def stack_summaries(summaries: Iterable[RankSummary]) -> MessageTable:
    """Return the ranks of a job with their messages under one another."""
    if isinstance(summaries, MessageTable):
        return summaries
    pile = MessageTableBuilder()
    for summary in summaries:
        pile.add(summary)
    return pile.stack()


class MessageTableBuilder:
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
        self._parts[summary.rank] = (small, _build_columns(found, summary.steps["number"], zero), zero)
        splits = find_splits(found, summary.rank)
        if splits is not None:
            self._splits[summary.rank] = splits

    def stack(self) -> MessageTable:
        """Return all of them; nothing can be added any more."""
        parts = [self._parts[rank] for rank in sorted(self._parts)]
        base = min((zero for _, columns, zero in parts if len(columns["start"])), default=0)
        heights = [len(columns["start"]) for _, columns, _ in parts]
        ranks = np.repeat(np.array([summary.rank for summary, _, _ in parts], dtype=np.int32), heights)
        later = np.repeat(np.array([zero - base for _, _, zero in parts], dtype=np.int64), heights)
        made = {"rank": pl.Series("rank", ranks)}
        for name, nothing in _build_columns(_EMPTY, pl.Series(dtype=pl.Int64), 0).items():
            columns_of_ranks = [nothing, *(columns.pop(name) for _, columns, _ in parts)]
            if nothing.dtype.is_integer():  # as many bytes as the longest needs
                wide = max((column.dtype for column in columns_of_ranks), key=_INTEGER_TYPES.index)
                columns_of_ranks = [column.cast(wide) for column in columns_of_ranks]
            made[name] = pl.concat(columns_of_ranks, rechunk=True)
        for name in ("start", "end"):
            made[name] = made[name].cast(pl.Int64) + pl.Series(later)
        codes = map_distinct(made["kind"], lambda distinct: distinct.replace_strict(CODES, default=NO_KIND, return_dtype=pl.Int8))
        made["kind"] = codes.fill_null(NO_KIND)
        summaries = sorted((*(summary for summary, _, _ in parts), *self._twice), key=lambda summary: summary.rank)
        return MessageTable(summaries, pl.DataFrame(list(made.values())), base, self._splits)


def _build_columns(found: pl.DataFrame, numbers: pl.Series, zero: int) -> dict[str, pl.Series]:
    number = numbers.gather(found["step"]) if found.height else pl.Series(dtype=pl.Int64)
    made = {name: found[name].shrink_dtype() for name in _WHOLE} | {"number": number.alias("number").shrink_dtype()}
    made |= {name: found[name] for name in (*_WORDS, "exposed_by")}
    made |= {name: (found[f"{name}_ns"] - zero).alias(name).shrink_dtype() for name in ("start", "end")}
    split = found["in_splits"].is_not_null() & found["members"].is_not_null() & (found["kind"] == "all_to_all").fill_null(False)
    return made | {"uneven": split.alias("uneven")}


def _find_parties(messages: pl.DataFrame) -> tuple[pl.Series, list[str]]:
    """Find the party of each message, and the texts of the parties, those of the lowest ranks first.

    A text is made once for each party: the members of a large group are some thousand letters. It is null where a message says nothing
    about who takes part and its kind is not told either.
    """
    is_pair = pl.col("kind") == CODES["point_to_point"]
    found = find_runs(build_keys(_list_names(messages, messages.select(is_pair).to_series().to_numpy())))
    begins = found.order[found.starts]
    given = [pl.col(name).cast(pl.String).fill_null("") for name in ("group", "members", "size")]
    group = pl.concat_str([pl.lit("G"), *given], separator=PARTY_SEPARATOR)
    pair = pl.concat_str([pl.lit("P"), pl.col("source").cast(pl.String), pl.col("target").cast(pl.String)], separator=PARTY_SEPARATOR)
    named = (pl.col("kind") != NO_KIND) | pl.col("group").is_not_null() | pl.col("members").is_not_null()
    text = pl.when(is_pair).then(pair).when(named).then(group).alias("text")
    texts = messages[begins].select("rank", text).with_row_index("run").drop_nulls("text").sort("rank", "text")
    number = np.full(len(begins), -1, dtype=np.int32)
    number[texts["run"].to_numpy()] = np.arange(texts.height)
    party = np.empty(messages.height, dtype=np.int32)
    party[found.order] = np.repeat(number, found.lengths)
    return pl.Series("party", party).shrink_dtype(), texts["text"].to_list()


def _list_names(messages: pl.DataFrame, pair: Bools) -> Iterator[Ints]:
    told = (messages["kind"] != NO_KIND).to_numpy()
    both = np.ones(messages.height, dtype=bool)
    for of_pair, of_group in _ENDS:
        end = np.where(pair, read_values(messages[of_pair], -1), read_values(messages[of_group], -1))
        told, both = told | (end >= 0), both & (end >= 0)
        yield end
    yield np.where(pair, -1, read_values(messages["size"], -1))
    yield np.where(pair, 2 * both, told).astype(np.int64)
