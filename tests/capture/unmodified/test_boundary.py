"""The step-boundary rule on sequences whose steps are known because they were planted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.capture.run_script.step_boundary import MAX_CYCLE, REPEATS, WITHOUT_BACKWARD, StepBoundary

Step = list[str | int]
"""The events of one step: 'b' a backward pass begins, 'u' an update is seen in a parameter, a number: that optimizer has stepped."""


def ends(steps: list[Step], rule: StepBoundary | None = None) -> list[int]:
    """Feed the steps; return for each whether the rule ended one there: 1 at its last event, -1 anywhere else, 0 not at all."""
    rule = rule or StepBoundary()
    found = []
    for step in steps:
        here = [_ended(rule, event) for event in step]
        found.append(-1 if any(here[:-1]) else int(here[-1]))
    return found


def _ended(rule: StepBoundary, event: str | int) -> bool:
    if event == "b":
        rule.backward()
        return False
    return rule.updated() if event == "u" else rule.stepped(int(event))


PLAIN: Step = ["b", 0]
ACCUMULATION: Step = ["b", "b", "b", "b", 0]
GAN: Step = ["b", 0, "b", 0, "b", 1]
IN_BACKWARD: Step = ["b", 0, 1, 2, 3]


@pytest.mark.parametrize(
    "step",
    [PLAIN, ACCUMULATION, GAN, IN_BACKWARD, ["b", 0, "b", 0, "b", 1, "b", 1], ["b", 0, 1], ["b", 1, "b", 0]],
    ids=["plain", "accumulation", "two and one", "inside backward", "two and two", "one backward for two", "turns"],
)
def test_steps_are_known_after_the_third(step: Step) -> None:
    assert ends([step] * 10) == [0] * REPEATS + [1] * (10 - REPEATS)


def test_a_loop_without_optimizers_is_told_by_its_updates() -> None:
    assert ends([["b", "u"]] * 8) == [0] * REPEATS + [1] * (8 - REPEATS)
    assert ends([["b", "b", "b", "u"]] * 8) == [0] * REPEATS + [1] * (8 - REPEATS)


def test_an_update_counts_once_for_each_backward_pass_and_not_beside_an_optimizer() -> None:
    rule = StepBoundary()
    assert ends([["b", "u"]] * 5, rule)[-1] == 1
    assert not rule.updated()  # the gradients are cleared after the update: a second change
    assert ends([["b", 0, "u"]] * 8)[-1] == -1  # the optimizer ends the step, the update that it made does not


def test_a_step_while_an_engine_is_built_is_none() -> None:
    rule = StepBoundary()
    assert not rule.stepped(0)
    assert ends([["b", "b", "b", 0]] * 8, rule) == [0] * REPEATS + [1] * (8 - REPEATS)


def test_gradients_that_come_without_a_backward_pass() -> None:
    found = ends([[0, 1]] * 20)
    assert set(found[: WITHOUT_BACKWARD // 2]) == {0}
    assert set(found[-10:]) == {1}


def test_closures_run_backward_as_often_as_they_like() -> None:
    calls = [4, 4, 2, 3, 1, 4, 2, 2, 3]
    assert ends([["b"] * count + [0] for count in calls])[REPEATS:] == [1] * (len(calls) - REPEATS)


# -- what changes on the way --------------------------------------------------------------------------------------------


def test_an_update_that_the_scaler_skips_joins_its_step_to_the_next() -> None:
    assert ends([PLAIN] * 6 + [["b"]] + [PLAIN] * 4) == [0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1]
    skipped: Step = ["b", 0, "b", "b", 1]  # one of the two updates of the discriminator
    assert ends([GAN] * 5 + [skipped] + [GAN] * 3) == [0, 0, 0, 1, 1, 1, 1, 1, 1]
    lost: Step = ["b", 0, "b", 0, "b"]  # the update of the generator
    assert ends([GAN] * 5 + [lost] + [GAN] * 3) == [0, 0, 0, 1, 1, 0, 1, 1, 1]


def test_scaling_that_skips_the_first_updates_delays_the_rule_only() -> None:
    assert ends([["b"]] * 5 + [PLAIN] * 8)[-5:] == [1] * 5


def test_accumulation_that_changes_keeps_the_marks() -> None:
    assert ends([PLAIN] * 5 + [ACCUMULATION] * 4) == [0, 0, 0, 1, 1, 1, 1, 1, 1]


def test_more_or_fewer_updates_of_the_discriminator_keep_the_marks() -> None:
    five: Step = ["b", 0] * 5 + ["b", 1]
    one: Step = ["b", 0, "b", 1]
    assert ends([GAN] * 5 + [five] * 3 + [one] * 3)[REPEATS:] == [1] * 8


def test_a_second_optimizer_that_appears_is_learnt() -> None:
    rule = StepBoundary()
    assert ends([PLAIN] * 10, rule)[-1] == 1
    learning = ends([GAN] * 8, rule)
    assert learning[-3:] == [1, 1, 1]
    assert learning[1:3] == [0, 0]  # no wrong steps while it learns; in the first it cannot know


def test_five_updates_before_the_first_of_the_other_are_unlearnt() -> None:
    rule = StepBoundary()
    found = ends([["b", 0] * 5 + ["b", 1]] * 8, rule)
    assert rule.cycle == (0, 0, 0, 0, 0, 1)
    assert found[-4:] == [1] * 4


def test_an_optimizer_that_steps_now_and_then_does_not_stop_the_marks_for_good() -> None:
    rare = ([PLAIN] * 99 + [["b", 0, "b", 7]]) * 4
    found = ends(rare)
    assert sum(value == 1 for value in found[150:]) > 240


def test_one_that_stepped_now_and_then_may_become_a_part_of_each_step() -> None:
    rule = StepBoundary()
    rare = (["b", 0] * 30 + ["b", 1]) * 3
    assert sum(_ended(rule, event) for event in rare) >= 20  # what it had learnt before still holds
    assert ends([GAN] * 12, rule)[-6:] == [1] * 6


def test_phases_that_take_turns_are_relearnt() -> None:
    found = ends([PLAIN] * 20 + [["b", 1]] * 20 + [PLAIN] * 20 + [["b", 1]] * 20)
    for begin in (0, 20, 40, 60):
        assert found[begin + 10 : begin + 20] == [1] * 10


def test_a_random_number_of_updates_is_told_by_the_rarest() -> None:
    import random

    chance = random.Random(0)
    steps: list[Step] = [["b", 0] * chance.randint(1, 5) + ["b", 1] for _ in range(80)]
    assert ends(steps)[-30:] == [1] * 30


def test_unused_parameters_do_not_hide_the_steps_of_the_others() -> None:
    import random

    chance = random.Random(1)
    steps: list[Step] = [["b", *(index for index in range(1, 8) if chance.random() < 0.3), 0] for _ in range(80)]
    assert ends(steps)[-20:] == [1] * 20


# -- properties ---------------------------------------------------------------------------------------------------------


@st.composite
def cycles(draw: st.DrawFn) -> list[int]:
    """Optimizers of one step, that no shorter cycle makes up."""
    step = draw(st.lists(st.integers(0, 3), min_size=1, max_size=8))
    lengths = (length for length in range(1, len(step)) if len(step) % length == 0)
    return step if not any(step == step[:length] * (len(step) // length) for length in lengths) else [0]


@given(cycles(), st.lists(st.integers(1, 3), min_size=8, max_size=8))
def test_a_planted_cycle_is_found(cycle: list[int], micro_batches: list[int]) -> None:
    step: Step = [event for optimizer, count in zip(cycle, micro_batches, strict=False) for event in ["b"] * count + [optimizer]]
    rule = StepBoundary()
    found = ends([step] * 40, rule)
    period = len(rule.cycle)
    assert rule.settled
    assert len(cycle) == period
    assert sum(value != 0 for value in found[-10:]) == 10  # one end in each step ...
    rotation = found[-10:]
    assert len(set(rotation)) == 1  # ... always at the same place
    if not any(cycle[:head] * REPEATS == cycle[: head * REPEATS] for head in range(1, len(cycle) // REPEATS + 1)):
        assert rotation[0] == 1  # the last of the step, where its beginning repeats nothing


@given(st.lists(st.sampled_from(["b", 0, 1, 2, "u"]), max_size=400))
def test_any_sequence_is_survived_and_bounded(events: list[str | int]) -> None:
    rule = StepBoundary()
    for event in events:
        if _ended(rule, event):
            assert rule.settled
    assert len(rule._groups) <= (REPEATS + 1) * MAX_CYCLE
    assert rule.backwards == events.count("b")
