"""The place of each message in the sequence of its group: by sequence number, else by step, else by what fits.

A place is (way, slot, turn): rows of different ranks at the same place of the same group are one message.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl

from gpudiag.job.groups import Group
from gpudiag.job.shift import find_shift

PLACE = ["group", "way", "kind", "bytes", "slot", "turn"]
"""What the rows of one message have in common."""

_BY_SEQ, _BY_STEP, _BY_FIT = 0, 1, 2

APART = 0.5
"""Steps that bear one number but end further apart than this part of a step are not the same one, where clocks are Unix time."""


def with_places(rows: pl.DataFrame, groups: Mapping[int, Group], unix: set[int], step_ns: Mapping[int, int]) -> pl.DataFrame:
    """Return `rows` (table STACK with `group`, in the order of their start) with way, slot and turn; slot is null where none is known.

    `unix`: the ranks whose clock is Unix time; `step_ns`: the length of a step on each rank that has steps.
    """
    rows = rows.with_columns(_way(rows, groups).alias("way"))
    turn = pl.int_range(pl.len(), dtype=pl.Int32)
    by_seq = rows.filter(pl.col("way") == _BY_SEQ)
    by_seq = by_seq.with_columns(slot=pl.col("seq"), turn=turn.over("rank", "group", "seq"), bytes=pl.lit(0, dtype=pl.Int64))
    by_step = _by_step(rows.filter(pl.col("way") == _BY_STEP))
    doubtful = _elsewhere(by_step, unix, step_ns)
    moved = by_step.join(doubtful, on="group", how="semi")
    if moved.height:
        refit = _by_fit(moved, groups, unix)
        kept = moved.join(refit.drop_nulls("slot").select("group").unique(), on="group", how="anti")
        again = refit.join(kept.select("group").unique(), on="group", how="anti")
        by_step = pl.concat([by_step.join(doubtful, on="group", how="anti"), kept, again])
    by_fit = _by_fit(rows.filter(pl.col("way") == _BY_FIT), groups, unix)
    order = [*rows.columns, "slot", "turn"]
    return pl.concat([frame.select(order) for frame in (by_seq, by_step, by_fit)])


def _way(rows: pl.DataFrame, groups: Mapping[int, Group]) -> pl.Expr:
    """Return how the calls of each group are placed. Sends and receives are numbered by each rank for itself: seq tells nothing there."""
    pairs = [number for number, group in groups.items() if group.pair]
    lacking = rows.group_by("group", "rank").agg(seq=pl.col("seq").count(), number=pl.col("number").count())
    by_seq = lacking.group_by("group").agg(pl.col("seq").min()).filter((pl.col("seq") > 0) & ~pl.col("group").is_in(pairs))["group"]
    by_step = lacking.group_by("group").agg(pl.col("number").min()).filter(pl.col("number") > 0)["group"]
    told = pl.col("seq").is_not_null() & pl.col("group").is_in(by_seq.implode())
    numbered = pl.col("group").is_in(by_step.implode())
    return pl.when(told).then(_BY_SEQ).when(numbered).then(_BY_STEP).otherwise(_BY_FIT).cast(pl.Int8)


def _by_step(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows placed by the number of their step and their turn among its calls of one kind and size.

    A rank that has more or fewer of them in a step than another leaves all of these without a place: which is missing cannot be told.
    """
    same = ["group", "number", "kind", "bytes"]
    count = pl.len().over("rank", *same)
    rows = rows.with_columns(slot=pl.col("number"), turn=pl.int_range(pl.len(), dtype=pl.Int32).over("rank", *same), count=count)
    uneven = pl.col("count").min().over(same) < pl.col("count").max().over(same)
    return rows.with_columns(pl.when(~uneven).then("slot").alias("slot")).drop("count")


def _elsewhere(rows: pl.DataFrame, unix: set[int], step_ns: Mapping[int, int]) -> pl.DataFrame:
    """Return the groups (column group) whose ranks seem to number their steps differently: Unix time puts the same ones far apart."""
    known = rows.filter(pl.col("slot").is_not_null() & pl.col("rank").is_in(list(unix & set(step_ns))))
    if not known.height:
        return pl.DataFrame(schema={"group": rows.schema["group"]})
    length = float(np.median(list(step_ns.values())))
    late = known.with_columns(late=pl.col("end") - pl.col("end").min().over(PLACE)).group_by("group", "rank").agg(pl.col("late").median())
    return late.group_by("group").agg(pl.col("late").max()).filter(pl.col("late") > APART * length).select("group")


def _by_fit(rows: pl.DataFrame, groups: Mapping[int, Group], unix: set[int]) -> pl.DataFrame:
    """Return the rows placed by their place in the sequence of the group's rank with the most calls; null where that is not known."""
    rows = rows.with_columns(way=pl.lit(_BY_FIT, dtype=pl.Int8), turn=pl.lit(0, dtype=pl.Int32))
    found = [_fitted(frame, groups[int(group)].members, unix) for (group,), frame in rows.group_by("group", maintain_order=True)]
    return pl.concat([rows.clear().with_columns(slot=pl.lit(None, dtype=pl.Int64)), *found])


def _fitted(rows: pl.DataFrame, members: tuple[int, ...], unix: set[int]) -> pl.DataFrame:
    """Return the rows of one group with their slots."""
    rows = rows.with_columns(sign=(pl.col("bytes") * 16 + pl.col("kind")))
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
