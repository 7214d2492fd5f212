"""What must hold of an interval whatever was measured, and of the rule as a whole in many simulated experiments."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_ab import experiment

from gpudiag.experiment.design import ALPHA, Design, find_level
from gpudiag.experiment.stats import correct_for_looks, judge_pairs
from gpudiag.model.experiment import Comparison, Pair
from gpudiag.report.experiment.results import apply_holm

special = pytest.importorskip("scipy.special", reason="scipy is not installed")

DESIGN = Design()
ROUNDING = 1e-9
MIRRORED = {"faster": "slower", "slower": "faster"}

rates = st.floats(0.1, 1e4, allow_nan=False)
factors = st.floats(0.5, 2.0)


@st.composite
def measured(draw: st.DrawFn) -> list[Pair]:
    """Pairs whose blocks differ by up to a factor of two; the noise is drawn, not all zero."""
    count, blocks = draw(st.integers(4, 12)), draw(st.integers(1, 6))
    pairs = []
    for _ in range(count):
        first = draw(st.lists(rates, min_size=blocks, max_size=blocks))
        pairs.append(Pair(tuple(first), tuple(rate * draw(factors) for rate in first), "samples"))
    return pairs


def logs(found: Comparison) -> tuple[float, float, float]:
    """Low, middle and high end as log ratios."""
    assert found.ratio is not None
    assert found.interval is not None
    return math.log(found.interval[0]), math.log(found.ratio), math.log(found.interval[1])


def single(values: list[float]) -> list[Pair]:
    """Pairs of one block each with these log ratios."""
    return [Pair((1.0,), (math.exp(value),), "samples") for value in values]


@given(measured())
@settings(max_examples=60, deadline=None)
def test_swapping_the_arms_inverts_ratio_interval_and_verdict(pairs: list[Pair]) -> None:
    found = judge_pairs(pairs, DESIGN)
    swapped = judge_pairs([Pair(pair.second, pair.first, pair.unit) for pair in pairs], DESIGN)
    assert logs(swapped) == pytest.approx(tuple(-value for value in reversed(logs(found))), abs=ROUNDING)
    if logs(found)[2] - logs(found)[0] > ROUNDING:
        assert swapped.p == pytest.approx(found.p, abs=1e-6)
    assert swapped.verdict == MIRRORED.get(found.verdict, found.verdict)


@given(measured(), st.lists(st.floats(1e-3, 1e3), min_size=12, max_size=12))
@settings(max_examples=60, deadline=None)
def test_what_makes_both_arms_of_a_pair_faster_changes_nothing(pairs: list[Pair], scales: list[float]) -> None:
    scaled = [
        Pair(tuple(rate * scale for rate in pair.first), tuple(rate * scale for rate in pair.second), pair.unit)
        for pair, scale in zip(pairs, scales, strict=False)
    ]
    assert logs(judge_pairs(scaled, DESIGN)) == pytest.approx(logs(judge_pairs(pairs, DESIGN)), abs=ROUNDING)


@given(measured(), factors, st.randoms())
@settings(max_examples=60, deadline=None)
def test_a_factor_on_one_arm_moves_the_interval_by_it_and_the_order_of_pairs_does_not_matter(
    pairs: list[Pair], factor: float, random: Random
) -> None:
    moved = [Pair(pair.first, tuple(rate * factor for rate in pair.second), pair.unit) for pair in pairs]
    random.shuffle(moved)
    assert logs(judge_pairs(moved, DESIGN)) == pytest.approx(
        tuple(value + math.log(factor) for value in logs(judge_pairs(pairs, DESIGN))), abs=ROUNDING
    )


@given(st.lists(st.tuples(st.floats(-0.2, 0.2), st.floats(-0.2, 0.2)), min_size=4, max_size=12))
@settings(max_examples=100, deadline=None)
def test_noise_that_is_added_never_narrows_the_interval(drawn: list[tuple[float, float]]) -> None:
    values, noise = (np.array(column) for column in zip(*drawn, strict=True))
    deviations = values - values.mean()
    noise = noise - noise.mean()
    if deviations @ deviations > 1e-12:
        noise = noise - deviations * (noise @ deviations) / (deviations @ deviations)  # of its own: it undoes none of theirs
    low, _, high = logs(judge_pairs(single(values.tolist()), DESIGN))
    low_noisy, _, high_noisy = logs(judge_pairs(single((values + noise).tolist()), DESIGN))
    assert low_noisy <= low + ROUNDING
    assert high_noisy >= high - ROUNDING


@given(measured())
@settings(max_examples=100, deadline=None)
def test_interval_p_and_verdict_say_the_same(pairs: list[Pair]) -> None:
    found = judge_pairs(pairs, DESIGN)
    low, middle, high = logs(found)
    assert low <= middle <= high
    assert found.p is not None
    if abs(found.p - ALPHA) > ROUNDING and min(abs(low), abs(high)) > ROUNDING:
        assert (found.p < ALPHA) == (low > 0 or high < 0)
    worth = math.log1p(DESIGN.min_effect)
    assert (found.verdict == "no_difference") <= (-worth <= low and high <= worth)
    assert (found.verdict in MIRRORED) <= (abs(middle) >= worth and not low <= 0 <= high)


@given(st.lists(st.floats(-0.1, 0.1), min_size=4, max_size=12))
@settings(max_examples=60, deadline=None)
def test_no_difference_is_two_one_sided_tests(values: list[float]) -> None:
    array, worth = np.array(values), math.log1p(DESIGN.min_effect)
    if array.std() < 1e-6:
        return
    error = array.std(ddof=1) / math.sqrt(len(array))
    above = 1 - special.stdtr(len(array) - 1, (array.mean() + worth) / error)  # against: it is slower than the margin
    below = special.stdtr(len(array) - 1, (array.mean() - worth) / error)
    limit = find_level(DESIGN.looks) / 2
    if min(abs(above - limit), abs(below - limit)) < ROUNDING:
        return
    found = judge_pairs(single(values), DESIGN).verdict
    claimed = found in MIRRORED
    assert claimed or (found == "no_difference") == (max(above, below) <= limit)


def simulated(count: int, effect: float, seed: int, *, sd: float = 0.01, freedom: float = math.inf) -> list[Comparison]:
    """Experiments that look at 4, 6, 8 and 12 pairs, with normal noise or that of Student's t."""
    random = np.random.default_rng(seed)
    shape = (count, DESIGN.looks[-1])
    noise = random.standard_normal(shape) if math.isinf(freedom) else random.standard_t(freedom, shape)
    return [experiment(single(row.tolist()), DESIGN) for row in effect + sd * noise]


def share(found: list[bool]) -> float:
    return sum(found) / len(found)


@pytest.mark.parametrize(("effect", "freedom"), [(0.0, math.inf), (0.03, math.inf), (0.0, 3.0), (0.03, 3.0)])
def test_the_interval_at_the_look_that_ended_it_covers_the_truth(effect: float, freedom: float) -> None:
    found = simulated(1500, effect, 11, freedom=freedom)
    covered = share([low <= effect <= high for low, _, high in map(logs, found)])
    print(f"\neffect {effect}, t({freedom}): covered {covered:.1%}, {sum(one.pairs for one in found) / len(found):.1f} pairs")  # noqa: T201
    assert covered >= 0.95 - 0.012  # two standard errors


def test_a_difference_as_large_as_the_smallest_that_counts_is_seldom_called_none() -> None:
    found = simulated(1500, math.log1p(DESIGN.min_effect), 12, sd=0.006)
    assert share([one.verdict == "no_difference" for one in found]) <= ALPHA / 2 + 0.008
    none = simulated(500, 0.0, 12, sd=0.004)
    assert share([one.verdict == "no_difference" for one in none]) > 0.8


def test_p_of_a_whole_experiment_is_one_at_every_level() -> None:
    random, looks = np.random.default_rng(13), DESIGN.looks
    pairs = random.standard_normal((40_000, looks[-1]))
    p = np.ones(len(pairs))
    going = np.ones(len(pairs), bool)
    for look in looks:
        seen = pairs[:, :look]
        t = np.abs(seen.mean(1)) / (seen.std(1, ddof=1) / look**0.5)
        p[going] = 2 * special.stdtr(look - 1, -t[going])
        going &= p > find_level(looks)
    corrected = np.array([correct_for_looks(float(one), looks) for one in p])
    for alpha in (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 0.9):
        assert (corrected <= alpha).mean() <= alpha + 3 * math.sqrt(alpha * (1 - alpha) / len(p)), alpha
    assert (corrected <= ALPHA).mean() > 0.046  # where it is used it gives nothing away


@pytest.mark.parametrize("looks", [(4,), (4, 8), (4, 6, 8, 12), (4, 7, 9)])
def test_p_over_looks_is_the_level_at_the_level_and_grows_with_p(looks: tuple[int, ...]) -> None:
    assert correct_for_looks(find_level(looks), looks) == pytest.approx(ALPHA)
    assert correct_for_looks(0.0, looks) == 0
    assert correct_for_looks(1.0, looks) == 1
    steps = [correct_for_looks(p, looks) for p in np.linspace(0, 1, 501).tolist()]
    assert steps == sorted(steps)
    assert all(corrected >= p - 1e-12 for corrected, p in zip(steps, np.linspace(0, 1, 501).tolist(), strict=True))
    assert len(looks) > 1 or correct_for_looks(0.3, looks) == pytest.approx(0.3)


def test_of_eight_useless_fixes_seldom_one_is_claimed() -> None:
    found = simulated(8 * 150, 0.0, 14)
    sessions = [found[start : start + 8] for start in range(0, len(found), 8)]
    alone = share([any((one.p or 0) <= ALPHA for one in session) for session in sessions])
    together = share([any(apply_holm([one.p or 0 for one in session])) for session in sessions])
    assert alone > 0.2  # 1 - 0.95^8 = 34 %
    assert together <= 0.1  # 5 %; its standard error is 1.8 %
