"""From blocks to a claim, on numbers with known answers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from gpudiag.experiment.design import Design
from gpudiag.experiment.stats import DECIDED, compute_mean_interval, compute_spread, correct_for_looks, decide_verdict, judge_pairs
from gpudiag.model.experiment import Pair, compute_log_ratios, compute_pair_log_ratio
from gpudiag.report.experiment.results import apply_holm


def pair(ratios: Sequence[float]) -> Pair:
    """A pair whose second arm is as many times as fast, block by block."""
    return Pair(tuple(100.0 for _ in ratios), tuple(100.0 * ratio for ratio in ratios), "samples")


@pytest.mark.needs("scipy")
def test_the_interval_of_student_s_own_sleep_data() -> None:
    # Student 1908, Biometrika 6(1), table 1: additional hours of sleep; R's t.test gives p = 0.002833 and [0.70, 2.46]
    mean, low, high, p = compute_mean_interval([1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4], 0.05)
    assert mean == pytest.approx(1.58)
    assert (low, high) == pytest.approx((0.7001142, 2.4598858), abs=1e-6)
    assert p == pytest.approx(0.002833, abs=1e-6)


def test_the_ratio_of_a_pair_is_not_moved_by_one_disturbed_block() -> None:
    assert math.exp(compute_pair_log_ratio(pair([1.1, 1.1, 0.2, 1.1, 1.1])) or 0) == pytest.approx(1.1)


def test_an_empty_block_is_left_out() -> None:
    assert compute_log_ratios(Pair((0.0, 10.0), (10.0, 20.0), "samples")) == [pytest.approx(math.log(2))]


@pytest.mark.needs("scipy")
def test_four_pairs_have_an_interval_over_pairs_at_the_level_of_a_look() -> None:
    ratios = [1.04, 1.05, 1.06, 1.07]
    found = judge_pairs([pair([ratio] * 6) for ratio in ratios], Design())
    logs = np.log(ratios)
    # t with 3 degrees of freedom at 1 - 0.0174 / 2, by bisection of F(t) = 1/2 + (x / (1 + x^2) + atan x) / pi with x = t / sqrt(3)
    half = 4.780474 * logs.std(ddof=1) / 2
    assert found.over == "pairs"
    assert found.pairs == 4
    assert found.interval == pytest.approx((math.exp(logs.mean() - half), math.exp(logs.mean() + half)), rel=1e-4)
    assert found.verdict == "faster"


@pytest.mark.needs("scipy")
def test_fewer_pairs_have_an_interval_over_blocks_and_say_so() -> None:
    found = judge_pairs([pair([1.5, 1.4, 1.6, 1.5])], Design(looks=(1,)))
    assert found.over == "blocks"
    assert found.interval is not None
    assert found.interval[0] < found.ratio < found.interval[1]  # type: ignore[operator]
    assert found.verdict == "faster"


def test_pairs_without_any_block_are_a_failure() -> None:
    found = judge_pairs([Pair((0.0,), (0.0,), "steps")], Design())
    assert (found.verdict, found.reason, found.ratio) == ("failed", "no_steps", None)


@pytest.mark.parametrize(
    ("low", "middle", "high", "last", "expected"),
    [
        (0.02, 0.05, 0.08, False, "faster"),
        (-0.08, -0.05, -0.02, False, "slower"),
        (0.001, 0.004, 0.007, False, "no_difference"),  # known, and not worth a word
        (-0.02, 0.004, 0.03, False, "inconclusive"),
        (-0.02, 0.004, 0.03, True, "inconclusive"),
        (-0.05, 0.004, 0.06, True, "too_noisy"),
        (-0.05, 0.004, 0.06, False, "inconclusive"),
        (0.0, 0.05, 0.1, False, "inconclusive"),
    ],
)
def test_verdicts(low: float, middle: float, high: float, last: bool, expected: str) -> None:
    assert decide_verdict(low, middle, high, Design(), last=last) == expected


@pytest.mark.needs("scipy")
def test_unsteady_steps_claim_nothing() -> None:
    found = judge_pairs([pair([1.5] * 4)], Design(looks=(1,)), steady=False)
    assert found.verdict == "unstable"
    assert found.verdict not in DECIDED


@pytest.mark.needs("scipy")
def test_equal_arms_are_seldom_called_different_and_a_small_effect_is_found() -> None:
    noise, design, wrong, hits = np.random.default_rng(1), Design(), 0, 0
    for _ in range(300):
        blocks = np.exp(noise.normal(0, 0.006, (8, 1)) + noise.normal(0, 0.03, (8, 6)))
        wrong += judge_pairs([pair(list(row)) for row in blocks], design).verdict in ("faster", "slower")
        hits += judge_pairs([pair(list(row * 1.05)) for row in blocks], design).verdict == "faster"
    assert wrong <= 15  # 1.7 % of one look are 5
    assert hits >= 270


@pytest.mark.needs("scipy")
def test_p_counts_the_looks() -> None:
    ratios = [1.04, 1.05, 1.06, 1.07]
    _, _, _, alone = compute_mean_interval([math.log(ratio) for ratio in ratios], 0.05)
    pairs = [pair([ratio]) for ratio in ratios]
    assert judge_pairs(pairs, Design()).p == pytest.approx(4 * alone)  # four looks, far below the level: Bonferroni
    assert judge_pairs(pairs, Design(looks=(4,))).p == pytest.approx(alone)
    assert correct_for_looks(0.0174, (4, 6, 8, 12)) == pytest.approx(0.05)
    assert correct_for_looks(0.05, (4, 6, 8, 12)) == pytest.approx(
        0.139, abs=0.001
    )  # 13 % of experiments that peek at 0.05 claim something


@pytest.mark.needs("scipy")
def test_pairs_that_count_something_else_are_left_out_and_that_is_said() -> None:
    samples = [pair([ratio] * 3) for ratio in (1.5, 1.51, 1.52, 1.49)]
    found = judge_pairs([*samples, Pair((10.0,), (1.0,), "steps")], Design(), notes=("before",))
    assert found.interval == judge_pairs(samples, Design()).interval
    assert (found.pairs, found.unit, len(found.measured)) == (4, "samples", 5)
    assert found.notes == ("before", "1 of 5 pairs were not counted in samples and were left out")


def test_holm_on_a_worked_example() -> None:
    # Holm's procedure by hand at 5 %: 0.01 <= 0.05 / 4, 0.013 <= 0.05 / 3, 0.03 > 0.05 / 2; what comes after falls with it
    assert apply_holm([0.03, 0.01, 0.04, 0.013]) == [False, True, False, True]
    assert apply_holm([0.04]) == [True]
    assert apply_holm([0.05, 0.04]) == [False, False]
    assert apply_holm([]) == []
    assert apply_holm([0.2, float("nan")]) == [False, False]


def test_the_spread_of_pairs_is_that_of_their_log_ratios() -> None:
    pairs = [pair([math.exp(value)] * 3) for value in (0.01, 0.02, 0.03)]
    assert compute_spread(pairs) == pytest.approx(0.01)
    assert compute_spread(pairs[:1]) is None
    assert compute_spread([pairs[0], Pair((0.0,), (0.0,), "steps")]) is None
