"""Later losses of two arms over seeds, with known differences."""

from __future__ import annotations

import random

import pytest

from gpudiag.experiment.parity import LaterLosses, compare_later_losses
from gpudiag.experiment.trial.protocol import ParityStep

pytest.importorskip("scipy", reason="scipy is not installed")


def run(level: float, *, steps: int = 40, samples: int | None = 32, seed: int = 0) -> LaterLosses:
    """Losses that fall from 10 to `level` in the first half, and stay there with a little noise."""
    noise = random.Random(seed)
    losses = [max(level, 10 - (10 - level) * at / (steps / 2)) + noise.gauss(0, 0.01) for at in range(steps)]
    return LaterLosses([ParityStep(loss, None, samples) for loss in losses])


def test_a_worse_arm_is_told_with_the_samples_it_was_compared_over() -> None:
    found = compare_later_losses([run(1.0, seed=seed) for seed in range(3)], [run(1.2, seed=seed) for seed in range(3, 6)])
    assert found.startswith("mean loss of samples 960 to 1,280 over 3 seeds: ")
    assert "higher, it trains worse, than the spread of the seeds explains (z = +" in found
    better = compare_later_losses([run(1.2, seed=seed) for seed in range(3)], [run(1.0, seed=seed) for seed in range(3, 6)])
    assert "lower, it trains better, than the spread of the seeds explains (z = -" in better


def test_seeds_that_differ_as_much_as_the_arms_explain_it() -> None:
    before = [run(level, seed=int(level * 10)) for level in (1.0, 1.3, 1.6)]
    after = [run(level, seed=int(level * 10)) for level in (1.1, 1.4, 1.7)]
    assert "no more than the seeds differ among themselves (z = +0." in compare_later_losses(before, after)


def test_arms_are_compared_after_the_same_samples_not_the_same_steps() -> None:
    """Half as many steps of twice the samples: by steps the second arm would look far behind."""
    before = [run(1.0, steps=40, samples=32, seed=seed) for seed in range(3)]
    after = [run(1.0, steps=20, samples=64, seed=seed) for seed in range(3, 6)]
    assert "no more than" in compare_later_losses(before, after)


def test_steps_count_where_no_samples_are_known() -> None:
    runs = [run(1.0, samples=None, seed=seed) for seed in range(3)]
    assert compare_later_losses(runs, runs).startswith("mean loss of steps 30 to 40 over 3 seeds")
    assert compare_later_losses(runs, [run(1.0)]) == "the samples of one arm are not known: losses cannot be set side by side"


def test_a_single_seed_tells_nothing() -> None:
    assert compare_later_losses([run(1.0)], [run(1.0)]) == "no losses were seen in at least two seeds of each arm"
    same = [run(1.0), run(1.0)]
    assert compare_later_losses(same, same).endswith("no difference at all")
