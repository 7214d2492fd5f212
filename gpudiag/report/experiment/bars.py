"""An interval as a bar of characters, on an axis that all rows of a table share. ASCII: it has to be right on every terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpudiag.model.experiment import Outcome
from gpudiag.report.experiment import words

LEAST_CELLS, MOST_CELLS = 16, 48
_NARROWEST = 1.02
"""The axis shows 2 % to both sides of 1 at least: smaller effects should look small."""
_WIDEST = 4.0
"""A first interval can reach far; what lies beyond is cut, and the bar ends in < or >."""


class Axis:
    """A logarithmic axis of `cells` characters that holds the intervals of `outcomes` and 1."""

    def __init__(self, outcomes: Sequence[Outcome], cells: int) -> None:
        ends = [end for found in outcomes if words.throughput(found) for end in (found.ratio, *(found.interval or ())) if end and end > 0]
        low = max(min([*ends, 1 / _NARROWEST]), 1 / _WIDEST)
        high = min(max([*ends, _NARROWEST]), _WIDEST)
        self.cells = max(cells, LEAST_CELLS)
        self._low, self._span = math.log(low), math.log(high) - math.log(low)

    def _place(self, value: float) -> int:
        """Return the cell of a ratio, that of the nearer end for one beyond the axis."""
        share = (math.log(value) - self._low) / self._span if value > 0 else 0.0
        return round(min(max(share, 0.0), 1.0) * (self.cells - 1))

    def bar(self, outcome: Outcome) -> str:
        """Return a row: '|' at x1, '(==o==)' for an interval with its middle; '' where there is no ratio."""
        if not words.throughput(outcome) or outcome.ratio is None:
            return ""
        row = [" "] * self.cells
        low, high = outcome.interval or (outcome.ratio, outcome.ratio)
        first, last = self._place(low), self._place(high)
        for cell in range(first, last + 1):
            row[cell] = "="
        row[self._place(1.0)] = "|"
        if last > first:
            row[first] = "<" if self._beyond(low) else "("
            row[last] = ">" if self._beyond(high) else ")"
        row[self._place(outcome.ratio)] = "o"
        return "".join(row)

    def _beyond(self, value: float) -> bool:
        place = math.log(value) if value > 0 else -math.inf
        return place < self._low - 1e-9 or place > self._low + self._span + 1e-9
