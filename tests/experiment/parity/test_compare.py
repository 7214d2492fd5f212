"""Verdicts on runs made up by hand: what is compared, in which unit, and when nothing can be said."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from gpudiag.experiment.parity import SMALLEST_YARDSTICK, is_identical, judge_parity, measure_distance
from gpudiag.experiment.trial.protocol import ParityRun, ParityStep

LOSSES = (4.0, 3.0, 2.0, 1.0)  # mean size 2.5


class Run(NamedTuple):
    steps: tuple[ParityStep, ...]
    run: ParityRun
    sketch: Any


def run(*, losses: tuple[float | None, ...] = LOSSES, norm: float = 1.0, gradient: float = 0.0, rate: float = 0.1, **settings: str) -> Run:
    """A run of steps with these losses; its first gradient is off by `gradient` of its size."""
    steps = tuple(ParityStep(loss, norm, 32, (rate,), finite=loss is not None) for loss in losses)
    return Run(steps, ParityRun({"optimizer 1": "AdamW", **settings}), np.array([[3.0, 4.0], [0.0, 5 * 2**0.5 * gradient]]))


def moved(at: int, by: float) -> tuple[float, ...]:
    return tuple(loss + by * (place == at) for place, loss in enumerate(LOSSES))


NOISE = [run(losses=moved(3, by), gradient=0.01) for by in (0.01, 0.02, -0.025)]  # worst: 0.025 of 2.5, 1 %


def test_distances_are_relative_to_the_mean_loss_and_to_the_gradient() -> None:
    found = measure_distance(run(), run(losses=moved(2, 0.5), gradient=0.03, norm=1.5))
    assert found.first_loss is not None
    assert found.losses is not None
    assert found.norms is not None
    assert found.first_gradient is not None
    assert found.first_loss.value == 0
    assert (found.losses.of, found.losses.value) == ("loss of step 3", pytest.approx(0.2))
    assert found.norms.value == pytest.approx(0.5)
    assert found.first_gradient.value == pytest.approx(0.03 * 2**0.5)


def test_a_yardstick_is_the_worst_of_the_noisy_runs() -> None:
    within = judge_parity("rounding", run(), run(losses=moved(1, 0.2)), [run()], NOISE)
    assert within.verdict == "same"
    assert within.worst_yardsticks == pytest.approx(8.0)
    beyond = judge_parity("rounding", run(), run(losses=moved(1, 0.3)), [run()], NOISE)
    assert (beyond.verdict, beyond.reason) == ("differs", "loss of step 2 differs by 12 x the rounding noise (limit 10)")
    assert (
        judge_parity("low_precision", run(), run(losses=moved(1, 0.1)), [run()], NOISE).verdict == "differs"
    )  # 4, of which 3 may be noise
    assert (
        judge_parity("low_precision", run(), run(gradient=0.035), [run()], NOISE).verdict == "same"
    )  # 3.5 of the gradient's, which is 1 %
    assert judge_parity("low_precision", run(), run(gradient=0.045), [run()], NOISE).verdict == "differs"


def test_no_yardstick_is_shorter_than_the_rounding_of_a_loss() -> None:
    found = judge_parity("rounding", run(), run(losses=moved(0, 2.5 * SMALLEST_YARDSTICK * 9)), [run()], [run()])
    assert found.verdict == "same"
    assert found.worst_yardsticks == pytest.approx(9, rel=1e-3)


def test_exact_means_equal_unless_the_program_itself_does_not_repeat() -> None:
    nearly = run(losses=moved(3, 1e-7))
    found = judge_parity("exact", run(), nearly, [run()], [])
    assert (found.verdict, found.worst_yardsticks) == ("differs", None)
    assert found.reason == "loss of step 4 differs by 4e-08 of its size, and should not at all"
    assert judge_parity("exact", run(), run(), [], []).worst_yardsticks == 0
    other = [run(losses=moved(3, 5e-7)), run(losses=moved(3, 3e-7))]
    assert judge_parity("exact", run(), nearly, other, [run(losses=moved(3, 2e-7))]).verdict == "same"


def test_what_is_set_otherwise_differs_whatever_the_losses_say() -> None:
    found = judge_parity("low_precision", run(weight_decay="0.01"), run(weight_decay="0"), [run()], NOISE)
    assert (found.verdict, found.settings_changed) == ("differs", ("weight_decay: 0.01 -> 0",))
    assert found.reason == "weight_decay: 0.01 -> 0"
    found = judge_parity("exact", run(rate=0.1), run(rate=0.11), [], [])
    assert found.settings_changed == ("learning rate of step 1: 0.1 -> 0.11",)


def test_many_settings_are_listed_in_full_but_not_in_the_reason() -> None:
    names = [f"setting {number}" for number in range(8)]
    found = judge_parity("rounding", run(**dict.fromkeys(names, "a")), run(**dict.fromkeys(names, "b")), [run()], NOISE)
    assert len(found.settings_changed) == 8
    assert found.reason.count("a -> b") == 5
    assert found.reason.endswith("and 3 more settings")


def test_losses_that_are_no_numbers() -> None:
    broken = run(losses=(4.0, None, 2.0, 1.0))
    assert judge_parity("rounding", run(), broken, [run()], NOISE).reason == "loss or gradient is not finite in step 2"
    found = judge_parity("rounding", broken, broken, [broken], [broken])
    assert (found.verdict, found.reason) == ("not_checked", "loss or gradient of the unchanged program is not finite in step 2")
    assert found.worst_yardsticks is None


def test_a_program_that_draws_other_numbers_in_each_run_is_no_measure() -> None:
    again = run(losses=moved(0, 0.5))
    found = judge_parity("rounding", run(), run(losses=moved(0, -0.3)), [again], [again])
    assert found.verdict == "not_checked"
    assert found.reason == "loss of step 1 of the unchanged program differs by 0.2 of its size between two runs with the same seed"
    changed = judge_parity("rounding", run(rate=0.1), run(rate=0.2), [again], [again])
    assert (changed.verdict, changed.worst_yardsticks) == ("differs", None)  # what is set can be read all the same


def test_runs_of_other_lengths_differ() -> None:
    found = judge_parity("rounding", run(), run(losses=LOSSES[:2]), [run()], NOISE)
    assert (found.verdict, found.reason, found.steps) == ("differs", "2 steps where there were 4", 2)


def test_gradients_of_other_tensors_differ() -> None:
    other = run()._replace(sketch=np.zeros((1, 2)))
    assert judge_parity("rounding", run(), other, [run()], NOISE).reason == "gradients of 1 tensors where there were 2"


def test_semantics_is_never_called_the_same() -> None:
    found = judge_parity("semantics", run(), run(), [], [])
    assert (found.verdict, found.kind, found.alike, found.steps) == ("not_comparable", "semantics", True, 4)
    assert judge_parity("semantics", run(), run(losses=moved(0, 1.0)), [], []).verdict == "not_comparable"
    assert judge_parity("semantics", run(rate=0.1), run(rate=0.2), [], []).verdict == "differs"


def test_a_change_of_semantics_is_told_whether_it_trained_on_the_same() -> None:
    """Shifted labels: the loss of a model that knows nothing hardly moves, its gradient does."""
    shifted = judge_parity("semantics", run(), run(losses=moved(0, 0.01), gradient=1.0), [run()], [])
    assert (shifted.verdict, shifted.alike) == ("not_comparable", False)
    assert shifted.reason == "gradient of the first step differs by 1.4 of its size from the same weights and seeds"
    assert judge_parity("semantics", run(), run(losses=moved(1, 1e-6)), [run()], []).alike
    assert judge_parity("semantics", run(), run(losses=(4.0, 3.0, None, 1.0)), [run()], []).alike is False
    unseeded = judge_parity("semantics", run(), run(losses=moved(0, 0.5)), [run(losses=moved(0, 0.4))], [])
    assert (unseeded.alike, "between two runs with the same seed" in unseeded.reason) == (None, True)


def test_runs_without_any_figure_cannot_be_judged() -> None:
    empty = Run(tuple(ParityStep(None, None, 32) for _ in range(4)), ParityRun({}), None)
    assert judge_parity("rounding", empty, empty, [empty], []).reason == "neither a loss nor a gradient was seen"
    assert judge_parity("semantics", empty, empty, [], []).alike is None
    assert not is_identical(empty, empty)
