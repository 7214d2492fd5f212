"""Which runs a check makes, and what becomes of one that fails. The runs themselves are made up, but for the last test."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from gpudiag.experiment import parity
from gpudiag.experiment.arm import ArmError
from gpudiag.experiment.design import Arm, Design
from gpudiag.experiment.parity import ParityRecord
from gpudiag.experiment.trial.protocol import ParityPlan, ParityRun, ParityStep

BASE, CHANGED = Arm(name="as it is", command=("a",)), Arm(name="changed", command=("b",))


class Program:
    """Plays both arms: losses of the baseline, by which the changed arm is off, and how well the baseline repeats itself."""

    def __init__(self, off: float = 0.0, *, repeats: float = 0.0, crash: bool = False) -> None:
        self.off, self.repeats, self.crash = off, repeats, crash
        self.asked: list[tuple[str, float]] = []

    def __call__(self, arm: Arm, plan: ParityPlan, design: Design, scratch: Path) -> ParityRecord:
        assert arm.environ["PYTHONHASHSEED"] == "0"
        self.asked.append((arm.name, plan.perturb))
        if arm.name == "changed" and self.crash:
            raise ArmError("crash", "changed ended with exit code 1")
        before = sum(name == "as it is" and not noise for name, noise in self.asked) - 1
        move = self.off if arm.name == "changed" else before * self.repeats * (not plan.perturb) + plan.perturb
        return record([4.0, 3.0 + move, 2.0])


def record(losses: list[float]) -> ParityRecord:
    steps = tuple(ParityStep(loss, 1.0, 32, (0.1,)) for loss in losses)
    return ParityRecord(steps, ParityRun({"optimizer 1": "SGD"}), np.ones((1, 4)))


def check(program: Program, kind: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(parity, "record_parity", program)
    return parity.check_parity(BASE, CHANGED, kind, Design(), tmp_path)


def test_equal_runs_need_no_further_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for kind in ("exact", "rounding", "low_precision"):
        program = Program()
        found = check(program, kind, monkeypatch, tmp_path)
        assert (found.verdict, found.worst_yardsticks, found.steps) == ("same", 0, 3)
        assert program.asked == [("as it is", 0.0), ("changed", 0.0)]


def test_what_differs_is_measured_by_noise_of_its_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = Program(off=2e-3)
    assert check(program, "low_precision", monkeypatch, tmp_path).worst_yardsticks == pytest.approx(2e-3 / 1.1e-3)
    assert program.asked[2:] == [("as it is", 0.0), *[("as it is", 1.1e-3)] * 3]
    found = check(Program(off=2e-3), "rounding", monkeypatch, tmp_path)
    assert (found.verdict, found.settings_changed) == ("differs", ())
    assert found.reason.startswith("loss of step 2 differs by ")


def test_an_exact_change_is_measured_by_noise_only_where_the_program_does_not_repeat(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = Program(off=1e-6)
    assert check(program, "exact", monkeypatch, tmp_path).verdict == "differs"
    assert len(program.asked) == 3
    program = Program(off=1e-6, repeats=1e-6)
    assert check(program, "exact", monkeypatch, tmp_path).verdict == "same"
    assert len(program.asked) == 2 + 3 + 3


def test_a_change_of_semantics_is_set_beside_two_runs_of_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = Program(off=0.5)
    found = check(program, "semantics", monkeypatch, tmp_path)
    assert (found.verdict, found.alike, len(program.asked)) == ("not_comparable", False, 3)
    assert check(Program(off=0.5, repeats=0.4), "semantics", monkeypatch, tmp_path).alike is None
    harmless = Program()
    assert (check(harmless, "semantics", monkeypatch, tmp_path).alike, len(harmless.asked)) == (True, 2)


def test_a_run_that_fails_is_no_verdict_about_the_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = check(Program(crash=True), "rounding", monkeypatch, tmp_path)
    assert (found.verdict, found.reason) == ("not_checked", "changed ended with exit code 1")


SCRIPT = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=float(sys.argv[1]), fused=len(sys.argv) > 2)
loader = DataLoader(TensorDataset(torch.randn(640, 16), torch.randn(640, 1)), batch_size=32, shuffle=True)
while True:
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
"""


def arm(name: str, *arguments: str) -> Arm:
    return Arm(name=name, command=(sys.executable, "-c", SCRIPT, *arguments))


@pytest.mark.long
def test_a_real_script_that_sets_no_seed(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    plain = arm("as it is", "1e-3")
    fused = parity.check_parity(plain, arm("fused", "1e-3", "fused"), "rounding", Design(), tmp_path)
    assert (fused.verdict, fused.settings_changed, fused.steps) == ("same", (), 12), fused
    assert msgspec.json.encode(fused)
    wrong = parity.check_parity(plain, arm("wrong", "1.1e-3"), "exact", Design(), tmp_path)  # three runs: the program repeats itself
    assert (wrong.verdict, wrong.settings_changed) == ("differs", ("learning rate of step 1: 0.001 -> 0.0011",)), wrong
    assert "of step 2 differs by" in wrong.reason or "of its size, and should not at all" in wrong.reason
