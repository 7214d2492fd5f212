"""Whether a figure that is looked at again and again in a long run stays as it is: a slope, its interval, and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

CONFIDENCE = 0.99


class Trend(NamedTuple):
    """Growth over `per` steps: Theil and Sen's slope and its interval (99 %), in the unit of the figure."""

    growth: float
    low: float
    high: float
    limit: float

    @property
    def verdict(self) -> str:
        """Return 'flat' where growth stays below the limit for certain, 'grows' where it is above for certain, else 'not told'."""
        if self.high <= self.limit:
            return "flat"
        return "grows" if self.low > self.limit else "not told"


def trend(steps: Sequence[int], values: Sequence[float], *, per: int, limit: float) -> Trend:
    """Return the trend over the second half: what a process takes once, for its first windows and libraries, lies in the first.

    The median of the slopes of all pairs (P. K. Sen, 1968): a third of the figures may be far off, as those taken while a trace is written.
    """
    from scipy.stats import theilslopes

    half = len(steps) // 2
    found = theilslopes(values[half:], steps[half:], alpha=CONFIDENCE)
    growth, low, high = (float(slope) * per for slope in (found[0], found[2], found[3]))
    return Trend(growth, low, high, limit)
