"""A loop that has been left is found out by what the program does next."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils.data import DataLoader  # noqa: E402

from gpudiag.capture.session import Session  # noqa: E402
from gpudiag.integrations.left import LoopLeft  # noqa: E402


def batches() -> None:
    for _ in DataLoader([1, 2, 3]):
        pass


def loop(times: int) -> None:
    for _ in range(times):
        batches()


def elsewhere() -> None:
    batches()


def calls(tmp_path: Path, *functions: tuple[object, ...]) -> list[str]:
    """Return who was running when the loop was found to be left."""
    left: list[str] = []
    running = ""
    with Session(tmp_path / "run", parts=[LoopLeft(loop.__code__, lambda: left.append(running))]):
        for function, *arguments in functions:
            running = function.__name__
            function(*arguments)
    return left


def test_it_is_told_once_at_the_first_batch_outside(tmp_path: Path) -> None:
    assert calls(tmp_path, (loop, 2), (elsewhere,), (batches,)) == ["elsewhere"]


def test_nothing_is_told_while_the_loop_runs(tmp_path: Path) -> None:
    assert calls(tmp_path, (loop, 5)) == []


def test_a_loop_that_was_never_seen_at_work_is_not_left(tmp_path: Path) -> None:
    assert calls(tmp_path, (batches,), (elsewhere,)) == []


def test_a_backward_pass_outside_tells_it_too(tmp_path: Path) -> None:
    def backward() -> None:
        torch.ones(1, requires_grad=True).sum().backward()

    assert calls(tmp_path, (loop, 1), (backward,)) == ["backward"]
