"""Which calls of different ranks are one message: by sequence number, else by step, else by the shift at which sequences fit.

The shift: calls repeat with each step, so several shifts fit. The true one shows in the ends of the calls: all ranks leave a collective
together, so their differences are constant but for the drift of the clocks; a shift by whole steps adds how steps vary.

A place of a message in the sequence of its group is (way, slot, turn): rows of different ranks at the same place of the same group, of
one kind and size, are one message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl

from gpudiag.arrays import Floats, Ints
from gpudiag.job.clocks import RESOLUTION_NS, AlignedClocks, align_rank_clocks
from gpudiag.job.message_table import CODES, NO_VALUE, Whole, build_keys, count_before, find_runs, read_values, stack_summaries
from gpudiag.job.process_groups import Group, find_doubtful, resolve_groups, separate_groups
from gpudiag.model.analysis import RankSummary
from gpudiag.model.trace import Column

LONG_APART_NS = 1_000_000_000
"""Clocks that are set by NTP differ by much less."""

_NEAR = 4
"""Nearness by Unix time decides where the nearest shift is this many times nearer than the next."""


def find_shift(first: tuple[Ints, Ints], other: tuple[Ints, Ints], *, same_clock: bool) -> int | None:
    """Find how many places later in `first` each call of `other` stands; None where that cannot be told.

    Each sequence: (signatures, ends in ns). `same_clock`: both ends are Unix time, so that nearness counts too.
    """
    shifts = _find_fitting(first[0], other[0])
    if not len(shifts):
        return None
    differences = []
    for shift in shifts:
        mine, theirs = _find_overlap(len(first[1]), len(other[1]), int(shift))
        apart = first[1][mine] - other[1][theirs]
        # Calls whose ends are compared for each shift that fits
        differences.append(apart[np.linspace(0, len(apart) - 1, min(128, len(apart))).astype(np.int64)])
    if len(shifts) == 1:
        # two recordings by Unix time can be of the same moments: no further apart than they are long, or than LONG_APART_NS
        longest = max(int(first[1][-1] - first[1][0]), int(other[1][-1] - other[1][0]), LONG_APART_NS)
        return int(shifts[0]) if not same_clock or abs(float(np.median(differences[0]))) <= longest else None
    if same_clock:
        near = _choose_least(np.array([abs(float(np.median(each))) for each in differences]), _NEAR, RESOLUTION_NS)
        if near is not None:
            return int(shifts[near])
    # two calls always have a straight line through them: they tell no shift
    spread = np.array([_measure_spread(each) if len(each) > 2 else np.inf for each in differences])
    best = _choose_least(spread, 3.0, RESOLUTION_NS)  # a shift is the true one where the next best is this many times as bad (heuristic)
    return None if best is None else int(shifts[best])


def _choose_least(badness: Floats, factor: float, resolution: float) -> int | None:
    order = np.argsort(badness, kind="stable")
    least, next_best = badness[order[0]], badness[order[1]]
    clear = np.isfinite(least) and next_best > factor * least + resolution
    return int(order[0]) if clear else None


def _find_fitting(first: Ints, other: Ints) -> Ints:
    length = min(48, len(first), len(other))  # calls in a row whose likes are looked for
    if not length:
        return np.empty(0, dtype=np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(first, length)
    places = {0, (len(other) - length) // 2, len(other) - length}
    found = [np.flatnonzero((windows == other[place : place + length]).all(axis=1)) - place for place in places]
    fitting = []
    for shift in np.unique(np.concatenate(found)):
        mine, theirs = _find_overlap(len(first), len(other), int(shift))
        # Share of the calls common to both sequences that must be alike (heuristic: a few may be missing from a recording)
        if mine.stop > mine.start and (first[mine] == other[theirs]).mean() >= 0.9:
            fitting.append(shift)
    return np.array(fitting, dtype=np.int64)


def _find_overlap(first: int, other: int, shift: int) -> tuple[slice, slice]:
    begin, end = max(0, shift), min(first, other + shift)
    return slice(begin, end), slice(begin - shift, end - shift)


def _measure_spread(differences: Ints) -> float:
    """Measure how much the differences vary about a straight line (median deviation, ns)."""
    place = np.arange(len(differences)) - (len(differences) - 1) / 2
    values = (differences - differences[0]).astype(np.float64)
    half = len(values) // 2
    slope = (np.median(values[-half:]) - np.median(values[:half])) / max(len(values) - half, 1)
    rest = values - slope * place
    return float(np.median(np.abs(rest - np.median(rest))))


_BY_SEQ, _BY_STEP, _BY_FIT = 0, 1, 2

NOWHERE = -1
"""Place of a message that has none: it cannot be told where it belongs."""


def find_places(rows: pl.DataFrame, groups: Mapping[int, Group], unix: set[int], step_ns: Mapping[int, int]) -> Ints:
    """Find the place of each of `rows` (messages with `group`, in the order of their start) as a number; NOWHERE: none is known.

    `unix`: the ranks whose clock is Unix time; `step_ns`: the length of a step on each rank that has steps.
    """
    if not rows.height:
        return np.empty(0, dtype=np.int64)
    # How the calls of each group are placed. Sends and receives are numbered by each rank for itself: seq tells nothing there
    pairs = [number for number, group in groups.items() if group.pair]
    lacking = rows.group_by("group", "rank").agg(seq=pl.col("seq").count(), number=pl.col("number").count())
    least = lacking.group_by("group").agg(pl.col("seq", "number").min())
    sequenced = least.filter((pl.col("seq") > 0) & ~pl.col("group").is_in(pairs))["group"]
    told = rows["seq"].is_not_null() & rows["group"].is_in(sequenced.implode())
    numbered = rows["group"].is_in(least.filter(pl.col("number") > 0)["group"].implode())
    way = np.array((_BY_FIT, _BY_STEP, _BY_SEQ), dtype=np.int8)[np.where(told.to_numpy(), 2, numbered.to_numpy())]
    slot, turn = np.full(rows.height, NO_VALUE), np.zeros(rows.height, dtype=np.int32)
    by_seq = np.flatnonzero(way == _BY_SEQ)
    chosen = rows.select("rank", "group", "seq")[by_seq] if len(by_seq) < rows.height else rows
    slot[by_seq] = read_values(chosen["seq"])
    turn[by_seq] = count_before(find_runs(build_keys(read_values(chosen[name]) for name in ("rank", "group", "seq"))))
    by_step = np.flatnonzero(way == _BY_STEP)
    _place_by_step(rows, by_step, slot, turn)
    found = _number_places(rows, way, slot, turn)
    again = _find_misnumbered(rows, by_step[found[by_step] != NOWHERE], found, unix, step_ns)
    moved = by_step[np.isin(read_values(rows["group"][by_step]), again)] if len(again) else by_step[:0]
    refit = [at for at in (moved, np.flatnonzero(way == _BY_FIT)) if len(at)]
    for at in refit:
        of_groups = rows[at].with_columns(at=pl.Series(at)).group_by("group", maintain_order=True)
        fits = pl.concat(_fit_group(frame, groups[int(group)].members, unix) for (group,), frame in of_groups)
        if at is moved:  # groups of which nothing fits keep the place they have
            fits = fits.filter(pl.col("slot").is_not_null().any().over("group"))
        rows_of = fits["at"].to_numpy()
        way[rows_of], slot[rows_of], turn[rows_of] = _BY_FIT, read_values(fits["slot"]), 0
    return _number_places(rows, way, slot, turn) if refit else found


def _number_places(rows: pl.DataFrame, way: Whole, slot: Ints, turn: Whole) -> Ints:
    size = rows["bytes"].set(pl.Series(way == _BY_SEQ), 0)
    found = build_keys(read_values(column) for column in (rows["group"], way, rows["kind"], size, slot, turn))
    found[slot == NO_VALUE] = NOWHERE
    return found


def _place_by_step(rows: pl.DataFrame, at: Ints, slot: Ints, turn: Whole) -> None:
    """Place the rows `at` by the number of their step and their turn among its calls of one kind and size.

    A rank that has more or fewer of them in a step than another leaves all of these without a place: which is missing cannot be told.
    """
    chosen = rows.select("rank", "group", "number", "kind", "bytes")[at]
    same = build_keys(read_values(chosen[name]) for name in ("group", "number", "kind", "bytes"))
    of_rank = find_runs(build_keys((read_values(chosen["rank"]), same)))
    count, of_all = np.empty(len(at), dtype=np.int64), find_runs(same)
    count[of_rank.order] = np.repeat(of_rank.lengths, of_rank.lengths)
    ordered = count[of_all.order]
    uneven = np.empty(len(at), dtype=bool)
    if len(at):
        differ = np.minimum.reduceat(ordered, of_all.starts) < np.maximum.reduceat(ordered, of_all.starts)
        uneven[of_all.order] = np.repeat(differ, of_all.lengths)
    slot[at] = np.where(uneven, NO_VALUE, read_values(chosen["number"]))
    turn[at] = count_before(of_rank)


def _find_misnumbered(rows: pl.DataFrame, at: Ints, place: Ints, unix: set[int], step_ns: Mapping[int, int]) -> list[int]:
    known = rows.select("group", "rank", "end")[at].with_columns(place=pl.Series(place[at]))
    known = known.filter(pl.col("rank").is_in(list(unix & set(step_ns))))
    if not known.height:
        return []
    length = float(np.median(list(step_ns.values())))
    late = known.with_columns(late=pl.col("end") - pl.col("end").min().over("place")).group_by("group", "rank").agg(pl.col("late").median())
    # Steps that bear one number but end further apart than this part of a step are not the same one, where clocks are Unix time
    found: list[int] = late.group_by("group").agg(pl.col("late").max()).filter(pl.col("late") > 0.5 * length)["group"].to_list()
    return found


def _fit_group(rows: pl.DataFrame, members: tuple[int, ...], unix: set[int]) -> pl.DataFrame:
    """Return the rows of one group with a slot: their place in the longest sequence of a rank; null for what fits nowhere."""
    rows = rows.with_columns(sign=pl.col("bytes").cast(pl.Int64) * 16 + pl.col("kind"))
    parts = {int(rank): frame for (rank,), frame in rows.group_by("rank", maintain_order=True)}
    longest = max(parts.values(), key=lambda frame: frame.height)
    first_rank, signs, ends = int(longest["rank"][0]), longest["sign"].to_numpy(), longest["end"].to_numpy()
    placed = []
    for rank, frame in parts.items():
        own = frame["sign"].to_numpy()
        shift = 0
        if rank != first_rank:
            told = find_shift((signs, ends), (own, frame["end"].to_numpy()), same_clock={rank, first_rank} <= unix)
            if told is None:
                placed.append(frame.with_columns(slot=pl.lit(None, dtype=pl.Int64)))
                continue
            shift = told
        slot = np.arange(len(own), dtype=np.int64) + shift
        fits = (slot >= 0) & (slot < len(signs)) & (signs[slot.clip(0, len(signs) - 1)] == own)
        placed.append(frame.with_columns(pl.Series("slot", slot).set(pl.Series(~fits), None)))
    return pl.concat(placed).drop("sign")


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

EMPTY_MATCHED = pl.DataFrame(schema={column.name: column.dtype for column in MATCHED})


class Matches(NamedTuple):
    """What was matched, and the clocks by which it can be compared."""

    rows: pl.DataFrame
    """The rows of Stack.messages, in its order: rank, party, kind, bytes (0 where they do not tell calls apart), seq, source, step, number,
    start, end, and group and call; null: it is not known who takes part; without a partner on every rank."""
    groups: dict[int, Group]
    aligned: AlignedClocks


def match_messages(summaries: Sequence[RankSummary]) -> Matches:
    """Match the messages of all ranks, matched, and their clocks.

    First those whose group is told; by their clocks, groups that are known by name only are told apart, and what they send is matched.
    """
    stack = stack_summaries(summaries)
    world = max((summary.world_size for summary in stack if summary.world_size), default=len(stack))
    # the columns themselves, not copies; bytes are 0 where they do not tell calls apart
    # Kinds whose tensor is as large on all ranks: their bytes tell calls apart
    even = pl.col("kind").is_in([CODES[kind] for kind in ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")])
    size = pl.when(even).then("bytes").otherwise(0).fill_null(0).alias("bytes")
    columns = stack.messages.select("rank", "party", "kind", size, "seq", "source", "step", "number", "start", "end")
    named_by = find_runs(build_keys(read_values(columns[name]) for name in ("party", "rank")))
    ranks_of = columns.select("party", "rank")[named_by.order[named_by.starts]].group_by("party").agg("rank")
    told, named = resolve_groups(stack.parties, dict(ranks_of.iter_rows()), world)
    groups = dict(enumerate(dict.fromkeys(told.values())))
    number_of = {group: number for number, group in groups.items()}
    numbers = {party: number_of[group] for party, group in told.items()}
    number = pl.col("party").replace_strict(numbers, default=None, return_dtype=pl.Int32) if numbers else pl.lit(None, dtype=pl.Int32)
    rows = columns.with_columns(number.alias("group"))
    called = _number_calls(rows, groups, summaries)
    aligned = align_rank_clocks(called, summaries)
    if named:
        apart, numbered = separate_groups(rows.filter(pl.col("party").is_in(list(named))), named, aligned, summaries)
        first = len(groups)
        groups |= {first + number: group for number, group in apart.items()}
        found = [(party, rank, first + number) for (party, rank), number in numbered.items()]
        schema = {"party": rows.schema["party"], "rank": rows.schema["rank"], "more": rows.schema["group"]}
        table = pl.DataFrame(found, schema=schema, orient="row")
        rows = rows.join(table, on=["party", "rank"], how="left", maintain_order="left")
        called = _number_calls(rows.with_columns(pl.coalesce("group", "more").alias("group")).drop("more"), groups, summaries)
        aligned = align_rank_clocks(called, summaries)
        wrong = find_doubtful(called, range(first, len(groups)), aligned)
        if wrong:
            called = called.with_columns(pl.when(~pl.col("group").is_in(wrong)).then("call").alias("call"))
            aligned = align_rank_clocks(called, summaries)
    return Matches(called, groups, aligned)


def _find_members(rows: pl.DataFrame, groups: dict[int, Group]) -> Ints:
    """Find the rows of ranks that belong to their group. A function of its own: what it needs beside the rows is let go."""
    each = find_runs(build_keys(read_values(rows[name], -1) for name in ("group", "rank")))
    told = rows.select("group", "rank")[each.order[each.starts]]
    members = {number: set(group.members) for number, group in groups.items()}
    belongs = told.with_columns(known=pl.Series([rank in members.get(number, ()) for number, rank in told.iter_rows()], dtype=pl.Boolean))
    if belongs["known"].all():
        return np.arange(rows.height)
    marked = rows.select("group", "rank").join(belongs, on=["group", "rank"], how="left", nulls_equal=True, maintain_order="left")
    return np.flatnonzero(marked["known"].to_numpy())


def _number_calls(rows: pl.DataFrame, groups: dict[int, Group], summaries: Sequence[RankSummary]) -> pl.DataFrame:
    at = _find_members(rows, groups)
    known = rows if len(at) == rows.height else rows[at]
    unix = {summary.rank for summary in summaries if summary.clock == "unix"}
    lengths = {summary.rank: (summary.steps["end_ns"] - summary.steps["start_ns"]).median() for summary in summaries}
    place = find_places(known, groups, unix, {rank: int(length) for rank, length in lengths.items() if length})
    read = {summary.rank for summary in summaries}
    expected = {number: len(read.intersection(group.members)) for number, group in groups.items()}
    found = find_runs(place)
    first = found.order[found.starts]
    count = np.array([expected[number] for number in known["group"].gather(first).to_list()], dtype=np.int64)
    complete = (found.lengths == count) & (count > 1) & (place[first] != NOWHERE)
    number = np.where(complete, np.cumsum(complete) - 1, NO_CALL)
    call = np.full(rows.height, NO_CALL, dtype=np.int32)
    call[at[found.order]] = np.repeat(number, found.lengths)
    calls = pl.Series("call", call)
    return rows.with_columns(calls.set(calls == NO_CALL, None))
