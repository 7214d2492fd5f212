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


def test_drift_is_told_where_it_is_real() -> None:
    grown = Facts(recorded([1000] * 300 + [1200] * 300)).value("step_drift_share")
    assert grown == pytest.approx(0.2)
    assert Facts(recorded([1000, 1001] * 200)).value("step_drift_share") == 0


def test_nothing_is_known_of_a_plain_trace_or_a_short_run() -> None:
    for made in (analysis([kernel("aten::mm", 0, 1000)]), recorded([100, 100, 100])):
        facts = Facts(made)
        assert all(isinstance(facts.value(name), Missing) for name in NAMES)
        assert not facts.errors
