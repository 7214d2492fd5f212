"""Intervals over batches of steps: worked numbers, quantiles, and how often they are wrong where nothing differs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gpudiag.comparison import batch_means
from gpudiag.comparison.batch_means import Estimate


@pytest.mark.parametrize("level", [0.95, 0.99])
def test_the_quantiles_are_those_of_student(level: float) -> None:
    special = pytest.importorskip("scipy.special")
    for freedom in range(1, 31):
        assert batch_means.look_up_t_quantile(level, freedom) == pytest.approx(special.stdtrit(freedom, 1 - (1 - level) / 2), abs=6e-4)
    assert batch_means.look_up_t_quantile(level, 500) == batch_means.look_up_t_quantile(level, 30)


def test_a_worked_interval() -> None:
    """Nine steps are three batches of three with medians 10, 20, 30 around 20: S^2 = 200 / 2, the error 10 / sqrt(3), t(2) = 4.303."""
    found = batch_means.estimate_by_batches([9, 10, 11, 19, 20, 21, 29, 30, 31], np.median)
    assert found is not None
    assert (found.value, found.batches) == (20.0, 3)
    assert found.error == pytest.approx(10 / math.sqrt(3))
    low, high = batch_means.estimate_interval(found)
    assert (low, high) == pytest.approx((20 - 4.303 * 10 / math.sqrt(3), 20 + 4.303 * 10 / math.sqrt(3)))


def test_a_worked_ratio() -> None:
    """Errors of 3 and 4 % make 5 % together; four batches leave three degrees of freedom: t = 3.182."""
    low, high = batch_means.estimate_ratio(Estimate(100.0, 3.0, 4), Estimate(110.0, 4.4, 9))
    assert (low, high) == pytest.approx((1.1 * math.exp(-3.182 * 0.05), 1.1 * math.exp(3.182 * 0.05)))


@pytest.mark.parametrize(("steps", "count"), [(1, 1), (2, 2), (3, 3), (4, 3), (6, 3), (9, 3), (16, 4), (100, 10), (1_000, 32)])
def test_how_many_batches(steps: int, count: int) -> None:
    assert batch_means.count_batches(steps) == count


def test_what_is_not_known_has_no_interval() -> None:
    assert batch_means.estimate_by_batches([], np.mean) is None
    alone = batch_means.estimate_by_batches([5], np.mean)
    assert alone == Estimate(5.0)
    assert batch_means.estimate_interval(alone) is None
    assert batch_means.estimate_ratio(alone, Estimate(5.0, 1.0, 3)) is None
    assert batch_means.estimate_difference(alone, Estimate(5.0, 1.0, 3), 0.95) is None
    assert batch_means.estimate_ratio(Estimate(0.0, 0.0, 3), Estimate(5.0, 1.0, 3)) is None


def _steps(random: np.random.Generator, count: int, correlation: float) -> np.ndarray:
    """Steps of 100 +- 3 that resemble their neighbours (a process of order 1), some of them disturbed."""
    noise, path = random.normal(size=count + 50), np.zeros(count + 50)
    for place in range(1, count + 50):
        path[place] = correlation * path[place - 1] + noise[place]
    scaled = path[50:] * math.sqrt(1 - correlation**2)
    return 100 * np.exp(0.03 * scaled) * (1 + 0.5 * (random.random(count) < 0.05) * random.exponential(1, count))


def _wrong(count: int, correlation: float, pairs: int = 400) -> float:
    """Return how often a difference is claimed between two runs of one process."""
    random, wrong = np.random.default_rng(7), 0
    for _ in range(pairs):
        first, second = (batch_means.estimate_by_batches(_steps(random, count, correlation), np.median) for _ in range(2))
        low, high = batch_means.estimate_ratio(first, second)
        wrong += not low <= 1 <= high
    return wrong / pairs


@pytest.mark.parametrize(
    ("count", "correlation", "most"), [(6, 0.0, 0.05), (6, 0.5, 0.07), (30, 0.5, 0.09), (100, 0.0, 0.07), (100, 0.5, 0.09)]
)
def test_where_nothing_differs_little_is_claimed(count: int, correlation: float, most: float) -> None:
    assert _wrong(count, correlation) <= most


def test_single_steps_as_batches_would_claim_far_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with_batches = _wrong(6, 0.8)
    monkeypatch.setattr(batch_means, "count_batches", lambda steps: steps)
    assert _wrong(6, 0.8) > 2 * with_batches


def test_a_real_difference_is_seen() -> None:
    random = np.random.default_rng(3)
    first = batch_means.estimate_by_batches(_steps(random, 60, 0.5), np.median)
    second = batch_means.estimate_by_batches(1.1 * _steps(random, 60, 0.5), np.median)
    low, high = batch_means.estimate_ratio(first, second)
    assert 1 < low < 1.1 < high
