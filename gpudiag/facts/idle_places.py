"""Places where the device was idle: what the host did, with the line of the user's code where it is known."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import polars as pl

from gpudiag.attribution.names import text, texts
from gpudiag.facts.spoken import place_words
from gpudiag.model.finding import Where

if TYPE_CHECKING:
    from gpudiag.facts.window import Window  # heavy, and what prints a report needs its words alone

MOST = 3
"""Places per finding."""

UNTOLD = "nothing was recorded"
_LOOKED_AT = 100
"""Largest places among which those with the same words are one; the rest holds next to nothing."""

_SITE = re.compile(r"^(.*)\((\d{1,9})\)(?:: (.*))?$", re.DOTALL)
_NUMBERS = r"\d+(\.\d+)?"
"""Numbers in evidence (bytes written, milliseconds) tell one event from the next of the same kind, not one place from another."""


def split_site(site: str | None) -> tuple[str | None, int | None]:
    """Return (file, line) of 'path/file.py(12): function', the path with its last two parts; (None, None) where it is not of that form."""
    found = _SITE.match(site or "")
    if found is None:
        return None, None
    return "/".join(re.split(r"[\\/]", found[1])[-2:]), int(found[2])


def by_place(pieces: pl.DataFrame, ops: pl.DataFrame) -> pl.DataFrame:
    """Return idle `pieces` (with time_ns) summed by cause, site, op and evidence, the largest first.

    Columns: cause, site, op (name), evidence (that of the longest piece), count, time_ns. Pieces of one site or event are one place,
    whatever the op.
    """
    names = texts(ops["name"].gather(pieces["op"])).alias("op_name")  # an op's id is its row
    frame = pieces.select("cause", "site", "evidence", "gap", "time_ns").with_columns(names, _place("site").alias("place"))
    frame = frame.with_columns(_whole("place").alias("place"))
    kind = pl.col("evidence").str.replace_all(_NUMBERS, "#")
    untold = pl.col("site").is_null()
    # a Python line is the place; the event only where no line is known, and the op only where neither is
    key = [pl.when(untold).then(kind).alias("kind"), pl.when(untold & pl.col("evidence").is_null()).then("op_name").alias("by_op")]
    longest = pl.col("time_ns") == pl.col("time_ns").max()
    found = frame.group_by("cause", "place", *key, maintain_order=True).agg(
        site=pl.col("site").filter(longest).first(),
        op=pl.col("op_name").filter(longest).first(),
        evidence=pl.col("evidence").filter(longest).first(),
        count=pl.col("gap").n_unique(),
        time_ns=pl.col("time_ns").sum(),
    )
    found = found.drop("kind", "by_op", "place")
    return found.sort(["time_ns", "cause", "site", "op"], descending=[True, False, False, False], nulls_last=True)


def _place(site: str) -> pl.Expr:
    """Return file and line of a site: the function is known from frames and not from what a bundle recorded itself."""
    return pl.col(site).str.replace(r"(\(\d+\)): .*$", "${1}")


def _whole(place: str) -> pl.Expr:
    """Return the place with its folders, where a bundle recorded the file alone and only one file of that name stands at the line."""
    name = pl.col(place).str.extract(r"([^/\\]+)$")
    whole = pl.when(pl.col(place).str.contains(r"[/\\]")).then(place)
    same = ("cause", name)
    return pl.when(whole.n_unique().over(same) - whole.is_null().any().over(same) == 1).then(whole.max().over(same)).otherwise(place)


def idle_places(window: Window, *causes: str) -> tuple[Where, ...]:
    """Return the places with the most idle time of `causes`; those with the same words are one."""
    pieces = window.idle.filter(pl.col("cause").is_in(causes))
    rows = by_place(pieces, window.analysis.trace.ops).head(_LOOKED_AT)
    sums: dict[tuple[str, str | None, int | None], int] = {}
    for op, evidence, site, time_ns in rows.select("op", "evidence", "site", "time_ns").iter_rows():
        key = (place_words(evidence, op) or UNTOLD, *split_site(site))
        sums[key] = sums.get(key, 0) + time_ns
    ranked = sorted(sums.items(), key=lambda item: -item[1])[:MOST]
    return tuple(Where(*key, time_ns) for key, time_ns in ranked)


def call_places(calls: pl.DataFrame) -> tuple[Where, ...]:
    """Return the places of `calls` (rows of syncs with op_name) by what they cost."""
    label = pl.coalesce("op_name", text("api")).alias("what")
    sums = (
        calls.group_by(label, "site")
        .agg(pl.col("cost_ns").sum())
        .filter(pl.col("cost_ns") > 0)
        .sort(["cost_ns", "what", "site"], descending=[True, False, False], nulls_last=True)
    )
    return tuple(Where(what, *split_site(site), time) for what, site, time in sums.head(MOST).iter_rows())
