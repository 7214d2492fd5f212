"""How a process is left: at once or by an exception, and all ranks at the same step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from gpudiag.experiment.trial.exit import TrialExit, describe_exception
from gpudiag.experiment.trial.protocol import Control, TrialPlan, read_rows, write_row
from gpudiag.fixes.fix import NotAppliedError


class LeftError(Exception):
    """The process would be gone."""


@pytest.fixture(autouse=True)
def exits(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise LeftError

    monkeypatch.setattr(os, "_exit", leave)


def rank(folder: Path, number: int, monkeypatch: pytest.MonkeyPatch, *, ranks: int = 2) -> TrialExit:
    monkeypatch.setenv("RANK", str(number))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    return TrialExit(TrialPlan(str(folder), 10, 5.0, 2))


def marks(of: TrialExit, count: int) -> None:
    for _ in range(count):
        of.marks += 1
        of.look()


def test_a_single_process_leaves_at_the_next_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = rank(tmp_path, 0, monkeypatch, ranks=1)
    marks(alone, 5)
    Control.open(tmp_path).stopped = 1
    with pytest.raises(LeftError):
        marks(alone, 1)


@pytest.mark.parametrize("behind", [0, 1])
def test_all_ranks_leave_at_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: int) -> None:
    first, second = rank(tmp_path, 0, monkeypatch), rank(tmp_path, 1, monkeypatch)
    marks(first, 20)
    marks(second, 20 - behind)  # it may not have come to its mark when the first one waits
    Control.open(tmp_path).stopped = 1
    first.look()
    marks(second, behind)
    first.marks += 1
    with pytest.raises(LeftError):
        first.look()
    second.marks += 1
    with pytest.raises(LeftError):
        second.look()
    assert (first.marks, second.marks) == (21, 21)


def test_the_others_wait_for_the_first_to_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = rank(tmp_path, 1, monkeypatch)
    Control.open(tmp_path).stopped = 1
    marks(second, 3)


def test_a_full_disk_is_told_on_the_control_page(tmp_path: Path) -> None:
    folder = tmp_path / "arm"
    folder.mkdir()
    control = Control.open(folder)
    page = os.stat(folder / "control")
    assert page.st_blocks > 0 or page.st_size >= 64  # not a hole
    (folder / "rows.jsonl").mkdir()  # no row can be written
    plan = TrialPlan(str(folder), 10, 5.0, 2)
    with pytest.raises(OSError, match="directory"):
        write_row(plan, describe_exception(ValueError("x")))
    assert control.failed != 0
    assert read_rows(folder) == []


class OutOfMemoryError(RuntimeError):
    """As torch's: told by its name."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OutOfMemoryError("CUDA"), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "oom"),
        (NotAppliedError("no convolution"), "not_applied"),
        (ValueError("planted"), "crash"),
    ],
)
def test_an_exception_has_its_kind(error: BaseException, expected: str) -> None:
    assert describe_exception(error).kind == expected


def test_last_words_are_one_line_but_a_reason_is_whole() -> None:
    assert describe_exception(ValueError("first\nsecond")).message == "ValueError: first"
    assert describe_exception(KeyboardInterrupt()).message == "KeyboardInterrupt"
    assert describe_exception(NotAppliedError("no convolution")).message == "no convolution"
