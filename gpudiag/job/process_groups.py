"""The process groups behind messages: by recorded members, by the size of the job, or by who leaves messages at the same moments.

Process groups are numbered by each rank, so '1' may be one pair of ranks here and another pair there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl

from gpudiag.arrays import Ints
from gpudiag.job.clocks import SYNCHRONISING, AlignedClocks
from gpudiag.job.message_table import CODES, PARTY_SEPARATOR
from gpudiag.model.analysis import RankSummary

MOST_RANKS = 2**20
"""More than any job has: a damaged record."""


class Group(NamedTuple):
    """Ranks that send each other messages in one order."""

    members: tuple[int, ...]
    """In ranks of the job; of a pair source and target."""
    name: str = ""
    pair: bool = False


class NamedGroup(NamedTuple):
    """A group of which only the name is known; several groups of the job may bear it."""

    name: str
    size: int | None


def resolve_groups(
    parties: Sequence[str], ranks_of: Mapping[int, Iterable[int]], world: int | None
) -> tuple[dict[int, Group], dict[int, NamedGroup]]:
    """Resolve the group of each party (index) whose members are told, and the names of the others.

    `ranks_of`: the ranks that name a party; `world`: ranks of the job. Parties that are none (a rank that sends to itself) are left out.
    """
    pairs: dict[int, Group] = {}
    told: dict[int, Group] = {}
    named: dict[int, NamedGroup] = {}
    for index, text in enumerate(parties):
        sort, rest = text.split(PARTY_SEPARATOR, 1)
        if sort == "P":
            source, target = map(int, rest.split(PARTY_SEPARATOR))
            if source != target:
                pairs[index] = Group((source, target), pair=True)
            continue
        name, listed, size = rest.rsplit(PARTY_SEPARATOR, 2)
        count = int(size) if size else None
        members = tuple(int(rank) for rank in listed.split(",")) if listed else ()
        if not members and count is not None and count == world and count <= MOST_RANKS:
            members = tuple(range(count))
        if members:
            told[index] = Group(members, name)
        else:
            named[index] = NamedGroup(name, count)
    # a group is told by its members alone, and by its name too where some rank knows the same members by two names
    names: dict[tuple[tuple[int, ...], int], set[str]] = {}
    for index, party in told.items():
        for rank in ranks_of.get(index, ()):
            names.setdefault((party.members, rank), set()).add(party.name)
    several = {members for (members, _), own in names.items() if len(own) > 1}
    groups = {index: Group(party.members, party.name if party.members in several else "") for index, party in told.items()}
    return pairs | groups, named


TOGETHER_NS, TOGETHER_SHARE = 50_000, 0.25
"""Ends of one message lie within 50 us, or this part of its time, of each other; else the ranks are no group (heuristic: NCCL's ends lie
within a few us, gloo's within a fraction of its messages' time)."""


def separate_groups(
    rows: pl.DataFrame, named: Mapping[int, NamedGroup], aligned: AlignedClocks, summaries: Sequence[RankSummary]
) -> tuple[dict[int, Group], dict[tuple[int, int], int]]:
    """Return the groups behind the parties `named` of `rows` (see Matches.rows) by number, and the number for each (party, rank).

    A party that says no size may be the group of all ranks that name it; whether it is, the ends of its messages tell (`find_doubtful`).
    """
    if aligned.corrections:
        timed = aligned.common(rows, "end").drop_nulls("end")
    else:  # as Unix time
        timed = rows.filter(pl.col("rank").is_in([summary.rank for summary in summaries if summary.clock == "unix"]))
    timed = timed.filter(pl.col("kind").is_in([CODES[kind] for kind in SYNCHRONISING]))
    groups: dict[int, Group] = {}
    of: dict[tuple[int, int], int] = {}
    for party, (name, size) in named.items():
        ranks = sorted(rows.filter(pl.col("party") == party)["rank"].unique().to_list())
        found = [tuple(ranks)] if size is None or size == len(ranks) else _cluster_ranks(timed.filter(pl.col("party") == party), size)
        for members in found:
            if len(members) > 1:
                of |= {(party, rank): len(groups) for rank in members}
                groups[len(groups)] = Group(members, name)
    return groups, of


def _cluster_ranks(rows: pl.DataFrame, size: int) -> list[tuple[int, ...]]:
    ends_of = {int(rank): np.sort(frame["end"].to_numpy()) for (rank,), frame in rows.group_by("rank")}
    ranks = sorted(ends_of)
    if not 1 < size <= len(ranks):
        return []
    # How far the ends of each two ranks lie apart: of samples of one the median distance to the nearest end of the other
    ends: list[Ints] = [ends_of[rank] for rank in ranks]
    # Ends of each rank that are looked for among those of the others
    samples = [own[np.linspace(0, len(own) - 1, min(32, len(own))).astype(np.int64)] for own in ends]
    owner = np.repeat(np.arange(len(ends)), [len(own) for own in samples])
    every = np.concatenate(samples)
    medians = np.zeros((len(ends), len(ends)))
    for column, own in enumerate(ends):
        place = np.searchsorted(own, every).clip(1, max(len(own) - 1, 1)) if len(own) > 1 else np.ones(len(every), dtype=np.int64)
        before, after = own[place - 1], own[np.minimum(place, len(own) - 1)]
        away = np.minimum(np.abs(every - before), np.abs(after - every)).astype(np.float64)
        medians[:, column] = [np.median(away[owner == row]) for row in range(len(ends))]
    distance = np.maximum(medians, medians.T)
    # Groups: those that are each other's nearest
    order = np.argsort(distance, axis=1, kind="stable")
    nearest = [frozenset(row[:size].tolist()) for row in order]
    found = []
    for chosen in sorted({near for place, near in enumerate(nearest) if place in near}, key=sorted):
        inside = sorted(chosen)
        if any(nearest[place] != chosen for place in inside):
            continue
        outside = [place for place in range(len(ranks)) if place not in chosen]
        within = distance[np.ix_(inside, inside)].max()
        # Ranks are one group where they end within this part of their distance to every other rank (heuristic)
        if not outside or within <= 0.5 * distance[np.ix_(inside, outside)].min():
            found.append(tuple(ranks[place] for place in inside))
    return found


def find_doubtful(called: pl.DataFrame, numbers: Sequence[int], aligned: AlignedClocks) -> list[int]:
    """Find which of the groups `numbers` are none: what was taken for one message does not end together on their ranks."""
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
