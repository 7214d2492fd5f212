"""The place of each message in the sequence of its group: by sequence number, else by step, else by what fits.

A place is (way, slot, turn): rows of different ranks at the same place of the same group, of one kind and size, are one message.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl

from gpudiag.job.groups import Group
from gpudiag.job.keys import NONE, Ints, Whole, counts, keys, runs, turns, values
from gpudiag.job.shift import find_shift

_BY_SEQ, _BY_STEP, _BY_FIT = 0, 1, 2

NOWHERE = -1
"""Place of a message that has none: it cannot be told where it belongs."""

APART = 0.5
"""Steps that bear one number but end further apart than this part of a step are not the same one, where clocks are Unix time."""


def places(rows: pl.DataFrame, groups: Mapping[int, Group], unix: set[int], step_ns: Mapping[int, int]) -> Ints:
    """Return the place of each of `rows` (messages with `group`, in the order of their start) as a number; NOWHERE: none is known.

    `unix`: the ranks whose clock is Unix time; `step_ns`: the length of a step on each rank that has steps.
    """
    if not rows.height:
        return np.empty(0, dtype=np.int64)
    way = _ways(rows, groups)
    slot, turn = np.full(rows.height, NONE), np.zeros(rows.height, dtype=np.int32)
    _by_seq(rows, np.flatnonzero(way == _BY_SEQ), slot, turn)
    by_step = np.flatnonzero(way == _BY_STEP)
    _by_step(rows, by_step, slot, turn)
    found = _numbered(rows, way, slot, turn)
    again = _elsewhere(rows, by_step[found[by_step] != NOWHERE], found, unix, step_ns)
    moved = by_step[np.isin(values(rows["group"][by_step]), again)] if len(again) else by_step[:0]
    refit = [at for at in (moved, np.flatnonzero(way == _BY_FIT)) if len(at)]
    for at in refit:
        _refitted(rows, at, (way, slot, turn), groups, unix, sure=at is not moved)
    return _numbered(rows, way, slot, turn) if refit else found


def _numbered(rows: pl.DataFrame, way: Whole, slot: Ints, turn: Whole) -> Ints:
    """Return a number for each place."""
    size = rows["bytes"].set(pl.Series(way == _BY_SEQ), 0)
    found = keys(values(column) for column in (rows["group"], way, rows["kind"], size, slot, turn))
    found[slot == NONE] = NOWHERE
    return found


def _ways(rows: pl.DataFrame, groups: Mapping[int, Group]) -> Whole:
    """Return how the calls of each group are placed. Sends and receives are numbered by each rank for itself: seq tells nothing there."""
    pairs = [number for number, group in groups.items() if group.pair]
    lacking = rows.group_by("group", "rank").agg(seq=pl.col("seq").count(), number=pl.col("number").count())
    least = lacking.group_by("group").agg(pl.col("seq", "number").min())
    by_seq = least.filter((pl.col("seq") > 0) & ~pl.col("group").is_in(pairs))["group"]
    by_step = least.filter(pl.col("number") > 0)["group"]
    told = rows["seq"].is_not_null() & rows["group"].is_in(by_seq.implode())
    numbered = rows["group"].is_in(by_step.implode())
    ways = np.array((_BY_FIT, _BY_STEP, _BY_SEQ), dtype=np.int8)
    return ways[np.where(told.to_numpy(), 2, numbered.to_numpy())]


def _by_seq(rows: pl.DataFrame, at: Ints, slot: Ints, turn: Whole) -> None:
    """Place the rows `at` by their sequence number, and by their turn where a rank has several of one."""
    chosen = rows.select("rank", "group", "seq")[at] if len(at) < rows.height else rows
    slot[at] = values(chosen["seq"])
    turn[at] = turns(runs(keys(values(chosen[name]) for name in ("rank", "group", "seq"))))


def _by_step(rows: pl.DataFrame, at: Ints, slot: Ints, turn: Whole) -> None:
    """Place the rows `at` by the number of their step and their turn among its calls of one kind and size.

    A rank that has more or fewer of them in a step than another leaves all of these without a place: which is missing cannot be told.
    """
    chosen = rows.select("rank", "group", "number", "kind", "bytes")[at]
    same = keys(values(chosen[name]) for name in ("group", "number", "kind", "bytes"))
    of_rank = runs(keys((values(chosen["rank"]), same)))
    count, of_all = counts(of_rank), runs(same)
    ordered = count[of_all.order]
    uneven = np.empty(len(at), dtype=bool)
    if len(at):
        differ = np.minimum.reduceat(ordered, of_all.starts) < np.maximum.reduceat(ordered, of_all.starts)
        uneven[of_all.order] = np.repeat(differ, of_all.lengths)
    slot[at] = np.where(uneven, NONE, values(chosen["number"]))
    turn[at] = turns(of_rank)


def _elsewhere(rows: pl.DataFrame, at: Ints, place: Ints, unix: set[int], step_ns: Mapping[int, int]) -> list[int]:
    """Return the groups whose ranks seem to number their steps differently: Unix time puts the same ones far apart."""
    known = rows.select("group", "rank", "end")[at].with_columns(place=pl.Series(place[at]))
    known = known.filter(pl.col("rank").is_in(list(unix & set(step_ns))))
    if not known.height:
        return []
    length = float(np.median(list(step_ns.values())))
    late = known.with_columns(late=pl.col("end") - pl.col("end").min().over("place")).group_by("group", "rank").agg(pl.col("late").median())
    found: list[int] = late.group_by("group").agg(pl.col("late").max()).filter(pl.col("late") > APART * length)["group"].to_list()
    return found


def _refitted(
    rows: pl.DataFrame, at: Ints, placed: tuple[Whole, Ints, Whole], groups: Mapping[int, Group], unix: set[int], *, sure: bool
) -> None:
    """Place the rows `at` (way, slot, turn of all rows) by what fits; not `sure`: groups of which nothing fits keep the place they have."""
    way, slot, turn = placed
    fits = _by_fit(rows[at].with_columns(at=pl.Series(at)), groups, unix)
    if not sure:
        fits = fits.filter(pl.col("slot").is_not_null().any().over("group"))
    rows_of = fits["at"].to_numpy()
    way[rows_of], slot[rows_of], turn[rows_of] = _BY_FIT, values(fits["slot"]), 0


def _by_fit(rows: pl.DataFrame, groups: Mapping[int, Group], unix: set[int]) -> pl.DataFrame:
    """Return the rows placed by their place in the sequence of the group's rank with the most calls; null where that is not known."""
    found = [_fitted(frame, groups[int(group)].members, unix) for (group,), frame in rows.group_by("group", maintain_order=True)]
    return pl.concat([rows.clear().with_columns(slot=pl.lit(None, dtype=pl.Int64)), *found])


def _fitted(rows: pl.DataFrame, members: tuple[int, ...], unix: set[int]) -> pl.DataFrame:
    """Return the rows of one group with their slots."""
    rows = rows.with_columns(sign=pl.col("bytes").cast(pl.Int64) * 16 + pl.col("kind"))
    parts = {int(rank): frame for (rank,), frame in rows.group_by("rank", maintain_order=True)}
    longest = max(parts.values(), key=lambda frame: frame.height)
    first = _sequence(longest)
    first_rank = int(longest["rank"][0])
    placed = []
    for rank, frame in parts.items():
        shift = 0 if rank == first_rank else find_shift(first, _sequence(frame), same_clock={rank, first_rank} <= unix)
        placed.append(frame.with_columns(pl.Series("slot", _slots(first[0], frame, shift), dtype=pl.Int64)))
    return pl.concat(placed).drop("sign")


def _sequence(frame: pl.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    return frame["sign"].to_numpy(), frame["end"].to_numpy()


def _slots(first: np.ndarray, frame: pl.DataFrame, shift: int | None) -> pl.Series:
    """Return the place of each call in `first`; null where the call there is another one, or the shift is not known."""
    slot = pl.int_range(frame.height, dtype=pl.Int64, eager=True) + (shift or 0)
    inside = (slot >= 0) & (slot < len(first))
    there = first[slot.clip(0, len(first) - 1).to_numpy()]
    alike = inside & (frame["sign"] == pl.Series(there))
    keep = alike if shift is not None else pl.repeat(False, frame.height, eager=True)
    found: pl.Series = slot.set(~keep, None)
    return found
