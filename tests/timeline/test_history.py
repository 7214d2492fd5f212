"""The history of made-up runs with a known answer: drift that is there, noise that is none, slow steps with a known cause."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from gpudiag.model import trace
from gpudiag.timeline.history import MIN_FOR_DRIFT, build_history, measure_drift

MS = 1_000_000


def records(walls: list[int], **columns: Any) -> pl.DataFrame:
    """Return step_records of plain steps with these wall times in ms; columns replace others by step."""
    rows = [
        {"step": step, "start_unix_ns": step, "wall_ns": wall * MS, "window": "plain"}
        | {name: values[step] for name, values in columns.items()}
        for step, wall in enumerate(walls)
    ]
    return pl.DataFrame(rows, schema=trace.build_table_schema("step_records"))


def marks(*rows: tuple[int, str, str, int]) -> pl.DataFrame:
    """Return host_marks of (step, kind, name, ms)."""
    found = [
        {"kind": kind, "name": name, "start_unix_ns": 0, "duration_ns": ms * MS, "site": None, "step": step}
        for step, kind, name, ms in rows
    ]
    return pl.DataFrame(found, schema=trace.build_table_schema("host_marks"))


def test_pace_and_phases_leave_out_the_first_steps_and_the_profiled_ones() -> None:
    walls = [900, 300] + [10] * 18
    windows = ["plain"] * 10 + ["warm"] * 2 + ["timing"] * 6 + ["export"] * 2
    walls[10:20] = [12, 12, 11, 11, 11, 11, 11, 11, 80, 40]
    made = build_history(
        records(
            walls, window=windows, phase_clock=["host"] * 20, forward_ns=[3 * MS] * 20, backward_ns=[4 * MS] * 20, loader_wait_ns=[MS] * 20
        )
    )
    assert made is not None
    assert (made.steps, made.profiled, made.plain) == (20, 6, 8)
    assert (made.first_ns, made.median_ns, made.p95_ns) == (900 * MS, 10 * MS, 10 * MS)
    assert made.phases is not None
    assert made.phases.forward_ns == 3 * MS
    assert made.phases.optimizer_ns is None
    assert made.phases.rest_ns == 2 * MS
    costs = {cost.label: (cost.steps, cost.median_ns, cost.extra_ns) for cost in made.profiler}
    assert costs == {"warm": (2, 12 * MS, 4 * MS), "timing": (6, 11 * MS, 6 * MS), "export": (2, 60 * MS, 100 * MS)}
    assert made.slow_steps == 0
    assert made.slow_share == 0
    assert made.drift is None


def test_phases_of_a_typical_step_add_up_where_two_kinds_of_steps_alternate() -> None:
    walls = [10, 30] * 50
    made = build_history(records(walls, phase_clock=["device"] * 100, forward_ns=[wall // 2 * MS for wall in walls]))
    assert made is not None
    assert made.phases is not None
    assert made.phases.clock == "device"
    assert made.phases.forward_ns is not None
    assert made.phases.rest_ns is not None
    assert abs(made.phases.forward_ns + made.phases.rest_ns - made.median_ns) <= MS


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_too_few_steps_tell_no_pace(count: int) -> None:
    made = build_history(records([10] * count))
    assert made is None if count == 0 else made is not None and made.median_ns is None and made.phases is None and made.slow_share is None


def test_padding_is_that_of_the_batches_that_tell() -> None:
    made = build_history(records([10] * 4, batch_elements=[100, None, 300, 0], padded_elements=[50, None, 50, 0]))
    assert made is not None
    assert made.padded_share == 0.25
    unknown = build_history(records([10] * 4))
    assert unknown is not None
    assert unknown.padded_share is None


def test_slow_steps_come_with_what_they_had() -> None:
    walls = [10] * 40
    walls[10], walls[20], walls[30], walls[35], walls[38] = 110, 60, 40, 30, 25
    waits, backward = [1 * MS] * 40, [5 * MS] * 40
    waits[10] += 95 * MS
    backward[35] += 20 * MS
    made = build_history(
        records(walls, loader_wait_ns=waits, backward_ns=backward),
        marks((20, "save", "torch.save", 45), (20, "file_write", "model.pt", 0), (30, "gc", "gen 2", 29), (38, "file_write", "log.txt", 0)),
    )
    assert made is not None
    assert made.slow_steps == 5
    assert made.slow_share == pytest.approx((100 + 50 + 30 + 20 + 15) / (sum(walls) - 20))
    had = {step.step: [(part.what, part.ns // MS, part.name) for part in step.had] for step in made.slowest}
    assert list(had) == [10, 20, 30, 35, 38]
    assert had[10] == [("loader", 95, None)]
    assert had[20][1] == ("save", 45, "torch.save")
    assert ("gc", 29, "gen 2") in had[30]
    assert had[35] == [("backward", 20, None)]
    assert ("file_write", 0, "log.txt") in had[38]


def test_drift_that_is_there_is_found() -> None:
    rng = np.random.default_rng(0)
    walls = rng.normal(1, 0.05, 800) * np.linspace(10, 12, 800) * MS
    found = measure_drift(walls)
    assert found is not None
    assert found.real
    assert found.low_share < 11.75 / 10.25 - 1 < found.high_share
    faster = measure_drift(walls[::-1])
    assert faster is not None
    assert faster.real
    assert faster.share < 0


def test_a_machine_that_slows_down_in_the_middle_drifts() -> None:
    rng = np.random.default_rng(1)
    found = measure_drift(np.r_[rng.normal(10, 0.2, 300), rng.normal(13, 0.2, 300)] * MS)
    assert found is not None
    assert found.real
    assert found.share == pytest.approx(0.3, abs=0.02)


def _alike(rng: np.random.Generator, count: int, *, memory: float, spread: float) -> Any:
    """Return wall times that resemble their neighbours: exp of an AR(1) process."""
    noise, out = rng.normal(size=count), np.empty(count)
    out[0] = noise[0]
    for row in range(1, count):
        out[row] = memory * out[row - 1] + np.sqrt(1 - memory**2) * noise[row]
    return np.exp(spread * out) * 10 * MS


@pytest.mark.parametrize(("memory", "spread", "most"), [(0.0, 0.05, 0.01), (0.0, 0.5, 0.02), (0.9, 0.05, 0.05), (0.9, 0.2, 0.05)])
def test_noise_is_not_called_drift(memory: float, spread: float, most: float) -> None:
    rng = np.random.default_rng(2)
    found = [measure_drift(_alike(rng, 400, memory=memory, spread=spread)) for _ in range(100)]
    assert np.mean([one is not None and one.real for one in found]) <= most


def test_one_slow_step_a_small_change_and_a_short_run_are_no_drift() -> None:
    rng = np.random.default_rng(3)
    walls = rng.normal(10, 0.01, 400) * MS
    walls[-1] = 1e10
    walls[200:] *= 1.02
    found = measure_drift(walls)
    assert found is not None
    assert not found.real
    assert found.low_share > 0  # it is there, and too small to matter
    assert measure_drift(walls[: MIN_FOR_DRIFT - 1]) is None
    assert measure_drift(np.zeros(400)) is None
    constant = measure_drift(np.full(400, 1e7))
    assert constant is not None
    assert not constant.real
