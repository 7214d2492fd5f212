"""Who takes part in a collective: the columns members, source, target and splits, from the arguments of its record.

torch writes them as text (torch/csrc/profiler/util.cpp, saveNcclMeta): 'Process Group Ranks' "[0, 1, 2]", cut after 30 ranks with an
ellipsis, 'Global rank start' and 'Global rank stride' where the ranks are evenly spaced, 'Src Rank' or 'Dst Rank' of recv and send in
ranks of the job, 'Rank' (for broadcast, scatter, reduce and gather that of the root in its group), 'In split size', 'Out split size'.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import polars as pl
from msgspec import Raw

from gpudiag.trace.columns import integer_of
from gpudiag.trace.events import ABSENT, CompleteArgs

_ROOTED = ("broadcast", "scatter", "reduce", "gather")
"""Collectives whose 'Rank' is their root's; torch writes 'broadcast', '_broadcast_oop', 'reduce', '_reduce_oop', 'gather', 'scatter'."""

_INTEGERS = re.compile(r"\s*-?\d+(?:\s*,\s*-?\d+)*\s*")
_MOST_RANKS = 2**20
"""More than any run has: a damaged record."""


def group_columns(names: Sequence[str | None], args: Sequence[CompleteArgs]) -> dict[str, pl.Series]:
    """Return the columns members, source, target, in_splits and out_splits of collectives called `names`, one for each of `args`."""
    members = [_members(item) for item in args]
    roots = [_root(name, item, ranks) for name, item, ranks in zip(names, args, members, strict=True)]
    sources = [_rank(item.source) for item in args]
    return {
        "members": pl.Series(members, dtype=pl.String),
        "source": pl.Series([root if own is None else own for own, root in zip(sources, roots, strict=True)], dtype=pl.Int64),
        "target": pl.Series([_rank(item.target) for item in args], dtype=pl.Int64),
        "in_splits": pl.Series([_listed(item.in_splits) for item in args], dtype=pl.String),
        "out_splits": pl.Series([_listed(item.out_splits) for item in args], dtype=pl.String),
    }


def no_group_columns(rows: int) -> dict[str, pl.Series]:
    """Return the same columns for `rows` calls whose records do not hold them."""
    text, number = pl.Series([None] * rows, dtype=pl.String), pl.Series([None] * rows, dtype=pl.Int64)
    return {"members": text, "source": number, "target": number, "in_splits": text, "out_splits": text}


def with_members(collectives: pl.DataFrame, groups: Mapping[str, Sequence[int]], world_size: int | None) -> pl.DataFrame:
    """Return `collectives` (stage 'read') with the members that the header tells where the record does not.

    By the group's name, or because a group as large as the job holds all of its ranks (where torch writes an empty list).
    """
    known = {name: _text(ranks) for name, ranks in groups.items() if ranks}
    named = pl.col("group").replace_strict(known, default=None, return_dtype=pl.String) if known else pl.lit(None, dtype=pl.String)
    if world_size is None or not 0 < world_size <= _MOST_RANKS:
        everyone = pl.lit(None, dtype=pl.String)
    else:
        everyone = pl.when(pl.col("size") == world_size).then(pl.lit(_text(range(world_size))))
    told = pl.coalesce("members", named, everyone)
    fits = pl.col("size").is_null() | (told.str.count_matches(",", literal=True) + 1 == pl.col("size"))
    return collectives.with_columns(pl.when(fits).then(told).alias("members"))


def _members(args: CompleteArgs) -> str | None:
    """Return the ranks of the group as '0,1,2'; None where the list was cut off and its ranks are not evenly spaced."""
    listed = _listed(args.members)
    return _spaced(args) if listed is None else listed


def _spaced(args: CompleteArgs) -> str | None:
    """Return the ranks by their first one, their distance and their number."""
    start, stride, size = (integer_of(field) for field in (args.rank_start, args.rank_stride, args.group_size))
    if start is None or stride is None or size is None or start < 0 or stride < 1 or not 0 < size <= _MOST_RANKS:
        return None
    return _text(range(start, start + stride * size, stride))


def _root(name: str | None, args: CompleteArgs, members: str | None) -> int | None:
    """Return the root of a rooted collective in ranks of the job; None for others, and where group or root are not known."""
    if name is None or members is None or name.strip("_").removesuffix("_oop") not in _ROOTED:
        return None
    ranks, place = members.split(","), _rank(args.root)
    return int(ranks[place]) if place is not None and place < len(ranks) else None


def _rank(field: Raw) -> int | None:
    found = None if field is ABSENT else integer_of(field)
    return found if found is not None and 0 <= found <= _MOST_RANKS else None


def _listed(field: Raw) -> str | None:
    """Return the numbers of a list, given as JSON or as text, joined by commas; None where it is absent, empty or cut off ('...')."""
    if field is ABSENT:
        return None
    inner = bytes(field).decode("utf-8", "replace").strip().strip('"').strip().removeprefix("[").removesuffix("]")
    return "".join(inner.split()) if _INTEGERS.fullmatch(inner) else None


def _text(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks))
