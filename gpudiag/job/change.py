"""From which step on a series is higher than before."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SURE = 3.0
"""Least standard deviations of the two-sample statistic at the split. What it finds is verified by how late the rank is on both sides."""

LEAST = 5
"""Values on either side of a split."""


def rises_at(series: npt.NDArray[np.float64]) -> int | None:
    """Return the index from which on `series` is higher than before; None where no split tells the two sides apart.

    The split that maximises the statistic of Mann and Whitney (1947), standardised for its place: by ranks of the values, so that a few
    very slow steps move it little. From there to the split that leaves fewest values on the wrong side of the middle of both medians.
    """
    count = series.size
    if count < 2 * LEAST:
        return None
    ordered = np.sort(series)
    ranks = (np.searchsorted(ordered, series, "left") + np.searchsorted(ordered, series, "right") + 1) / 2
    before = np.arange(LEAST, count - LEAST + 1)
    lack = before * (count + 1) / 2 - np.cumsum(ranks)[before - 1]
    sure = lack / np.sqrt(before * (count - before) * (count + 1) / 12)
    best = int(before[sure.argmax()])
    return _sharpened(series, best) if sure.max() >= SURE else None


def _sharpened(series: npt.NDArray[np.float64], split: int) -> int:
    above = series > (np.median(series[:split]) + np.median(series[split:])) / 2
    right = np.concatenate(([0], np.cumsum(~above))) - np.concatenate(([0], np.cumsum(above)))
    return int(right.argmax())
