"""From blocks to a claim: the ratio of a pair, the interval over pairs, the verdict.

The unit of replication is the pair of processes, never the step: memory layout and placement are drawn once a process.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from gpudiag.errors import MissingDependencyError
from gpudiag.experiment.design import ALPHA, Design, find_level
from gpudiag.model.experiment import Comparison, Pair, Verdict, compute_log_ratios, compute_pair_log_ratio

MIN_OVER_PAIRS = 4
"""Fewer pairs have no useful interval of their own: the quantile of t is 4.3 with two degrees of freedom and 12.7 with one."""

DECIDED: tuple[Verdict, ...] = ("faster", "slower", "no_difference", "failed")
"""Verdicts that further pairs would not change."""

REACHABLE = 0.03
"""An interval that is wider than this to both sides after the last look will not be mended by a few more pairs."""


def compute_mean_interval(values: Sequence[float], alpha: float) -> tuple[float, float, float, float]:
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


def correct_for_looks(p: float, looks: tuple[int, ...]) -> float:
    """Return the p-value of an experiment that was looked at after each of `looks` pairs, from that of the look at which it ended.

    It is at most ALPHA exactly where the look's own is at most level(looks). Below that the bound of Bonferroni holds: the number of looks
    times p. Above, looks count for as many independent ones as they do at ALPHA (Sidak 1967, JASA 62(318)): they are fewer, the larger p.
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


def apply_holm(ps: Sequence[float], alpha: float = ALPHA) -> list[bool]:
    """Return for each p-value whether its claim stands, so that no claim at all is wrong with a chance of 1 - alpha.

    Holm 1979, Scand. J. Stat. 6(2). The p-values are those of whole experiments, looks included, as in a Comparison.
    """
    stands = [False] * len(ps)
    for rank, place in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        if not ps[place] <= alpha / (len(ps) - rank):
            break
        stands[place] = True
    return stands
