"""From blocks to a claim: the ratio of a pair, the interval over pairs, the verdict.

The unit of replication is the pair of processes, never the step: memory layout and placement are drawn once a process.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from gpudiag.errors import MissingDependencyError
from gpudiag.experiment.design import ALPHA, Design, level
from gpudiag.model.experiment import Comparison, Pair, Verdict

MIN_OVER_PAIRS = 4
"""Fewer pairs have no useful interval of their own: the quantile of t is 4.3 with two degrees of freedom and 12.7 with one."""

REACHABLE = 0.03
"""An interval that is wider than this to both sides after the last look will not be mended by a few more pairs."""


def log_ratios(pair: Pair) -> list[float]:
    """Return log(throughput of the second / of the first) of each block and the one beside it. Blocks without any steps are left out."""
    return [math.log(second / first) for first, second in zip(pair.first, pair.second, strict=True) if first > 0 and second > 0]


def pair_log_ratio(pair: Pair) -> float | None:
    """Return the log ratio of a pair, the median of its blocks: a block that was disturbed does not move it. None: it has none."""
    ratios = log_ratios(pair)
    return statistics.median(ratios) if ratios else None


def mean_interval(values: Sequence[float], alpha: float) -> tuple[float, float, float, float]:
    """Return (mean, low, high, p) of a two-sided t test of `values` against 0 at level `alpha` (Student 1908). Takes two values or more.

    Raises MissingDependencyError without scipy.
    """
    try:
        from scipy.special import stdtr, stdtrit
    except ImportError as error:
        raise MissingDependencyError("an experiment needs scipy", "pip install 'gpudiag[train]'") from error
    mean, freedom = statistics.fmean(values), len(values) - 1
    standard_error = statistics.stdev(values) / math.sqrt(len(values))
    half = float(stdtrit(freedom, 1 - alpha / 2)) * standard_error
    if standard_error == 0:
        return mean, mean, mean, 1.0 if mean == 0 else 0.0
    return mean, mean - half, mean + half, 2 * float(stdtr(freedom, -abs(mean) / standard_error))


def compared(pairs: Sequence[Pair], design: Design, *, steady: bool = True, notes: tuple[str, ...] = ()) -> Comparison:
    """Return what `pairs` say; with fewer than MIN_OVER_PAIRS the interval is over their blocks and says so."""
    ratios = [ratio for pair in pairs if (ratio := pair_log_ratio(pair)) is not None]
    over_pairs = len(ratios) >= MIN_OVER_PAIRS
    values = ratios if over_pairs else [ratio for pair in pairs for ratio in log_ratios(pair)]
    if len(values) < 2:
        return Comparison(verdict="failed", reason="no_steps", pairs=len(pairs), measured=tuple(pairs), notes=notes)
    middle, low, high, p = mean_interval(values, level(design.looks) if over_pairs else ALPHA)
    if not over_pairs:
        middle = statistics.fmean(ratios)
        low, high = min(low, middle), max(high, middle)
    return Comparison(
        verdict=verdict(low, middle, high, design, last=len(ratios) >= design.looks[-1]) if steady else "unstable",
        ratio=math.exp(middle),
        interval=(math.exp(low), math.exp(high)),
        over="pairs" if over_pairs else "blocks",
        p=p,
        pairs=len(ratios),
        unit=pairs[0].unit,
        measured=tuple(pairs),
        notes=notes,
    )


def verdict(low: float, middle: float, high: float, design: Design, *, last: bool) -> Verdict:
    """Return the verdict on an interval of log ratios: an effect must be known not to be 0, and be worth a word."""
    worth = math.log1p(design.min_effect)
    if low > 0 and middle >= worth:
        return "faster"
    if high < 0 and middle <= -worth:
        return "slower"
    if -worth <= low and high <= worth:
        return "no_difference"
    return "too_noisy" if last and high - low > 2 * math.log1p(REACHABLE) else "inconclusive"


def decided(found: Comparison) -> bool:
    """Return whether further pairs would not change the verdict."""
    return found.verdict in ("faster", "slower", "no_difference", "failed")
