"""How far a figure of a run may be off: intervals over batches of consecutive steps.

Steps of one process resemble their neighbours (a slow phase of the loader, a clock that falls), so that a t test of single steps calls
noise a change. Batches of consecutive steps resemble each other far less. A batch holds floor(sqrt(n)) of n steps (Jones, Haran, Caffo
and Neath 2006, J. Am. Stat. Assoc. 101(476), section 3.2); the interval stands around the figure of all steps, its width comes from the
figures of the batches ("sectioning", Asmussen and Glynn 2007, Stochastic Simulation, section III.5a).

How often the 95 % interval of a ratio leaves out 1 where nothing differs, simulated (600 pairs of runs, a tenth of the steps disturbed or
fewer): for steps that are independent at most 5 %; with a correlation of neighbours of 0.5 at most 6 %, of 0.8 4 to 16 %. Single steps as
batches: 11 % with 0.5 and 30 % with 0.8, for windows of six steps. tests/diagnosis/test_batches.py repeats the simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Statistic = Callable[[npt.NDArray[np.float64]], Any]
"""One number of an array: np.median, np.mean, or one of those below."""

# Two-sided quantiles of Student's t with 1 to 30 degrees of freedom; beyond, that of 30 is kept: a little wide.
_T = {
    0.95: (
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
        2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
    ),
    0.99: (
        63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.106, 3.055, 3.012, 2.977, 2.947,
        2.921, 2.898, 2.878, 2.861, 2.845, 2.831, 2.819, 2.807, 2.797, 2.787, 2.779, 2.771, 2.763, 2.756, 2.750,
    ),
}  # fmt: skip


FEWEST_BATCHES = 3
"""With two batches an interval is useless: the quantile of t is 12.7 with one degree of freedom and 4.3 with two."""


class Estimate(msgspec.Struct, frozen=True):
    """A figure, its standard error, and the batches that tells it; None and 0: not known."""

    value: float
    error: float | None = None
    batches: int = 0

    def times(self, factor: float) -> Estimate:
        """Return it in another unit."""
        return Estimate(self.value * factor, None if self.error is None else self.error * abs(factor), self.batches)


def look_up_t_quantile(level: float, freedom: int) -> float:
    """Return the two-sided quantile of Student's t for `level` (0.95 or 0.99) and `freedom` degrees of freedom, 1 or more."""
    return _T[level][min(freedom, len(_T[level])) - 1]


def estimate_by_batches(steps: Sequence[Any] | npt.NDArray[Any], statistic: Statistic) -> Estimate | None:
    """Return `statistic` of `steps` (one entry or row a step, in their order) with its error; None where there is no step."""
    values = np.asarray(steps, dtype=np.float64)
    if not len(values):
        return None
    whole, count = float(statistic(values)), count_batches(len(values))
    if count < 2:
        return Estimate(whole)
    parts = np.asarray([statistic(batch) for batch in np.array_split(values, count)])
    return Estimate(whole, math.sqrt(float(((parts - whole) ** 2).sum()) / (count * (count - 1))), count)


def count_batches(steps: int) -> int:
    """Return how many batches `steps` steps make; no fewer than FEWEST_BATCHES where there are as many steps."""
    return max(steps // math.isqrt(steps), min(steps, FEWEST_BATCHES))


def compute_p95(values: npt.NDArray[np.float64]) -> float:
    """Return the 95th percentile, linear between steps as in reports."""
    return float(np.quantile(values, 0.95))


def compute_quotient(rows: npt.NDArray[np.float64]) -> float:
    """Return the sum of the first column over that of the second."""
    return float(rows[:, 0].sum() / rows[:, 1].sum())


def estimate_interval(found: Estimate, level: float = 0.95) -> tuple[float, float] | None:
    """Return the interval of a figure; None where its error is not known."""
    if found.error is None:
        return None
    half = look_up_t_quantile(level, found.batches - 1) * found.error
    return found.value - half, found.value + half


def estimate_difference(a: Estimate, b: Estimate, level: float) -> tuple[float, float] | None:
    """Return the interval of b - a by Welch's error with the fewest degrees of freedom that it can have; None: not known."""
    if a.error is None or b.error is None:
        return None
    half = look_up_t_quantile(level, min(a.batches, b.batches) - 1) * math.hypot(a.error, b.error)
    return b.value - a.value - half, b.value - a.value + half


def estimate_ratio(a: Estimate, b: Estimate, level: float = 0.95) -> tuple[float, float] | None:
    """Return the interval of b / a, of positive figures, by the error of log b - log a (delta method); None: not known."""
    if a.error is None or b.error is None or a.value <= 0 or b.value <= 0:
        return None
    half = look_up_t_quantile(level, min(a.batches, b.batches) - 1) * math.hypot(a.error / a.value, b.error / b.value)
    half = min(half, 700.0)  # exp() beyond has no number
    return b.value / a.value * math.exp(-half), b.value / a.value * math.exp(half)
