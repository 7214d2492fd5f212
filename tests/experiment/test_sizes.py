"""`--fix batch-size` without a value: which sizes are tried, how long that may take, and which are compared."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fakeab import Machine

from gpudiag.experiment.ab import run_experiment
from gpudiag.experiment.arm import ArmError, BudgetError
from gpudiag.experiment.design import Arm, Design
from gpudiag.experiment.plan import Options
from gpudiag.experiment.result import ExperimentResult
from gpudiag.model.experiment import Baseline

pytest.importorskip("scipy", reason="scipy is not installed")


class Clocked(Machine):
    """Runs of single processes take `seconds` of a clock that nothing else moves; `ends`: what the arm of that name ends with."""

    def __init__(self, seconds: float, **ends: ArmError) -> None:
        super().__init__()
        self.seconds, self.ends, self.now_s = seconds, ends, 0.0
        self.tried: list[str] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().install(monkeypatch)
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)

    def probe(self, arm: Arm, design: Design, **more: Any) -> Baseline:
        self.tried.append(arm.name.rpartition("=")[2])
        self.now_s += self.seconds
        if design.deadline is not None and self.now_s > design.deadline:
            raise BudgetError(arm.name)
        if self.tried[-1] in self.ends:
            raise self.ends[self.tried[-1]]
        return msgspec.structs.replace(super().probe(arm, design), device="GPU")  # no limit of the host's memory


def searched(machine: Machine, monkeypatch: pytest.MonkeyPatch, folder: Path, budget_s: float | None = None) -> ExperimentResult:
    machine.install(monkeypatch)
    return run_experiment(("python", "train.py"), fixes=["batch-size"], options=Options(output=str(folder / "bundle"), budget_s=budget_s))


def compared(found: ExperimentResult) -> list[str]:
    return [one.fix for one in found.data.experiments]


def test_the_two_largest_that_fit_are_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Clocked(10.0)
    assert compared(searched(machine, monkeypatch, tmp_path)) == ["batch-size=x32", "batch-size=x64"]
    assert machine.tried == ["the baseline", "x2", "x4", "x8", "x16", "x32", "x64"]


def test_the_search_leaves_most_of_the_budget_for_the_comparison(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """110 s, of which the program as it is takes 10: 30 s are for the search, three runs; a fourth is not begun."""
    machine = Clocked(10.0)
    found = searched(machine, monkeypatch, tmp_path, budget_s=110.0)
    assert machine.tried == ["the baseline", "x2", "x4", "x8"]
    assert machine.now_s <= 40.0
    assert compared(found) == ["batch-size=x4", "batch-size=x8"]
    assert "whether a batch 16 times as large fits was not found out: the search may take 30% of the budget" in found.data.notes


def test_where_not_even_one_size_could_be_tried_the_first_is_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Clocked(20.0)
    found = searched(machine, monkeypatch, tmp_path, budget_s=80.0)
    assert compared(found) == ["batch-size=x2"]
    assert not any("does not run" in note or "fits into memory" in note for note in found.data.notes)


def test_what_does_not_run_ends_the_search_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Clocked(1.0, x8=ArmError("oom", "batch-size=x8 ran out of memory"))
    found = searched(machine, monkeypatch, tmp_path, budget_s=600.0)
    assert compared(found) == ["batch-size=x2", "batch-size=x4"]
    assert "a batch 8 times as large does not run: batch-size=x8 ran out of memory" in found.data.notes
    none = searched(Clocked(1.0, x2=ArmError("crash", "it fell")), monkeypatch, tmp_path / "other")
    assert compared(none) == []
    assert "no larger batch fits into memory" in none.data.notes


def test_a_size_at_which_the_script_is_over_too_soon_gives_way_to_smaller_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a fixed number of samples a batch 16 times as large makes a 16th of the steps: the run that tries it is as long as a trial."""
    machine = Clocked(1.0, x16=ArmError("ended", "over 40 steps after its steps were known; a trial takes about 97"))
    found = searched(machine, monkeypatch, tmp_path)
    assert compared(found) == ["batch-size=x4", "batch-size=x8"]
    assert any(note.startswith("a batch 16 times as large does not run: over 40 steps") for note in found.data.notes)
