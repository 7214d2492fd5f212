"""A loop that has been left is found out by what the program does next."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils.data import DataLoader  # noqa: E402

from gpudiag.capture.session import Session  # noqa: E402
from gpudiag.integrations.recorder import LoopLeft, LoopPlace  # noqa: E402


class Training:
    """What a framework makes for one training alone."""


def batches() -> None:
    for _ in DataLoader([1, 2, 3]):
        pass


def loop(watch: Callable[[LoopPlace], None], times: int = 1, training: Training | None = None) -> None:
    """Run as a framework does: every training by this one function."""
    watch(LoopPlace(sys._getframe(), training or Training()))
    for _ in range(times):
        batches()


def calls(tmp_path: Path, *functions: Callable[[], None], times: int = 1) -> list[str]:
    """Return who was running when the loop, which runs first, was found to be left."""
    left: list[str] = []
    running = "loop"
    with Session(tmp_path / "run") as session:

        def watch(place: LoopPlace) -> None:
            part = LoopLeft(place, lambda: left.append(running))
            part.start(session._recording)
            session._recording.events.add(part)

        loop(watch, times)
        for function in functions:
            running = function.__name__
            function()
    return left


def elsewhere() -> None:
    batches()


def test_it_is_told_once_at_the_first_batch_outside(tmp_path: Path) -> None:
    assert calls(tmp_path, elsewhere, batches, times=2) == ["elsewhere"]


def test_nothing_is_told_while_the_loop_runs(tmp_path: Path) -> None:
    assert calls(tmp_path, times=5) == []


def test_a_loop_that_was_never_seen_at_work_is_not_left(tmp_path: Path) -> None:
    assert calls(tmp_path, elsewhere, times=0) == []


def test_a_backward_pass_outside_tells_it_too(tmp_path: Path) -> None:
    def backward() -> None:
        torch.ones(1, requires_grad=True).sum().backward()

    assert calls(tmp_path, backward) == ["backward"]


def test_a_call_is_over_for_the_next_one_and_not_for_one_inside_it_or_of_the_same_training() -> None:
    seen: list[LoopPlace] = []
    training = Training()

    def inside(place: LoopPlace) -> None:
        seen.append(place)
        loop(seen.append, 0)
        assert not place.over(seen[-1])
        assert not place.over(LoopPlace(sys._getframe(1), training))

    loop(inside, 0, training)
    for _ in range(50):  # some of these frames get the number of the first
        loop(seen.append, 0)
        assert seen[0].over(seen[-1])
