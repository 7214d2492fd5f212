"""When a warm-up is over, on step times with a known beginning."""

from __future__ import annotations

import random

from gpudiag.experiment.trial.turns import Steadiness, find_truncation


def steps_until_steady(walls: list[int], compiled: frozenset[int] = frozenset()) -> int | None:
    steadiness = Steadiness(10)
    return next((step for step, wall in enumerate(walls, 1) if steadiness.add(wall, compiled=step in compiled)), None)


def test_the_slow_beginning_is_what_is_cut_off() -> None:
    assert find_truncation([9.0, 7.0, 5.0, 1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0]) == 3
    assert find_truncation([1.0, 1.1, 0.9, 1.0]) < 3


def test_even_steps_are_steady_after_the_least_number() -> None:
    assert steps_until_steady([1000, 1010, 990] * 10) == 10


def test_a_long_descent_is_not_steady_before_its_end() -> None:
    noise = random.Random(0)
    walls = [round(1e6 * (1 + 3 * max(0.0, 1 - step / 30)) * noise.uniform(0.99, 1.01)) for step in range(200)]
    found = steps_until_steady(walls)
    assert found is not None
    assert 30 <= found <= 90


def test_compiling_begins_the_warm_up_anew() -> None:
    walls = [1000] * 60
    assert steps_until_steady(walls, frozenset({1, 22})) == 11  # step 22 comes after it was steady
    assert steps_until_steady(walls, frozenset({1, 8})) == 18
    assert steps_until_steady(walls, frozenset(range(61))) is None


def test_the_step_is_the_median_of_the_later_half() -> None:
    steadiness = Steadiness(4)
    for wall in (900, 500, 100, 110, 120):
        steadiness.add(wall, compiled=False)
    assert steadiness.step_ns == 110
    assert Steadiness(4).step_ns == 0
