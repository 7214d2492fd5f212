"""Objects that Python's collector leaves alone, and steps between its collections."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from applied_fixes import applied

torch = pytest.importorskip("torch", reason="torch is not installed")


def train(steps: int) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()


def test_what_was_there_before_the_steps_is_frozen() -> None:
    before = gc.get_freeze_count()
    kept = [[number] for number in range(5000)]
    with applied("gc-freeze") as evidence:
        train(5)
        assert gc.get_freeze_count() - before >= len(kept)
        assert (evidence().found or "").endswith("objects are frozen")


def test_a_program_that_is_over_before_or_thaws_itself_shows_nothing() -> None:
    with applied("gc-freeze") as evidence:
        train(2)
        assert "no object is frozen" in (evidence().reason or "")
    with applied("gc-freeze") as evidence:
        train(5)
        gc.unfreeze()
        assert "thaws them itself" in (evidence().reason or "")


@pytest.fixture
def collector() -> Iterator[list[int]]:
    """The generations that were collected, each time; the collector runs by itself again at the end."""
    seen: list[int] = []

    def see(phase: str, found: dict[str, int]) -> None:
        if phase == "start":
            seen.append(found["generation"])

    gc.callbacks.append(see)
    yield seen
    gc.callbacks.remove(see)
    gc.enable()


def test_garbage_is_collected_at_fixed_steps_alone(collector: list[int]) -> None:
    with applied("gc-schedule=4") as evidence:
        train(3)
        collector.clear()
        train(9)  # of another model: calls 4 to 12
        garbage = [[number] for number in range(10_000)]
        assert collector == [2, 2, 2], garbage[:1]
        assert evidence().found == "the automatic collection is off; 3 collections in 12 calls of the model"


def test_a_program_that_collects_by_itself_again_shows_nothing(collector: list[int]) -> None:
    with applied("gc-schedule") as evidence:
        train(5)
        gc.enable()
        assert "still runs by itself" in (evidence().reason or "")
