"""Events of training loops, and the steps that they are."""

from __future__ import annotations

from gpudiag.experiment.trial.parity import Backward, Event, Fetched, Marked, Stepped, build_steps


def test_micro_batches_are_summed_and_an_unfinished_step_is_left_out() -> None:
    one: list[Event] = [Fetched(8), Backward(1.0), Fetched(8), Backward(2.0), Stepped(0, 25.0, (0.1,))]
    found = build_steps([*one, *one, Fetched(8), Backward(9.0)], (0,), by_hand=False)
    assert [(step.loss, step.grad_norm, step.samples, step.learning_rates) for step in found] == [(3.0, 5.0, 16, (0.1,))] * 2


def test_two_critics_and_a_generator_are_one_step() -> None:
    one: list[Event] = [
        Backward(1.0),
        Stepped(0, 9.0, (0.1,)),
        Backward(2.0),
        Stepped(0, 16.0, (0.1,)),
        Backward(4.0),
        Stepped(1, 0.0, (0.2,)),
    ]
    found = build_steps([*one, *one], (0, 0, 1), by_hand=False)
    assert [(step.loss, step.grad_norm, step.learning_rates) for step in found] == [(7.0, 5.0, (0.1, 0.1, 0.2))] * 2


def test_an_optimizer_outside_of_the_cycle_ends_no_step() -> None:
    events: list[Event] = [Backward(1.0), Stepped(7, 1.0), Stepped(0, 1.0), Backward(1.0), Stepped(0, 1.0)]
    assert len(build_steps(events, (0,), by_hand=False)) == 2


def test_marks_by_hand_begin_with_the_first_step_and_marks_of_updates_behind_it() -> None:
    events: list[Event] = [Backward(1.0), Marked(), Backward(2.0), Marked(), Backward(3.0), Marked()]
    assert [step.loss for step in build_steps(events, (), by_hand=True)] == [1.0, 2.0, 3.0]
    assert [step.loss for step in build_steps(events, (), by_hand=False)] == [2.0, 3.0]


def test_what_was_not_seen_is_not_known_and_what_is_no_number_is_said() -> None:
    (step,) = build_steps([Stepped(0, None)], (0,), by_hand=False)
    assert (step.loss, step.grad_norm, step.samples, step.finite) == (None, None, None, True)
    (step,) = build_steps([Backward(float("nan")), Stepped(0, 4.0)], (0,), by_hand=False)
    assert (step.loss, step.grad_norm, step.finite) == (None, 2.0, False)
    (step,) = build_steps([Backward(1.0), Stepped(0, float("inf"))], (0,), by_hand=False)
    assert (step.loss, step.grad_norm, step.finite) == (1.0, None, False)
