"""How the rule of claims and the searches do on recorded processes, beside naive peers: `python tests/benchmarks/bench_experiments.py`.

The recordings are beside the checkout (../shared/experiments); without them there is nothing to compare on, and it says so. Shares are over
groups of pairs that are drawn again and again from one recording, `independent` over those that have no pair in common, with the exact
interval of Clopper and Pearson: it is all that a recording proves.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recorded_ab import (
    FOLDER,
    WARM,
    CachedMeasure,
    clopper_pearson,
    experiment,
    factorial,
    faster,
    fixes,
    groups,
    resampled,
    rows,
    single_pairs,
    token_pairs,
)

from gpudiag.experiment.design import Design
from gpudiag.experiment.search import search_ordered
from gpudiag.experiment.stats import compute_mean_interval, judge_pairs
from gpudiag.model.experiment import Comparison, FixCall, Pair, compute_pair_log_ratio

DRAWN, BOOTSTRAP, EFFECT = 300, 500, 1.05
SEEDS = range(200)
Interval = tuple[float, float, int]
"""Low and high end as log ratios, and how many pairs it took."""


# -- claims ---------------------------------------------------------------------------------------------------------------


def sequential(pairs: Sequence[Pair]) -> Interval:
    """The rule of gpudiag: Student's t over pairs, looks at 4, 6, 8 and 12."""
    return _ends(experiment(pairs, Design()))


def four(pairs: Sequence[Pair]) -> Interval:
    """The same with one look at four pairs."""
    return _ends(judge_pairs(pairs[:4], Design(looks=(4,))))


def peeking(pairs: Sequence[Pair]) -> Interval:
    """Naive: Student's t at 5 %, again at every look until it is significant."""
    for look in Design().looks:
        _, low, high, p = compute_mean_interval(_ratios(pairs[:look]), 0.05)
        if p < 0.05:
            break
    return low, high, look


def bootstrap(pairs: Sequence[Pair]) -> Interval:
    """Naive: percentile bootstrap of the mean over eight pairs."""
    ratios = np.array(_ratios(pairs[:8]))
    drawn = ratios[np.random.default_rng(0).integers(len(ratios), size=(BOOTSTRAP, len(ratios)))].mean(1)
    return (*(float(end) for end in np.quantile(drawn, [0.025, 0.975])), 8)


RULES: dict[str, Callable[[Sequence[Pair]], Interval]] = {
    "gpudiag, looks at 4/6/8/12": sequential,
    "gpudiag, one look at 4": four,
    "t at 5 %, peeking": peeking,
    "percentile bootstrap, 8 pairs": bootstrap,
}


def _ends(found: Comparison) -> Interval:
    assert found.interval is not None
    low, high = found.interval
    return math.log(low), math.log(high), found.pairs


def _ratios(pairs: Sequence[Pair]) -> list[float]:
    return [ratio for pair in pairs if (ratio := compute_pair_log_ratio(pair)) is not None]


def claims(pool: str, pairs: Sequence[Pair]) -> list[str]:
    """Return a row for each rule: how often it calls unchanged processes different, and how often it finds a planted 5 %."""
    planted, table = faster(pairs, EFFECT), []
    for name, rule in RULES.items():
        drawn = [rule(group) for group in resampled(pairs, 12, DRAWN)]
        apart = [rule(group) for group in groups(pairs, 12)]
        wrong, hits = sum(map(_claims, drawn)) / DRAWN, sum(map(_claims, apart))
        low, high = clopper_pearson(hits, len(apart))
        width = float(np.median([(high - low) / 2 for low, high, _ in drawn]))
        found = [rule(group) for group in resampled(planted, 12, DRAWN)]
        right = sum(one[0] > 0 for one in found) / DRAWN
        used = float(np.mean([one[2] for one in found]))
        table.append(
            f"| {pool} | {name} | {wrong:.1%} | {hits} of {len(apart)} [{low:.0%}, {high:.0%}] | {width:.1%} | {right:.0%} | {used:.1f} |"
        )
    return table


def _claims(found: Interval) -> bool:
    return found[0] > 0 or found[1] < 0


def steps_as_unit(pool: str) -> str:
    """Return the row of the most naive peer: two processes, their steps as the unit, a bootstrap of the ratio of medians."""
    times = [np.array(row["times"][WARM : WARM + 100]) for row in rows(pool)]
    random, wrong, both = np.random.default_rng(0), 0, list(zip(times[::2], times[1::2], strict=False))
    for first, second in both:
        medians = [np.median(one[random.integers(100, size=(BOOTSTRAP, 100))], axis=1) for one in (first, second)]
        low, high = np.quantile(np.log(medians[0] / medians[1]), [0.025, 0.975])
        wrong += low > 0 or high < 0
    low, high = clopper_pearson(int(wrong), len(both))
    share = f"{wrong / len(both):.1%} | {wrong} of {len(both)} [{low:.0%}, {high:.0%}]"
    return f"| {pool} | 100 steps of two processes, bootstrap | {share} | | | 1 |"


def real_effect() -> str:
    """Return what is found of the effect that was really there, and how often the interval holds it."""
    pairs = token_pairs("b2_tokeneffect")
    everything = judge_pairs(pairs, Design(looks=(len(pairs),)))
    drawn = [sequential(group) for group in resampled(pairs, 12, DRAWN)]
    found = sum(low > 0 for low, _, _ in drawn) / DRAWN
    covered = sum(low <= math.log(everything.ratio or 0) <= high for low, high, _ in drawn) / DRAWN
    used = float(np.mean([pairs_used for *_, pairs_used in drawn]))
    low, high = everything.interval or (math.nan, math.nan)
    all_pairs = f"x{everything.ratio:.3f} [{low:.3f}, {high:.3f}] over {len(pairs)} pairs"
    return f"{all_pairs}: found {found:.1%} with {used:.1f} pairs, covered {covered:.1%}"


# -- searches -------------------------------------------------------------------------------------------------------------

Set = tuple[FixCall, ...]


def singles(order: Sequence[FixCall], tried: CachedMeasure) -> Set:
    """Naive: test each fix alone, stack the winners."""
    return tuple(one for one in order if (tried((one,)) or 0) > 0)


def everything(order: Sequence[FixCall], tried: CachedMeasure) -> Set:
    """Naive: all at once."""
    return tuple(order)


def one_pass(order: Sequence[FixCall], tried: CachedMeasure) -> Set:
    """Naive: keep if better, without leaving out and without a retry."""
    stack: Set = ()
    for one in order:
        if (tried((*stack, one)) or 0) > (tried(stack) or 0):
            stack = (*stack, one)
    return stack


class Lost(NamedTuple):
    """What a search left on the table."""

    mean: float
    worst_order: float
    measurements: float
    useless: float
    """Fixes in the result that gain less than 0.2 % there."""


def lost(truth: dict[frozenset[FixCall], float], search: Callable[..., Set], noise: float, order: Set) -> Lost:
    """Return the mean loss over seeds with the fixes in `order`, and in the worst of all their orders."""
    by_order = [_losses(truth, search, noise, other, range(10)) for other in permutations(order)]
    here = _losses(truth, search, noise, order, SEEDS)
    return Lost(here[0], max(one[0] for one in by_order), here[1], here[2])


def _losses(truth: dict[frozenset[FixCall], float], search: Callable[..., Set], noise: float, order: Set, seeds: range) -> list[float]:
    best, table = max(truth.values()), []
    for seed in seeds:
        random = np.random.default_rng(seed)
        tried = CachedMeasure(lambda calls, random=random: truth[frozenset(calls)] + random.normal(0, noise))
        found = frozenset(search(order, tried))
        useless = sum(truth[found] - truth[found - {one}] < 0.002 for one in found)
        table.append((1 - math.exp(truth[found] - best), len(tried.results) - 1, useless))
    return [float(value) for value in np.mean(table, axis=0)]


def _with_margin(margin: float) -> Callable[..., Set]:
    return lambda order, tried: search_ordered(order, tried, margin=margin)


SEARCHES: dict[str, Callable[..., Set]] = {
    "gpudiag ordered": search_ordered,
    "gpudiag ordered, margin 0.5 %": _with_margin(0.005),
    "gpudiag ordered, margin 1 %": _with_margin(0.01),
    "winners of single tests": singles,
    "one pass": one_pass,
    "all at once": everything,
}


def searches(workload: str, noise: float) -> list[str]:
    """Return a row for each search."""
    truth, order, table = factorial(workload), fixes(workload), []
    for name, search in SEARCHES.items():
        found = lost(truth, search, noise, order)
        figures = f"{found.mean:.2%} | {found.worst_order:.1%} | {found.measurements:.1f} | {found.useless:.2f}"
        table.append(f"| {workload} | {noise:.0%} | {name} | {figures} |")
    return table


def products(workload: str) -> str:
    """Return what multiplying the gains of single fixes promises, beside the best there is."""
    truth = factorial(workload)
    product = math.exp(sum(max(0.0, truth[frozenset((one,))]) for one in fixes(workload)))
    return f"{workload}: the product of single gains promises x{product:.2f}; the best set reaches x{math.exp(max(truth.values())):.2f}"


def _table(head: str, lines: list[str]) -> None:
    print(head, "|---" * (head.count("|") - 1) + "|", *lines, "", sep="\n")


def main() -> None:
    """Print the tables."""
    if not (FOLDER / "pools").is_dir():
        print(f"no recorded experiments: {FOLDER} does not exist")
        return
    pools = {"b2_token": token_pairs("b2_token"), "b2_single": single_pairs("b2_single"), "busy_single": single_pairs("busy_single")}
    lines = [line for pool, pairs in pools.items() for line in claims(pool, pairs)]
    lines += [steps_as_unit("b2_single"), steps_as_unit("busy_single")]
    _table(f"| recording | rule | false | independent | half-width | finds {EFFECT - 1:.0%} | pairs |", lines)
    print(f"real effect: {real_effect()}\n")
    lines = [line for workload in ("conv", "gpt") for noise in (0.01, 0.04) for line in searches(workload, noise)]
    _table("| factorial | noise | search | lost | in the worst order | measurements | useless fixes kept |", lines)
    print(*map(products, ("conv", "gpt")), sep="\n")


if __name__ == "__main__":
    main()
