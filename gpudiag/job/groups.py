"""Which ranks a party of messages is, as far as the records tell: by the members, or because a group is as large as the job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gpudiag.job.stack import BETWEEN

MOST_RANKS = 2**20
"""More than any job has: a damaged record."""


class Group(NamedTuple):
    """Ranks that send each other messages in one order."""

    members: tuple[int, ...]
    """In ranks of the job; of a pair source and target."""
    name: str = ""
    pair: bool = False


class Named(NamedTuple):
    """A group of which only the name is known; several groups of the job may bear it."""

    name: str
    size: int | None


class _Party(NamedTuple):
    group: str
    members: tuple[int, ...]
    size: int | None


def decide(parties: Sequence[str], ranks_of: Mapping[int, Iterable[int]], world: int | None) -> tuple[dict[int, Group], dict[int, Named]]:
    """Return the group of each party (index) whose members are told, and the names of the others.

    `ranks_of`: the ranks that name a party; `world`: ranks of the job. Parties that are none (a rank that sends to itself) are left out.
    """
    pairs: dict[int, Group] = {}
    told: dict[int, _Party] = {}
    named: dict[int, Named] = {}
    for index, text in enumerate(parties):
        sort, rest = text.split(BETWEEN, 1)
        if sort == "P":
            source, target = map(int, rest.split(BETWEEN))
            if source != target:
                pairs[index] = Group((source, target), pair=True)
            continue
        party = _party(rest, world)
        if party.members:
            told[index] = party
        else:
            named[index] = Named(party.group, party.size)
    return pairs | _by_members(told, ranks_of), named


def _party(text: str, world: int | None) -> _Party:
    group, members, size = text.rsplit(BETWEEN, 2)
    count = int(size) if size else None
    ranks = tuple(int(rank) for rank in members.split(",")) if members else ()
    if not ranks and count is not None and count == world and count <= MOST_RANKS:
        ranks = tuple(range(count))
    return _Party(group, ranks, count)


def _by_members(told: Mapping[int, _Party], ranks_of: Mapping[int, Iterable[int]]) -> dict[int, Group]:
    """Return the groups: of the same members and name, or of the same members alone where no rank knows them by two names."""
    names: dict[tuple[int, ...], dict[int, set[str]]] = {}
    for index, party in told.items():
        by_rank = names.setdefault(party.members, {})
        for rank in ranks_of.get(index, ()):
            by_rank.setdefault(rank, set()).add(party.group)
    several = {members for members, by_rank in names.items() if any(len(own) > 1 for own in by_rank.values())}
    return {index: Group(party.members, party.group if party.members in several else "") for index, party in told.items()}
