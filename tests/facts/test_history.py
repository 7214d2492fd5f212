"""Facts about all steps of a run, worked out by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from factories import analysis, kernel, table

from gpudiag.facts import Facts
from gpudiag.model.analysis import Analysis
from gpudiag.model.finding import Missing

NAMES = ("padded_share", "step_drift_share", "slow_step_share")


def recorded(walls: list[int], **columns: Any) -> Analysis:
    rows = [
        {"step": step, "start_unix_ns": 0, "wall_ns": wall, "window": "plain", "phase_clock": "device", **columns}
        for step, wall in enumerate(walls)
    ]
    return msgspec.structs.replace(analysis([kernel("aten::mm", 0, 1000)]), step_records=table("step_records", rows))


def test_shares_are_of_the_unprofiled_steps_without_the_first_two() -> None:
    made = recorded([9000, 9000, 100, 100, 200], batch_elements=100, padded_elements=20)
    facts = Facts(made)
    assert facts.value("padded_share") == pytest.approx(0.2)
    assert facts.value("slow_step_share") == pytest.approx(100 / 400)


def test_steps_that_waited_for_a_core_are_not_slow_by_themselves() -> None:
    walls = [100] * 60
    walls[10::20] = [1000] * 3  # each twentieth takes ten times as long
    for step in range(2, 60, 4):  # the machine is busy in each fourth
        walls[step] += 80
    made = recorded(walls)
    judged = Facts(made)
    assert judged.value("slow_step_part") == pytest.approx(15 / 58)
    marks = [{"step": step, "kind": "preempted", "name": "", "duration_ns": 80} for step in range(2, 60, 4)]
    judged = Facts(msgspec.structs.replace(made, host_marks=table("host_marks", marks)))
    assert (judged.value("slow_steps"), judged.value("slow_step_part")) == (3, pytest.approx(3 / 58))
    assert judged.value("slow_step_share") == pytest.approx(2700 / 8500)


def test_drift_is_told_where_it_is_real() -> None:
    grown = Facts(recorded([1000] * 300 + [1200] * 300)).value("step_drift_share")
    assert grown == pytest.approx(0.2)
    assert Facts(recorded([1000, 1001] * 200)).value("step_drift_share") == 0


def test_nothing_is_known_of_a_plain_trace_or_a_short_run() -> None:
    for made in (analysis([kernel("aten::mm", 0, 1000)]), recorded([100, 100, 100])):
        facts = Facts(made)
        assert all(isinstance(facts.value(name), Missing) for name in NAMES)
        assert not facts.errors
