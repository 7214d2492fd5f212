"""A recording with fixes in place: what a fix refuses never stops the program, and the process is ended when all is recorded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gpudiag.capture.hooks import Patches
from gpudiag.capture.run_script.plan import Plan, read_journal
from gpudiag.experiment.trial import record
from gpudiag.experiment.trial.record import EVIDENCE_STEPS, MORE_STEPS, RecordPlan
from gpudiag.fixes.fix import Applier, NotAppliedError
from gpudiag.model.experiment import FixCall


@pytest.fixture
def plan(tmp_path: Path) -> RecordPlan:
    (tmp_path / "journal").touch()
    return RecordPlan(Plan(str(tmp_path), journal=str(tmp_path / "journal")), (FixCall("fused-optimizer"),))


def said(plan: RecordPlan) -> list[str]:
    return [entry.text for entry in read_journal(Path(plan.plan.journal)) if entry.what == "warned"]


def test_what_a_fix_refuses_or_fails_at_is_told_once_and_the_program_goes_on(plan: RecordPlan) -> None:
    site = record._CarefulSite(Patches(), plan.plan)
    seen: list[Any] = []

    def refuses(_: Any) -> None:
        raise NotAppliedError("no convolution in it")

    def fails(_: Any) -> None:
        raise KeyError("weight")

    for change in (refuses, fails, seen.append):
        site.on_root(change)
        site.on_optimizer(change)
    for _ in range(3):
        site.add(site.roots, site.root_changes, "module")
        site.add(site.optimizers, site.optimizer_changes, "optimizer")
    assert said(plan) == ["fix: a change was not made: no convolution in it", "fix: a change was not made: KeyError: 'weight'"]
    assert seen == ["module", "optimizer"] * 3
    assert (len(site.roots), len(site.optimizers)) == (3, 3)


class Shown(Applier):
    """Leaves evidence where its value is one."""

    id = "fused-optimizer"

    def install(self, site: Any) -> None:
        if self.value == "broken":
            raise RuntimeError("broken")

    def evidence(self, site: Any) -> str:
        if not self.value:
            raise NotAppliedError("nothing was fused")
        return "fused=True"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1", "fix: fused-optimizer=1 in effect: fused=True"),
        (None, "fix: fused-optimizer not in effect: nothing was fused"),
        ("broken", "fix: not applied: RuntimeError: broken"),
    ],
)
def test_each_fix_says_what_it_has_to_show(plan: RecordPlan, monkeypatch: pytest.MonkeyPatch, value: str | None, expected: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr("gpudiag.experiment.trial.applied_fixes.make_applier", lambda call: Shown(call.value))
    asked = RecordPlan(plan.plan, (FixCall("fused-optimizer", value),))
    watching = record.RecordWatch(asked)
    watching._applied, watching._owner_pid = record.install_fixes(asked), os.getpid()
    watching.tell_evidence()
    assert said(plan) == [expected]


def test_no_fix_installs_nothing(plan: RecordPlan) -> None:
    assert record.install_fixes(RecordPlan(plan.plan)) is None


class Session:
    """A session whose windows are recorded after 30 steps."""

    rank = 3
    warnings: tuple[str, ...] = ()
    recording = True

    def __init__(self) -> None:
        self.steps = 0
        self._windows = self

    def missing(self) -> list[str]:
        return [] if self.steps >= 30 else ["timing window"]

    def step(self) -> None:
        self.steps += 1


class Watching:
    def __init__(self, *, ends: bool) -> None:
        self.ends = ends
        self.calls: list[tuple[str, int]] = []
        self.session = Session()

    def tell_evidence(self) -> None:
        self.calls.append(("evidence", self.session.steps))

    def complete(self) -> None:
        self.calls.append(("complete", self.session.steps))


@pytest.mark.parametrize("ends", [True, False])
def test_evidence_is_asked_early_and_the_end_comes_some_steps_after_the_last_window(ends: bool) -> None:
    watching = Watching(ends=ends)
    counted = record._Counted(watching.session, watching)  # type: ignore[arg-type]
    assert counted.rank == 3
    for _ in range(30 + MORE_STEPS):
        counted.step()
    assert watching.calls == [("evidence", EVIDENCE_STEPS), *([("complete", 30 + MORE_STEPS)] if ends else [])]


def test_a_plan_survives_its_way_through_the_environment(plan: RecordPlan) -> None:
    import msgspec

    assert msgspec.json.decode(plan.text(), type=RecordPlan) == plan
