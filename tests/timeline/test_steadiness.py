"""Steps of a run that goes on, against the recorded ones."""

from __future__ import annotations

import pytest
import simulator as s
from graphs import graphs_of

from gpudiag.attribution.links import link
from gpudiag.attribution.steps import find_steps
from gpudiag.model.replay import ReplayedStep, ReplayTrust
from gpudiag.timeline.replay import replay_trust
from gpudiag.timeline.steadiness import steadiness


def _step(marks: int, steady: int, begin: int = 0, end: int = 0) -> ReplayedStep:
    return ReplayedStep("s", "median", marks + end, marks + end, 0, marks, steady, begin, end)


@pytest.mark.parametrize(
    ("step", "error", "drift"),
    [
        (_step(100, 101), 0.01, 0.01),
        (_step(100, 119, begin=30, end=50), 0.01, 0.19),  # the host ran ahead: the device took 100 + 50 - 30
        (_step(100, 75, begin=30, end=5), 0.0, 0.25),  # what was there before was worked off
        (_step(100, 60), 0.4, 0.4),
    ],
)
def test_a_steady_step_has_the_pace_of_the_host_or_of_the_device(step: ReplayedStep, error: float, drift: float) -> None:
    found = steadiness([_step(100, 100), step])
    assert found[:2] == pytest.approx((error, drift))
    assert bool(found[2]) == (drift > 0.05)


def test_where_the_marks_are_not_known_nothing_is_said() -> None:
    assert steadiness([ReplayedStep("s", "median", 5, 5, 0)]) == (None, None, "")


def _trust(*body: s.Instruction, steps: int = 8) -> ReplayTrust:
    run = s.simulate([part for _ in range(steps) for part in (s.step(), *body)] + [s.step()])
    trace = run.trace()
    table = find_steps(trace).table
    link(trace, table, on_cpu=False)
    trust = replay_trust(graphs_of(run), table)
    assert trust is not None
    return trust


def test_a_host_that_runs_ahead_is_told_and_the_step_is_that_of_the_device() -> None:
    """60 launches of 15 us on the host, 40 + 1 us each on the device: 0.9 ms from mark to mark, 2.46 ms in the long run."""
    trust = _trust(*[s.op("aten::mm", [s.python(10), s.launch("gemm", 40)])] * 60)
    assert trust.steady_error_share is not None
    assert trust.steady_error_share < 0.01
    assert trust.drift_share is not None
    assert trust.drift_share > 1
    assert "the host ran ahead" in trust.note
    assert trust.steps[0].steady_ns == pytest.approx(2_460_000, rel=0.02)


def test_a_steady_run_needs_no_words() -> None:
    trust = _trust(*[s.op("aten::mm", [s.python(10), s.launch("gemm", 40)])] * 60, s.item())
    assert (trust.steady_error_share, trust.drift_share) == (pytest.approx(0, abs=0.01), pytest.approx(0, abs=0.01))
    assert trust.note == ""
