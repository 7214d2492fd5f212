"""Groups that are known by name or by nothing: which ranks they are, by who leaves messages at the same moments.

Process groups are numbered by each rank, so '1' may be one pair of ranks here and another pair there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.job.clocks import SYNCHRONISING, Aligned
from gpudiag.job.groups import Group, Named
from gpudiag.job.stack import CODES
from gpudiag.model.rank import RankSummary

SAMPLES = 32
"""Ends of each rank that are looked for among those of the others."""

CLOSER = 0.5
"""Ranks are one group where they end within this part of their distance to every other rank (heuristic)."""

TOGETHER_NS, TOGETHER_SHARE = 50_000, 0.25
"""Ends of one message lie within 50 us, or this part of its time, of each other; else the ranks are no group (heuristic: NCCL's ends lie
within a few us, gloo's within a fraction of its messages' time)."""

Ends = npt.NDArray[np.int64]


class Apart(msgspec.Struct, frozen=True):
    """Groups that were told apart: their ranks, and for each (party, rank) the group's number."""

    groups: dict[int, Group]
    of: dict[tuple[int, int], int]


def told_apart(rows: pl.DataFrame, named: Mapping[int, Named], aligned: Aligned, summaries: Sequence[RankSummary]) -> Apart:
    """Return the groups behind the parties `named` of `rows` (see Matches.rows).

    A party that says no size may be the group of all ranks that name it; whether it is, the ends of its messages tell (`doubtful`).
    """
    timed = _timed(rows, aligned, summaries).filter(pl.col("kind").is_in([CODES[kind] for kind in SYNCHRONISING]))
    groups: dict[int, Group] = {}
    of: dict[tuple[int, int], int] = {}
    for party, (name, size) in named.items():
        ranks = sorted(rows.filter(pl.col("party") == party)["rank"].unique().to_list())
        found = [tuple(ranks)] if size is None or size == len(ranks) else _clusters(timed.filter(pl.col("party") == party), size)
        for members in found:
            if len(members) > 1:
                of |= {(party, rank): len(groups) for rank in members}
                groups[len(groups)] = Group(members, name)
    return Apart(groups, of)


def _timed(rows: pl.DataFrame, aligned: Aligned, summaries: Sequence[RankSummary]) -> pl.DataFrame:
    """Return the rows whose ends can be compared: on the common clock, or as Unix time where no clock was aligned."""
    if aligned.corrections:
        return aligned.common(rows, "end").drop_nulls("end")
    return rows.filter(pl.col("rank").is_in([summary.rank for summary in summaries if summary.clock == "unix"]))


def _clusters(rows: pl.DataFrame, size: int) -> list[tuple[int, ...]]:
    """Return the sets of `size` ranks each of which ends nearer to the others of its set than to any other rank."""
    ends = {int(rank): np.sort(frame["end"].to_numpy()) for (rank,), frame in rows.group_by("rank")}
    ranks = sorted(ends)
    if not 1 < size <= len(ranks):
        return []
    distance = _distances([ends[rank] for rank in ranks])
    order = np.argsort(distance, axis=1, kind="stable")
    nearest = [frozenset(row[:size].tolist()) for row in order]
    found = []
    for chosen in sorted({own for place, own in enumerate(nearest) if place in own}, key=sorted):
        inside = sorted(chosen)
        if any(nearest[place] != chosen for place in inside):
            continue
        outside = [place for place in range(len(ranks)) if place not in chosen]
        within = distance[np.ix_(inside, inside)].max()
        if not outside or within <= CLOSER * distance[np.ix_(inside, outside)].min():
            found.append(tuple(ranks[place] for place in inside))
    return found


def _distances(ends: Sequence[Ends]) -> npt.NDArray[np.float64]:
    """Return for each two ranks the median distance of ends of one to the nearest end of the other, the larger way round; 0 to itself."""
    samples = [own[np.linspace(0, len(own) - 1, min(SAMPLES, len(own))).astype(np.int64)] for own in ends]
    owner = np.repeat(np.arange(len(ends)), [len(own) for own in samples])
    every = np.concatenate(samples)
    result = np.zeros((len(ends), len(ends)))
    for column, own in enumerate(ends):
        place = np.searchsorted(own, every).clip(1, max(len(own) - 1, 1)) if len(own) > 1 else np.ones(len(every), dtype=np.int64)
        before, after = own[place - 1], own[np.minimum(place, len(own) - 1)]
        away = np.minimum(np.abs(every - before), np.abs(after - every)).astype(np.float64)
        result[:, column] = [np.median(away[owner == row]) for row in range(len(ends))]
    both: npt.NDArray[np.float64] = np.maximum(result, result.T)
    return both


def doubtful(called: pl.DataFrame, numbers: Sequence[int], aligned: Aligned) -> list[int]:
    """Return which of the groups `numbers` are none: what was taken for one message does not end together on their ranks."""
    rows = called.filter(pl.col("group").is_in(list(numbers)) & pl.col("call").is_not_null())
    rows = rows.with_columns(duration=pl.col("end") - pl.col("start"))
    calls = (
        aligned.common(rows, "end")
        .group_by("group", "call")
        .agg(apart=pl.col("end").max() - pl.col("end").min(), time=pl.col("duration").max())
    )
    judged = calls.group_by("group").agg(pl.col("apart", "time").median())
    bad = judged.filter(pl.col("apart") > pl.max_horizontal(pl.lit(TOGETHER_NS), pl.col("time") * TOGETHER_SHARE))
    return [int(number) for number in bad["group"].to_list()]
