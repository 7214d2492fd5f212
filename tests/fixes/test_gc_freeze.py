"""Objects that Python's collector leaves alone."""

from __future__ import annotations

import gc

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
