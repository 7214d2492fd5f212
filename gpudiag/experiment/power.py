"""How small an effect a number of pairs will show, from how much pairs of unchanged processes differ."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from gpudiag.errors import MissingDependencyError
from gpudiag.experiment.design import Design, find_level
from gpudiag.units import format_share

POWER = 0.8
"""Chance to show an effect that is called one that will be shown: the convention of Cohen 1988, Statistical Power Analysis, section 2.4."""

UNLUCKY = 0.2
"""Chance that the spread is truly larger than what Forecast.at_worst reckons with: few pairs know it badly."""

_GRID = 2000
_HALVINGS = 50


class Forecast(msgspec.Struct, frozen=True):
    """What a look at `pairs` pairs will show: effects as shares, 0.024 for 2.4 % more throughput."""

    pairs: int
    effect: float
    """Smallest effect that is claimed with the chance POWER, if pairs differ as much as those did that were measured."""
    at_worst: float | None
    """The same, if those that were measured were alike by luck (a chance of UNLUCKY); null: their number is not known, or is one."""


def forecast_effects(spread: float, design: Design, *, measured: int | None = None) -> tuple[Forecast, ...]:
    """Return what each look of `design` will show; earlier looks add to the chance of a later one, so that it is rather better.

    `spread` is the standard deviation of the log ratios of `measured` pairs of unchanged processes. Raises MissingDependencyError.
    """
    worst = None
    if measured is not None and measured > 1:  # the true deviation is at most so many times that of the sample, but for UNLUCKY
        freedom = measured - 1
        worst = spread * math.sqrt(freedom / (2 * float(_load_scipy_special().gammaincinv(freedom / 2, UNLUCKY))))
    return tuple(
        Forecast(pairs, find_smallest_effect(spread, pairs, design), None if worst is None else find_smallest_effect(worst, pairs, design))
        for pairs in design.looks
        if pairs > 1
    )


def format_forecast(looks: tuple[Forecast, ...]) -> str:
    """Format a forecast in words: what the first and the last look will show."""
    parts = []
    for look in looks if len(looks) < 2 else (looks[0], looks[-1]):
        worst = "" if look.at_worst is None else f" ({format_share(look.at_worst, 1)} at worst)"
        parts.append(f"{look.pairs} pairs will show >= {format_share(look.effect, 1)}{worst}")
    return ", ".join(parts)


def find_smallest_effect(spread: float, pairs: int, design: Design, chance: float = POWER) -> float:
    """Find the smallest effect, as a share, that one look at `pairs` pairs claims with `chance`. Raises MissingDependencyError."""
    if spread <= 0:
        return design.min_effect
    quantile = _find_critical_t(pairs, design)
    low, high = 0.0, math.log1p(design.min_effect) + spread / math.sqrt(pairs) * 4 * (quantile + 1)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if compute_power(middle, spread, pairs, design) < chance else (low, middle)
    return math.expm1(high)


def compute_power(effect: float, spread: float, pairs: int, design: Design) -> float:
    """Compute the chance that one look at `pairs` pairs claims an `effect` (a log ratio above 0; their own have the deviation `spread`).

    The claim needs t above its quantile, which is the noncentral t distribution (Johnson and Welch 1940, Biometrika 31(3/4)), and the mean
    above the smallest effect that counts: the mean is normal for each spread that a sample may show, and these are averaged over.
    """
    special, freedom = _load_scipy_special(), pairs - 1
    error = spread / math.sqrt(pairs)
    # equally likely sample deviations for a true one of 1: square roots of quantiles of chi-squared over its degrees of freedom
    spreads = np.sqrt(2 * special.gammaincinv(freedom / 2, (np.arange(_GRID) + 0.5) / _GRID) / freedom)
    needed = np.maximum(math.log1p(design.min_effect), _find_critical_t(pairs, design) * error * spreads)
    return float(np.mean(special.ndtr((effect - needed) / error)))


def _find_critical_t(pairs: int, design: Design) -> float:
    return float(_load_scipy_special().stdtrit(pairs - 1, 1 - find_level(design.looks) / 2))


def _load_scipy_special() -> Any:
    try:
        from scipy import special
    except ImportError as error:
        raise MissingDependencyError("an experiment needs scipy", "pip install 'gpudiag[train]'") from error
    return special
