"""What a number of pairs will show: against published power, the noncentral t distribution, and simulated experiments."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gpudiag.experiment.design import Design, find_level
from gpudiag.experiment.stats import Forecast, compute_power, find_smallest_effect, forecast_effects, format_forecast, judge_pairs
from gpudiag.model.experiment import Pair

special = pytest.importorskip("scipy.special", reason="scipy is not installed")


@pytest.mark.parametrize(("pairs", "effect", "expected"), [(10, 1.0, 0.803), (34, 0.5, 0.808)])
def test_power_of_the_paired_t_test(pairs: int, effect: float, expected: float) -> None:
    # R: power.t.test(n = 10, delta = 1, type = "paired"), and n = 34, delta = 0.5; two-sided 5 %
    assert compute_power(effect, 1.0, pairs, Design(looks=(pairs,), min_effect=0.0)) == pytest.approx(expected, abs=0.001)


@pytest.mark.parametrize("pairs", [4, 6, 8, 12])
@pytest.mark.parametrize("effect", [0.005, 0.02, 0.05])
def test_power_is_that_of_the_noncentral_t_distribution(pairs: int, effect: float) -> None:
    design = Design(min_effect=0.0)
    quantile = special.stdtrit(pairs - 1, 1 - find_level(design.looks) / 2)
    expected = 1 - special.nctdtr(pairs - 1, effect / 0.012 * math.sqrt(pairs), quantile)
    assert compute_power(effect, 0.012, pairs, design) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize(("pairs", "spread"), [(4, 0.012), (12, 0.012), (12, 0.002)])
def test_simulated_experiments_show_the_smallest_effect_in_four_of_five(pairs: int, spread: float) -> None:
    design = Design()
    effect = math.log1p(find_smallest_effect(spread, pairs, design))
    assert effect > math.log1p(design.min_effect)
    drawn = np.random.default_rng(3).normal(effect, spread, (1000, pairs))
    found = [judge_pairs([Pair((1.0,), (math.exp(value),), "steps") for value in row], design).verdict == "faster" for row in drawn]
    assert sum(found) / len(found) == pytest.approx(0.8, abs=0.04)  # its standard error is 0.013


def test_more_pairs_show_smaller_effects_down_to_what_is_worth_a_word() -> None:
    looks = forecast_effects(0.012, Design())
    assert [look.pairs for look in looks] == [4, 6, 8, 12]
    effects = [look.effect for look in looks]
    assert effects == sorted(effects, reverse=True)
    # about (quantile of t + normal quantile of 80 %) x standard error; at four pairs the sample's own deviation adds to it
    assert effects[-1] == pytest.approx((2.79 + 0.84) * 0.012 / math.sqrt(12), rel=0.1)
    assert effects[0] > (4.78 + 0.84) * 0.012 / 2
    assert find_smallest_effect(0.0, 4, Design()) == 0.01
    assert find_smallest_effect(1e-9, 4, Design()) == pytest.approx(0.01)
    assert find_smallest_effect(0.012, 4, Design(), chance=0.5) < effects[0]


@pytest.mark.slow
def test_a_spread_from_few_pairs_may_be_too_small_and_the_worst_says_so() -> None:
    (few, *_), (many, *_) = forecast_effects(0.012, Design(), measured=4), forecast_effects(0.012, Design(), measured=40)
    assert few.effect == many.effect == forecast_effects(0.012, Design())[0].effect
    assert few.at_worst > many.at_worst > few.effect  # type: ignore[operator]
    assert forecast_effects(0.012, Design(), measured=1)[0].at_worst is None
    samples = np.random.default_rng(5).standard_normal((4000, 4)).std(1, ddof=1)
    worst = few.at_worst / few.effect  # type: ignore[operator]
    assert (samples * worst < 1).mean() == pytest.approx(0.2, abs=0.03)  # effects are nearly in proportion to the spread here


def test_a_forecast_in_words() -> None:
    looks = (Forecast(4, 0.0241, None), Forecast(8, 0.015, None), Forecast(12, 0.0118, 0.0163))
    assert format_forecast(looks) == "4 pairs will show >= 2.4 %, 12 pairs will show >= 1.2 % (1.6 % at worst)"
    assert format_forecast(looks[:1]) == "4 pairs will show >= 2.4 %"
    assert format_forecast(forecast_effects(0.01, Design(looks=(1,)))) == ""
