"""Which calls of different ranks are one message: the table that clocks, waits and causes are told from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import polars as pl

from gpudiag.job.alike import Apart, doubtful, told_apart
from gpudiag.job.clocks import Aligned, align
from gpudiag.job.groups import Group, decide
from gpudiag.job.order import PLACE, with_places
from gpudiag.job.stack import Stack
from gpudiag.model.rank import RankSummary
from gpudiag.model.tables import Column

_I64, _TEXT = pl.Int64(), pl.String()

MATCHED: tuple[Column, ...] = (
    Column("call", _I64, "", "number of the message: the rows of all its ranks bear the same; in no order of time"),
    Column("rank", _I64, "", "RankSummary.rank"),
    Column("row", _I64, "", "row of this rank's RankSummary.messages"),
    Column("step", _I64, "", "row of this rank's steps; null: outside its analysed steps"),
    Column("kind", _TEXT, "", "all_reduce | all_gather | ... | point_to_point; null: not told"),
    Column("group", _TEXT, "", "its ranks, '0,1,2,3'; for point-to-point messages 'source>target'"),
    Column("size", _I64, "ranks", "ranks that were matched: all of the group that were read"),
    Column("bytes", _I64, "B", "the whole tensor as this rank recorded it; null: not recorded"),
    Column("phase", _TEXT, "", "forward | backward | ...; null: not told"),
    Column("arrival_ns", _I64, "ns", "its start on the clock of the job's first rank; null: clocks cannot be compared"),
    Column("end_ns", _I64, "ns", "on the same clock; null likewise"),
    Column("wait_ns", _I64, "ns", "last arrival less own arrival, at most until the own end; null likewise"),
    Column("exposed_wait_ns", _I64, "ns", "the part of the wait in which no other work of the device ran; null likewise"),
    Column("transfer_ns", _I64, "ns", "own end less last arrival, at least 0: wait + transfer = end - arrival; null likewise"),
)
"""One row for each (message, rank); only messages that all ranks of their group recorded that were read."""


def empty_matched() -> pl.DataFrame:
    """Return a table MATCHED without rows."""
    return pl.DataFrame(schema={column.name: column.dtype for column in MATCHED})


class Matches(NamedTuple):
    """What was matched, and the clocks by which it can be compared."""

    rows: pl.DataFrame
    """Table STACK with group and call; null: it is not known who takes part; without a partner on every rank."""
    groups: dict[int, Group]
    aligned: Aligned
    base_ns: int
    """Absolute time of the zero of `rows`."""


def match(summaries: Sequence[RankSummary]) -> Matches:
    """Return the messages of all ranks, matched, and their clocks.

    First those whose group is told; by their clocks, groups that are known by name only are told apart, and what they send is matched.
    """
    stack = Stack(summaries)
    world = max((summary.world_size for summary in summaries if summary.world_size), default=len(summaries))
    told, named = decide(stack.parties, _ranks_of(stack.rows), world)
    numbers, groups = _numbered(told)
    number = pl.col("party").replace_strict(numbers, default=None, return_dtype=pl.Int32) if numbers else pl.lit(None, dtype=pl.Int32)
    rows = stack.rows.with_columns(number.alias("group"))
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
    return Matches(called, groups, aligned, stack.base_ns)


def _ranks_of(rows: pl.DataFrame) -> dict[int, list[int]]:
    """Return the ranks that name each party."""
    return dict(rows.select("party", "rank").unique().group_by("party").agg("rank").iter_rows())


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


def _called(rows: pl.DataFrame, groups: dict[int, Group], summaries: Sequence[RankSummary]) -> pl.DataFrame:
    """Return `rows` with the number of their call: rows at one place on all ranks of their group that were read; null for the others."""
    read = {summary.rank for summary in summaries}
    expected = {number: len(read.intersection(group.members)) for number, group in groups.items()}
    places = [(number, rank) for number, group in groups.items() for rank in group.members if rank in read]
    belongs = pl.DataFrame(places, schema={"group": rows.schema["group"], "rank": rows.schema["rank"]}, orient="row")
    known, others = _split(rows, belongs)
    unix = {summary.rank for summary in summaries if summary.clock == "unix"}
    placed = with_places(known, groups, unix, _step_ns(summaries))
    count = pl.col("group").replace_strict(expected, return_dtype=pl.Int64) if expected else pl.lit(0)
    calls = (
        placed.drop_nulls("slot")
        .group_by(PLACE, maintain_order=True)
        .agg(pl.len().alias("ranks"))
        .filter((pl.col("ranks") == count) & (pl.col("ranks") > 1))
    )
    calls = calls.select(PLACE).with_row_index("call").with_columns(pl.col("call").cast(pl.Int64))
    placed = placed.join(calls, on=PLACE, how="left", maintain_order="left").select(*rows.columns, "call")
    return pl.concat([placed, others.with_columns(pl.lit(None, dtype=pl.Int64).alias("call"))])


def _split(rows: pl.DataFrame, belongs: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the rows whose group and rank are in `belongs`, in their order, and the others."""
    marked = rows.join(belongs.with_columns(_known=True), on=["group", "rank"], how="left", maintain_order="left")
    return marked.filter(pl.col("_known")).drop("_known"), marked.filter(pl.col("_known").is_null()).drop("_known")


def _step_ns(summaries: Sequence[RankSummary]) -> dict[int, int]:
    """Return the median length of a step of each rank that has steps."""
    lengths = {summary.rank: (summary.steps["end_ns"] - summary.steps["start_ns"]).median() for summary in summaries}
    return {rank: int(length) for rank, length in lengths.items() if length}
