"""Places where the device was idle: what the host did, with the line of the user's code where it is known."""

from __future__ import annotations

import re

import polars as pl

from gpudiag.facts.window import Window
from gpudiag.model.finding import Where

MOST = 3
"""Places per finding."""

UNTOLD = "nothing was recorded"
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

    Columns: cause, site, op (name), evidence (that of the longest piece), count, time_ns. Pieces of one site are one place whatever the op.
    """
    names = ops.select(pl.col("id").alias("op"), pl.col("name").cast(pl.String).alias("op_name"))
    frame = pieces.join(names, on="op", how="left", maintain_order="left")
    kind = pl.col("evidence").str.replace_all(_NUMBERS, "#")
    untold = pl.col("site").is_null()
    # a Python line is the place; the op or event only where no line is known
    key = [pl.when(untold).then(kind).alias("kind"), pl.when(untold).then("op_name").alias("by_op")]
    longest = pl.col("time_ns") == pl.col("time_ns").max()
    found = frame.group_by("cause", "site", *key, maintain_order=True).agg(
        op=pl.col("op_name").filter(longest).first(),
        evidence=pl.col("evidence").filter(longest).first(),
        count=pl.col("gap").n_unique(),
        time_ns=pl.col("time_ns").sum(),
    )
    return found.drop("kind", "by_op").sort(["time_ns", "cause", "site", "op"], descending=[True, False, False, False], nulls_last=True)


def idle_places(window: Window, *causes: str) -> tuple[Where, ...]:
    """Return the places with the most idle time of `causes`."""
    pieces = window.idle.filter(pl.col("cause").is_in(causes))
    found = by_place(pieces, window.analysis.trace.ops).head(MOST)
    return tuple(_where(*row) for row in found.select("op", "evidence", "site", "time_ns").iter_rows())


def _where(op: str | None, evidence: str | None, site: str | None, time_ns: int) -> Where:
    file, line = split_site(site)
    return Where(evidence or (f"before {op}" if op else UNTOLD), file, line, time_ns)


def call_places(calls: pl.DataFrame) -> tuple[Where, ...]:
    """Return the places of `calls` (rows of syncs with op_name) by what they cost."""
    label = pl.coalesce("op_name", pl.col("api").cast(pl.String)).alias("what")
    sums = (
        calls.group_by(label, "site")
        .agg(pl.col("cost_ns").sum())
        .sort(["cost_ns", "what", "site"], descending=[True, False, False], nulls_last=True)
    )
    return tuple(Where(what, *split_site(site), time) for what, site, time in sums.head(MOST).iter_rows())
