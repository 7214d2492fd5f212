"""A machine of planted effects, and its clock."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from fakeab import FUSED, NONE, PREFETCH, Machine

from gpudiag.experiment import experiment as experiment_flow
from gpudiag.experiment.design import Arm, Design
from gpudiag.model.experiment import Comparison


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    made = Machine({FUSED: 1.20, NONE: 1.0, PREFETCH: 0.9})
    made.install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return made


@pytest.fixture
def clock(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What each comparison was given, in seconds. A pair takes 2 x 6 blocks of 1.5 s: 18 s of a clock that nothing else moves.

    No block is shorter, so that figures stay simple."""
    now, compare, given = [0.0], machine.compare, []
    monkeypatch.setattr(experiment_flow, "MIN_BLOCK_S", 1.5)

    def taking_its_time(first: Arm, second: Arm, design: Design, **more: Any) -> Comparison:
        given.append((design.deadline or 0.0) - now[0])
        found = compare(first, second, design, **more)
        now[0] += 2 * design.blocks * design.block_s * (found.pairs - len(more.get("done", ())))
        return found

    monkeypatch.setattr("gpudiag.experiment.compare.compare_arms", taking_its_time)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return given
