"""From blocks to a claim: the ratio of a pair, the interval over pairs, the verdict; how small an effect a number of pairs will show.

The unit of replication is the pair of processes, never the step: memory layout and placement are drawn once a process.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from gpudiag.arrays import Floats
from gpudiag.errors import MissingDependencyError
from gpudiag.experiment.design import Design, find_level
from gpudiag.model.experiment import ALPHA, Comparison, Pair, Verdict, compute_log_ratios, compute_pair_log_ratio
from gpudiag.units import format_share

MIN_OVER_PAIRS = 4
"""Fewer pairs have no useful interval of their own: the quantile of t is 4.3 with two degrees of freedom and 12.7 with one."""

DECIDED: tuple[Verdict, ...] = ("faster", "slower", "no_difference", "failed")
"""Verdicts that further pairs would not change."""

REACHABLE = 0.03
"""An interval that is wider than this to both sides after the last look will not be mended by a few more pairs."""


def _load_scipy_special() -> Any:
    try:
        from scipy import special
    except ImportError as error:
        raise MissingDependencyError("an experiment needs scipy", "pip install 'gpudiag[train]'") from error
    return special


def compute_mean_interval(values: Sequence[float], alpha: float) -> tuple[float, float, float, float]:
    """Return (mean, low, high, p) of a two-sided t test of `values` against 0 at level `alpha` (Student 1908). Takes two values or more.

    Raises MissingDependencyError without scipy.
    """
    special = _load_scipy_special()
    mean, freedom = statistics.fmean(values), len(values) - 1
    standard_error = statistics.stdev(values) / math.sqrt(len(values))
    half = float(special.stdtrit(freedom, 1 - alpha / 2)) * standard_error
    if standard_error == 0:
        return mean, mean, mean, 1.0 if mean == 0 else 0.0
    return mean, mean - half, mean + half, 2 * float(special.stdtr(freedom, -abs(mean) / standard_error))


def correct_for_looks(p: float, looks: tuple[int, ...]) -> float:
    """Return the p-value of an experiment that was looked at after each of `looks` pairs, from that of the look at which it ended.

    It is at most ALPHA exactly where the look's own is at most find_level(looks). Below that the bound of Bonferroni holds: the number
    of looks times p. Above, looks count for as many independent ones as they do at ALPHA (Sidak 1967, JASA 62(318)): they are fewer, the
    larger p.
    """
    each = find_level(looks)
    if p <= each:
        return min(ALPHA, len(looks) * p)
    return 1.0 if p >= 1 else -math.expm1(math.log1p(-p) * math.log1p(-ALPHA) / math.log1p(-each))


def judge_pairs(pairs: Sequence[Pair], design: Design, *, steady: bool = True, notes: tuple[str, ...] = ()) -> Comparison:
    """Return what `pairs` say; with fewer than MIN_OVER_PAIRS the interval is over their blocks and says so.

    Over pairs, `interval` is one that holds at all looks together (Jennison and Turnbull 1989, JRSS B 51(3)), and `p` is corrected for the
    looks: it is at most ALPHA exactly where the interval leaves 1 out. Pairs in another unit than the first are left out; a note says so.
    """
    counted = [pair for pair in pairs if pair.unit == pairs[0].unit]
    if left_out := len(pairs) - len(counted):
        notes = (*notes, f"{left_out} of {len(pairs)} pairs were not counted in {pairs[0].unit} and were left out")
    ratios = [ratio for pair in counted if (ratio := compute_pair_log_ratio(pair)) is not None]
    over_pairs = len(ratios) >= MIN_OVER_PAIRS
    values = ratios if over_pairs else [ratio for pair in counted for ratio in compute_log_ratios(pair)]
    if len(values) < 2:
        return Comparison(verdict="failed", reason="no_steps", pairs=len(pairs), measured=tuple(pairs), notes=notes)
    middle, low, high, p = compute_mean_interval(values, find_level(design.looks) if over_pairs else ALPHA)
    if not over_pairs:
        middle = statistics.fmean(ratios)
        low, high = min(low, middle), max(high, middle)
    return Comparison(
        verdict=decide_verdict(low, middle, high, design, last=len(ratios) >= design.looks[-1]) if steady else "unstable",
        ratio=math.exp(middle),
        interval=(math.exp(low), math.exp(high)),
        over="pairs" if over_pairs else "blocks",
        p=correct_for_looks(p, design.looks) if over_pairs else p,
        pairs=len(ratios),
        unit=pairs[0].unit,
        measured=tuple(pairs),
        notes=notes,
    )


def decide_verdict(low: float, middle: float, high: float, design: Design, *, last: bool) -> Verdict:
    """Return the verdict on an interval of log ratios: an effect must be known not to be 0, and be worth a word.

    `no_difference` is two one-sided tests (Schuirmann 1987, J. Pharmacokinet. Biopharm. 15(6)), each at half the level of a look: that the
    whole interval lies within the smallest effect that counts, so that what is shown and what is claimed agree.
    """
    worth = math.log1p(design.min_effect)
    if low > 0 and middle >= worth:
        return "faster"
    if high < 0 and middle <= -worth:
        return "slower"
    if -worth <= low and high <= worth:
        return "no_difference"
    return "too_noisy" if last and high - low > 2 * math.log1p(REACHABLE) else "inconclusive"


def compute_spread(pairs: Sequence[Pair]) -> float | None:
    """Compute the standard deviation of the log ratios of pairs of processes; None for fewer than two."""
    ratios = [ratio for pair in pairs if (ratio := compute_pair_log_ratio(pair)) is not None]
    return statistics.stdev(ratios) if len(ratios) > 1 else None


# -- power ------------------------------------------------------------------------------------------------------------------

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
    error = spread / math.sqrt(pairs)
    needed = np.maximum(math.log1p(design.min_effect), _find_critical_t(pairs, design) * error * _list_spreads(pairs - 1))
    return float(np.mean(_load_scipy_special().ndtr((effect - needed) / error)))


@functools.cache
def _list_spreads(freedom: int) -> Floats:
    """List equally likely sample deviations for a true one of 1: square roots of quantiles of chi-squared over its degrees of freedom."""
    spreads: Floats = np.sqrt(2 * _load_scipy_special().gammaincinv(freedom / 2, (np.arange(_GRID) + 0.5) / _GRID) / freedom)
    return spreads


def _find_critical_t(pairs: int, design: Design) -> float:
    return float(_load_scipy_special().stdtrit(pairs - 1, 1 - find_level(design.looks) / 2))
