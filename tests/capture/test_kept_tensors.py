"""Which tensors a program keeps from step to step, and where."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpudiag.capture import kept_tensors, memory
from gpudiag.capture.environment import live_objects
from gpudiag.capture.kept_tensors import KeptTensors, find_holder

STEPS = 6


@pytest.fixture(autouse=True)
def few_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has run other tests, and holds what they left."""
    monkeypatch.setattr(kept_tensors, "MAX_BLOCKS", sys.maxsize)


def start_part() -> tuple[KeptTensors, list[tuple[str, str | None]]]:
    """Return a part, and (what, where) of the marks that it leaves."""
    left: list[tuple[str, str | None]] = []
    marks = SimpleNamespace(step=0, add=lambda kind, name, start, duration, site: left.append((name, site)))
    part = KeptTensors()
    part.start(SimpleNamespace(marks=marks))  # type: ignore[arg-type]
    return part, left


def watch(step: Callable[[int], Any]) -> list[tuple[str, str | None]]:
    """Return the marks that STEPS steps between two looks leave."""
    part, left = start_part()
    for number in range(STEPS + 1):
        part._context.marks.step = number
        if number == 0:
            part.window_began(0, "timing")
        if number < STEPS:
            step(number)
    part.window_ended(0, "timing")
    return left


class Trainer:
    def __init__(self) -> None:
        self.weight = torch.randn(8, 3, requires_grad=True)
        self.history: list[Any] = []
        self.last: Any = None

    def keep_pairs(self, number: int) -> None:
        self.history.append((number, torch.randn(16, 8) @ self.weight))

    def keep_the_last(self, number: int) -> None:
        self.last = torch.randn(16, 8) @ self.weight

    def fit(self, step: Callable[[int], None]) -> list[tuple[str, str | None]]:
        return watch(step)


def test_outputs_in_a_list_are_named_with_the_graph_that_they_keep() -> None:
    trainer = Trainer()
    (kept,) = trainer.fit(trainer.keep_pairs)
    assert kept[0].startswith("1 x [16, 3] float32 with the graph of MmBackward0, in ")
    assert kept[0].endswith("trainer.history") or kept[0].endswith("self.history")


def test_the_line_is_the_one_that_adds_to_the_list() -> None:
    part, left = start_part()

    def train() -> None:
        losses = []
        part.window_began(0, "timing")
        for number in range(STEPS):
            losses.append(torch.ones(5) * number)
            losses += [torch.ones(5)]
            part._context.marks.step = number + 1
        part.window_ended(0, "timing")

    train()
    assert left == [("2 x [5] float32, in losses", f"test_kept_tensors.py:{train.__code__.co_firstlineno + 4}")]


def test_what_each_step_replaces_is_not_kept() -> None:
    trainer = Trainer()
    assert trainer.fit(trainer.keep_the_last) == []


@pytest.mark.parametrize("every", [1, 2])
def test_only_what_every_step_adds_counts(every: int) -> None:
    cache: dict[int, Any] = {}

    def step(number: int) -> None:
        if number % every == 0:
            cache[number] = torch.zeros(7)

    assert [text for text, _ in watch(step)] == (["1 x [7] float32, in cache"] if every == 1 else [])


def test_a_look_keeps_nothing_of_the_program_alive() -> None:
    history = [torch.zeros(3)]
    batch = torch.zeros(5)
    gone = weakref.ref(batch)
    holder = find_holder(history[0], sys._getframe())
    assert holder is not None
    assert holder.name == "history"
    del batch
    assert gone() is None  # before Python 3.13 a frame keeps the values that its f_locals showed
    assert len(history) == 1


def test_a_program_of_very_many_objects_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(kept_tensors, "MAX_BLOCKS", 1000)
    monkeypatch.setattr(kept_tensors, "group_tensors", lambda: pytest.fail("all objects were listed"))
    assert watch(lambda _: kept.append(torch.zeros(7, 11))) == []


@pytest.mark.parametrize("look", [kept_tensors.group_tensors, live_objects.find_live_objects, memory.find_live_modules])
def test_a_tuple_that_another_thread_is_making_is_left_alone(look: Callable[[], object]) -> None:
    """CPython raises SystemError in `tuple(generator)` where somebody else holds what is made: 12 of 15 looks did that to such a thread."""
    made, failed, ended = [0], list[SystemError](), threading.Event()

    def make_tuples() -> None:
        while not ended.is_set():
            try:
                made[0] += len(tuple(number for number in range(3000))) == 3000
            except SystemError as error:
                failed.append(error)

    thread = threading.Thread(target=make_tuples)
    thread.start()
    try:
        for _ in range(10):
            look()
    finally:
        ended.set()
        thread.join()
    assert not failed
    assert made[0]
