"""Which calls of different ranks are one message: the table that clocks, waits and causes are told from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.job.alike import Apart, doubtful, told_apart
from gpudiag.job.clocks import Aligned, align
from gpudiag.job.groups import Group, decide
from gpudiag.job.keys import keys, runs, values
from gpudiag.job.order import NOWHERE, places
from gpudiag.job.stack import CODES, Stack, stacked
from gpudiag.model.rank import RankSummary
from gpudiag.model.tables import Column

_I32, _I64, _NAME = pl.Int32(), pl.Int64(), pl.Categorical()

MATCHED: tuple[Column, ...] = (
    Column("call", _I32, "", "number of the message: the rows of all its ranks bear the same; in no order of time"),
    Column("rank", _I32, "", "RankSummary.rank"),
    Column("row", _I32, "", "row of this rank's RankSummary.messages"),
    Column("step", _I32, "", "row of this rank's steps; null: outside its analysed steps"),
    Column("kind", _NAME, "", "all_reduce | all_gather | ... | point_to_point; null: not told"),
    Column("group", _NAME, "", "its ranks, '0,1,2,3'; for point-to-point messages 'source>target'"),
    Column("size", _I32, "ranks", "ranks that were matched: all of the group that were read"),
    Column("bytes", _I64, "B", "the whole tensor as this rank recorded it; null: not recorded"),
    Column("phase", _NAME, "", "forward | backward | ...; null: not told"),
    Column("arrival_ns", _I64, "ns", "its start on the clock of the job's first rank; null: clocks cannot be compared"),
    Column("end_ns", _I64, "ns", "on the same clock; null likewise"),
    Column("wait_ns", _I64, "ns", "last arrival less own arrival, at most until the own end; null likewise"),
    Column("exposed_wait_ns", _I64, "ns", "the part of the wait in which no other work of the device ran; null likewise"),
    Column("transfer_ns", _I64, "ns", "own end less last arrival, at least 0: wait + transfer = end - arrival; null likewise"),
)
"""One row for each (message, rank); only messages that all ranks of their group recorded that were read."""


NO_CALL = -1

EVEN = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")
"""Kinds whose tensor is as large on all ranks: their bytes tell calls apart."""


def empty_matched() -> pl.DataFrame:
    """Return a table MATCHED without rows."""
    return pl.DataFrame(schema={column.name: column.dtype for column in MATCHED})


class Matches(NamedTuple):
    """What was matched, and the clocks by which it can be compared."""

    rows: pl.DataFrame
    """The rows of Stack.messages, in its order: rank, party, kind, bytes (0 where they do not tell calls apart), seq, source, step, number,
    start, end, and group and call; null: it is not known who takes part; without a partner on every rank."""
    groups: dict[int, Group]
    """By number, from 0 on."""
    aligned: Aligned


def match(summaries: Sequence[RankSummary]) -> Matches:
    """Return the messages of all ranks, matched, and their clocks.

    First those whose group is told; by their clocks, groups that are known by name only are told apart, and what they send is matched.
    """
    stack = stacked(summaries)
    world = max((summary.world_size for summary in stack if summary.world_size), default=len(stack))
    columns = _columns(stack)
    told, named = decide(stack.parties, _ranks_of(columns), world)
    numbers, groups = _numbered(told)
    number = pl.col("party").replace_strict(numbers, default=None, return_dtype=pl.Int32) if numbers else pl.lit(None, dtype=pl.Int32)
    rows = columns.with_columns(number.alias("group"))
    called = _called(rows, groups, summaries)
    aligned = align(called, summaries)
    if named:
        apart = told_apart(rows.filter(pl.col("party").is_in(list(named))), named, aligned, summaries)
        first = len(groups)
        groups |= {first + number: group for number, group in apart.groups.items()}
        called = _called(_with_groups(rows, apart, first), groups, summaries)
        aligned = align(called, summaries)
        wrong = doubtful(called, range(first, len(groups)), aligned)
        if wrong:
            called = called.with_columns(pl.when(~pl.col("group").is_in(wrong)).then("call").alias("call"))
            aligned = align(called, summaries)
    return Matches(called, groups, aligned)


def _ranks_of(rows: pl.DataFrame) -> dict[int, list[int]]:
    """Return the ranks that name each party."""
    named = runs(keys(values(rows[name]) for name in ("party", "rank")))
    first = rows.select("party", "rank")[named.order[named.starts]]
    return dict(first.group_by("party").agg("rank").iter_rows())


def _numbered(told: dict[int, Group]) -> tuple[dict[int, int], dict[int, Group]]:
    """Return the number of each party's group, and the groups by number."""
    numbers = {group: number for number, group in enumerate(dict.fromkeys(told.values()))}
    return {party: numbers[group] for party, group in told.items()}, {number: group for group, number in numbers.items()}


def _with_groups(rows: pl.DataFrame, apart: Apart, first: int) -> pl.DataFrame:
    """Return `rows` with the groups that were told apart, numbered from `first`."""
    found = [(party, rank, first + number) for (party, rank), number in apart.of.items()]
    schema = {"party": rows.schema["party"], "rank": rows.schema["rank"], "more": rows.schema["group"]}
    table = pl.DataFrame(found, schema=schema, orient="row")
    rows = rows.join(table, on=["party", "rank"], how="left", maintain_order="left")
    return rows.with_columns(pl.coalesce("group", "more").alias("group")).drop("more")


def _columns(stack: Stack) -> pl.DataFrame:
    """Return the messages of `stack` (the columns themselves, not copies) with what tells calls apart: bytes are 0 where they do not."""
    even = pl.col("kind").is_in([CODES[kind] for kind in EVEN])
    size = pl.when(even).then("bytes").otherwise(0).fill_null(0).alias("bytes")
    return stack.messages.select("rank", "party", "kind", size, "seq", "source", "step", "number", "start", "end")


def _called(rows: pl.DataFrame, groups: dict[int, Group], summaries: Sequence[RankSummary]) -> pl.DataFrame:
    """Return `rows` with the number of their call: rows at one place on all ranks of their group that were read; null for the others."""
    read = {summary.rank for summary in summaries}
    expected = {number: len(read.intersection(group.members)) for number, group in groups.items()}
    at = np.flatnonzero(_known(rows, groups))
    unix = {summary.rank for summary in summaries if summary.clock == "unix"}
    known = rows if len(at) == rows.height else rows[at]
    place = places(known, groups, unix, _step_ns(summaries))
    found = runs(place)
    first = found.order[found.starts]
    count = np.array([expected[number] for number in known["group"].gather(first).to_list()], dtype=np.int64)
    complete = (found.lengths == count) & (count > 1) & (place[first] != NOWHERE)
    number = np.where(complete, np.cumsum(complete) - 1, NO_CALL)
    call = np.full(rows.height, NO_CALL, dtype=np.int32)
    call[at[found.order]] = np.repeat(number, found.lengths)
    calls = pl.Series("call", call)
    return rows.with_columns(calls.set(calls == NO_CALL, None))


def _known(rows: pl.DataFrame, groups: dict[int, Group]) -> npt.NDArray[np.bool_]:
    """Return which rows have a group that holds their rank."""
    members = {number: set(group.members) for number, group in groups.items()}
    each = runs(keys(values(rows[name], -1) for name in ("group", "rank")))
    told = rows.select("group", "rank")[each.order[each.starts]]
    belongs = told.with_columns(known=pl.Series([rank in members.get(number, ()) for number, rank in told.iter_rows()], dtype=pl.Boolean))
    if belongs["known"].all():
        return np.ones(rows.height, dtype=bool)
    marked = rows.select("group", "rank").join(belongs, on=["group", "rank"], how="left", nulls_equal=True, maintain_order="left")
    return np.asarray(marked["known"].to_numpy(), dtype=bool)


def _step_ns(summaries: Sequence[RankSummary]) -> dict[int, int]:
    """Return the median length of a step of each rank that has steps."""
    lengths = {summary.rank: (summary.steps["end_ns"] - summary.steps["start_ns"]).median() for summary in summaries}
    return {rank: int(length) for rank, length in lengths.items() if length}
