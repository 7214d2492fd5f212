"""Steps of a run that goes on, against the recorded ones."""

from __future__ import annotations

import msgspec
import pytest
import simulator as s
from graphs import graphs_in_a_row

from gpudiag.attribution.steps import find_steps
from gpudiag.model.timeline import ReplayedStep, ReplayTrust
from gpudiag.timeline.replay import measure_replay_trust, measure_steadiness


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
    found = measure_steadiness([_step(100, 100), step])
    assert found[:2] == pytest.approx((error, drift))
    assert bool(found[2]) == (drift > 0.05)


def test_where_the_marks_are_not_known_nothing_is_said() -> None:
    assert measure_steadiness([ReplayedStep("s", "median", 5, 5, 0)]) == (None, None, "")


def _trust(*body: s.Instruction, steps: int = 8, in_a_row: bool = False) -> ReplayTrust:
    run = s.simulate([part for _ in range(steps) for part in (s.step(), *body)] + [s.step()])
    trace = run.trace()
    table = find_steps(trace).table
    graphs, row = graphs_in_a_row(run)
    trust = measure_replay_trust(graphs, table, row if in_a_row else None)
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


def test_steps_in_a_row_are_what_what_ifs_are_measured_by() -> None:
    """Eight steps of 0.9 ms on the host and 2.46 ms on the device: six are analysed, and the device falls behind in all of them."""
    trust = _trust(*[s.op("aten::mm", [s.python(10), s.launch("gemm", 40)])] * 60, in_a_row=True)
    assert trust.run is not None
    assert trust.run.role == "run"
    assert trust.run.steady_ns == pytest.approx(6 * 2_460_000, rel=0.02)
    assert trust.run.marks_ns == pytest.approx(6 * 840_000, rel=0.1)
    assert trust.run.measured_ns == pytest.approx(trust.run.marks_ns + (trust.run.backlog_end_ns or 0))
    assert "they take" in trust.note
    assert trust.error_share < 0.02


def test_an_error_of_what_what_ifs_are_measured_by_is_an_error_of_the_replay() -> None:
    """The error that reports print is the larger one: of the replayed steps, and of the steps in a row against their pace."""
    body = [s.op("aten::mm", [s.python(10), s.launch("gemm", 40)])] * 60
    run = s.simulate([part for _ in range(8) for part in (s.step(), *body, s.item())] + [s.step()])
    table = find_steps(run.trace()).table
    graphs, row = graphs_in_a_row(run)
    assert row is not None
    longer = msgspec.structs.replace(row, duration_ns=row.duration_ns + (row.lane < 0) * row.duration_ns // 10)
    good, bad = (measure_replay_trust(graphs, table, chosen) for chosen in (row, longer))
    assert good is not None
    assert bad is not None
    assert good.error_share < 0.01
    assert bad.error_share == pytest.approx(0.1, abs=0.03)
