"""The steps that stand for the others: the fastest, the median and the slowest of those that are analysed."""

from __future__ import annotations

import polars as pl


def representatives(steps: pl.DataFrame) -> dict[int, str]:
    """Return the role of each representative step by its row of `steps`: fastest, median, slowest; joined where one step is several.

    The median is the lower one of an even number; of equal steps the earlier counts as faster.
    """
    length = (pl.col("end_ns") - pl.col("start_ns")).alias("length")
    order = steps.filter("analysed").sort(length, "start_ns")["id"].to_list()
    if not order:
        return {}
    roles: dict[int, list[str]] = {}
    for role, place in (("fastest", 0), ("median", (len(order) - 1) // 2), ("slowest", len(order) - 1)):
        roles.setdefault(order[place], []).append(role)
    return {row: ", ".join(names) for row, names in roles.items()}
