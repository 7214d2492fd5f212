"""Searches on planted landscapes with known best sets, and on the recorded factorials."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
from recorded_ab import CachedMeasure, factorial, fixes

from gpudiag.experiment.search import search_ordered
from gpudiag.fixes import are_conflicting
from gpudiag.model.experiment import FixCall

A, B, C, D, E, F, G, H = (FixCall(name) for name in "abcdefgh")
Set = tuple[FixCall, ...]


def landscape(gains: dict[FixCall, float], together: dict[frozenset[FixCall], float] | None = None) -> Callable[[Set], float]:
    """Return a measure: gains add up, and sets that hold all of a key of `together` gain or lose that on top."""

    def measure(calls: Set) -> float:
        extra = sum(gain for key, gain in (together or {}).items() if key <= set(calls))
        return sum(gains[call] for call in calls) + extra

    return measure


def test_what_helps_is_kept_and_what_does_not_is_not() -> None:
    gains = {A: 0.2, B: -0.1, C: 0.05, D: -0.02, E: 0.1}
    assert set(search_ordered(list(gains), landscape(gains))) == {A, C, E}


def test_nothing_is_proposed_where_nothing_is_better_than_the_program_as_it_is() -> None:
    gains = {A: -0.2, B: -0.01, C: 0.0, D: -0.3}
    assert search_ordered(list(gains), landscape(gains)) == ()
    assert search_ordered([], landscape({})) == ()
    assert search_ordered([A], lambda calls: math.nan) == ()


def test_a_fix_that_a_later_one_makes_useless_is_taken_out_again() -> None:
    # fused attention helps alone and hurts beside bf16, as in the recorded transformer
    gains, together = {A: 0.06, B: 0.7}, {frozenset((A, B)): -0.3}
    assert search_ordered([A, B], landscape(gains, together)) == (B,)


def test_a_fix_that_needs_a_later_one_has_its_retry() -> None:
    gains, together = {A: -0.02, B: 0.1}, {frozenset((A, B)): 0.2}
    tried = CachedMeasure(landscape(gains, together))
    assert set(search_ordered([A, B], tried)) == {A, B}
    assert len(tried.results) - 1 == 3


def test_conflicts_are_never_measured_together_and_the_better_one_wins() -> None:
    fp16, bf16 = FixCall("fp16"), FixCall("bf16")
    gains = {fp16: 0.1, bf16: 0.3, C: 0.05, D: 0.02}
    seen: list[set[FixCall]] = []

    def measure(calls: Set) -> float:
        seen.append(set(calls))
        return landscape(gains)(calls)

    assert set(search_ordered(list(gains), measure)) == {bf16, C, D}
    assert not [calls for calls in seen if {fp16, bf16} <= calls]
    assert len(seen) == len({frozenset(calls) for calls in seen}), "a set was measured twice"


def test_two_values_of_a_fix_are_alternatives() -> None:
    double, four = FixCall("batch-size", "x2"), FixCall("batch-size", "x4")
    assert are_conflicting(double, four)
    assert are_conflicting(FixCall("fp16"), FixCall("bf16"))
    assert not are_conflicting(FixCall("fp16"), FixCall("compile"))
    assert search_ordered([double, four], landscape({double: 0.1, four: 0.2})) == (four,)


def test_a_fix_that_crashes_spoils_nothing() -> None:
    gains = {A: 0.2, B: 0.4, C: 0.05, D: -0.1, E: 0.1}
    measure = landscape(gains)
    assert set(search_ordered(list(gains), lambda calls: None if B in calls else measure(calls))) == {A, C, E}
    assert search_ordered(list(gains), lambda calls: None) == ()


def test_two_fixes_that_crash_only_together_are_not_combined() -> None:
    gains = {A: 0.2, B: 0.3, C: 0.1}
    measure = landscape(gains)
    found = search_ordered([A, B, C], lambda calls: None if {A, B} <= set(calls) else measure(calls))
    assert set(found) in ({A, C}, {B, C})


def test_what_gains_less_than_the_margin_is_left_out() -> None:
    gains = {A: 0.2, B: 0.004, C: 0.05}
    assert set(search_ordered(list(gains), landscape(gains), margin=0.01)) == {A, C}
    assert set(search_ordered(list(gains), landscape(gains))) == {A, B, C}
    assert search_ordered([A], landscape({A: 0.004}), margin=0.01) == ()


def test_a_search_never_ends_in_a_set_that_was_measured_to_be_slower() -> None:
    random = np.random.default_rng(2)
    for _ in range(300):
        values = {frozenset(calls): random.normal(0, 0.02) for size in range(1, 6) for calls in combinations((A, B, C, D, E), size)}
        tried = CachedMeasure(lambda calls, values=values: values[frozenset(calls)] if random.random() > 0.1 else None)
        best = search_ordered([A, B, C, D, E], tried, margin=float(random.choice([0.0, 0.01])))
        assert best == () or values[frozenset(best)] > 0
        assert len(tried.results) - 1 <= 20


def lost(workload: str, noise: float, order: Set, seeds: range) -> tuple[float, float]:
    """Return the mean share of throughput that a search left on the table, and the mean number of measurements."""
    truth = factorial(workload)
    best, losses, counts = max(truth.values()), [], []
    for seed in seeds:
        random = np.random.default_rng(seed)
        tried = CachedMeasure(lambda calls, random=random: truth[frozenset(calls)] + random.normal(0, noise))
        found = search_ordered(order, tried)
        losses.append(1 - math.exp(truth[frozenset(found)] - best))
        counts.append(len(tried.results) - 1)
    return float(np.mean(losses)), float(np.mean(counts))


@pytest.mark.parametrize("workload", ["conv", "gpt"])
def test_less_than_one_percent_is_lost_on_the_recorded_factorials(workload: str) -> None:
    loss, count = lost(workload, 0.01, fixes(workload), range(200))
    print(f"\non {workload}: lost {loss:.2%}, {count:.1f} measurements")  # noqa: T201
    assert loss < 0.01
    assert count <= 15


@pytest.mark.parametrize("workload", ["conv", "gpt"])
def test_without_noise_the_best_set_is_found(workload: str) -> None:
    assert lost(workload, 0.0, fixes(workload), range(1))[0] < 0.003
