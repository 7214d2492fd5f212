"""When a warm-up is over: the first steps are slower, and a step that compiles is none of the run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

BATCH = 5
"""Steps whose mean is one value (the 5 of MSER-5)."""

MIN_BATCHES = 5


def truncation(values: Sequence[float]) -> int:
    """Return how many values to cut off at the beginning so that the mean of the rest is known best.

    The marginal standard error rule (White 1997, Simulation 69(6)): the d that minimises sum((y - mean)^2) / (n - d)^2 over the values
    behind it. Fewer than two values are never left.
    """
    best, found = float("inf"), 0
    for cut in range(len(values) - 1):
        rest = values[cut:]
        mean = statistics.fmean(rest)
        error = sum((value - mean) ** 2 for value in rest) / len(rest) ** 2
        if error < best:
            best, found = error, cut
    return found


class Steadiness:
    """Says when the steps of a warm-up have become steady."""

    def __init__(self, min_steps: int) -> None:
        self._min_steps = min_steps
        self._walls: list[int] = []
        self.steps = 0

    def add(self, wall_ns: int, *, compiled: bool) -> bool:
        """Return whether the warm-up is over with this step. One that `compiled` something begins it anew."""
        self.steps += 1
        if compiled:
            self._walls.clear()
            return False
        self._walls.append(wall_ns)
        if len(self._walls) < self._min_steps:
            return False
        size = max(1, min(BATCH, len(self._walls) // MIN_BATCHES))
        walls = self._walls[len(self._walls) % size :]
        means = [statistics.fmean(walls[at : at + size]) for at in range(0, len(walls), size)]
        return truncation(means) <= len(means) // 2

    @property
    def step_ns(self) -> int:
        """Return the median of the later half of the steps; 0 where there are none."""
        walls = self._walls[len(self._walls) // 2 :]
        return round(statistics.median(walls)) if walls else 0
