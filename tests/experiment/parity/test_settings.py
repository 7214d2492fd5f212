"""Which settings of two runs count as changed."""

from __future__ import annotations

from typing import NamedTuple

from gpudiag.experiment.parity import find_changed_settings
from gpudiag.experiment.trial.protocol import ParityRun, ParityStep


class Run(NamedTuple):
    steps: tuple[ParityStep, ...]
    run: ParityRun


def run(samples: list[int | None], rates: list[tuple[float, ...]] | None = None, **settings: str) -> Run:
    rates = rates or [(0.1,)] * len(samples)
    return Run(tuple(ParityStep(1.0, 1.0, count, rate) for count, rate in zip(samples, rates, strict=True)), ParityRun(settings))


def test_a_batch_that_was_fetched_ahead_is_no_other_batch_size() -> None:
    assert find_changed_settings("exact", run([32, 32, 32]), run([64, 32, 32])) == ()
    assert find_changed_settings("exact", run([32, 32, 32]), run([64, 64, 64])) == ("samples of an update: 32 -> 64",)
    assert find_changed_settings("semantics", run([32, 32, 32]), run([64, 64, 64])) == ()
    assert find_changed_settings("exact", run([32]), run([None])) == ()


def test_the_schedule_of_learning_rates_is_compared_step_by_step() -> None:
    before = run([1, 1, 1], [(0.1, 0.2), (0.09, 0.2), (0.08, 0.2)])
    after = run([1, 1, 1], [(0.1, 0.2), (0.09, 0.2), (0.08, 0.1)])
    assert find_changed_settings("semantics", before, after) == ("learning rate of step 3: 0.2 -> 0.1",)
    assert find_changed_settings("exact", before, run([1, 1, 1], [(0.1,)] * 3)) == ("learning rates of step 1: 2 -> 1",)
    close = run([1], [(0.1 + 1e-17,)])
    assert find_changed_settings("exact", run([1], [(0.1,)]), close) == ()


def test_a_setting_that_one_run_does_not_have() -> None:
    assert find_changed_settings("rounding", run([1], amsgrad="True"), run([1], nesterov="True")) == (
        "amsgrad: True -> not set",
        "nesterov: not set -> True",
    )
