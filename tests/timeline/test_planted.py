"""Reasons to wait that were planted into a training loop on the CPU: each is the largest idle cause, at the line where it stands."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from planted import Found, Plant, analysed

from gpudiag.attribution import intervals

_RING = "ring = []\nfor _ in range(50_000):\n    ring.append([ring])"

PLANTS = {
    "slow loader": Plant("idle_data", "time.sleep", item="time.sleep(0.002)"),
    "slow loader in a worker": Plant("idle_data", "enumerate(prof.steps", item="time.sleep(0.004)", workers=1),
    "collections": Plant("idle_gc", "gc.collect", plant="gc.collect()", setup=_RING),
    "checkpoints": Plant("idle_io", "torch.save", plant='torch.save(big, BUNDLE + ".pt")', setup="big = torch.ones(2_000_000)"),
    "log with flush": Plant(
        "idle_io", "flush=True", setup='log = open(BUNDLE + ".log", "w")',
        plant="for value in range(4000):\n    print(step, value, file=log, flush=True)",
    ),
    "sleep": Plant("idle_launch", "time.sleep", plant="time.sleep(0.01)"),
    "slow Python": Plant("idle_launch", "total += value", plant="total = 0\nfor value in range(100_000):\n    total += value"),
}  # fmt: skip


def _told(found: Found, plant: Plant) -> bool:
    """Return whether the plant is the largest cause, at its line, and most idle time has a cause."""
    breakdown = found.analysis.breakdown
    explained = breakdown.buckets_ns.idle_unexplained < 0.25 * breakdown.idle_ns
    return found.cause == plant.cause and found.place in found.lines and bool(found.evidence) and explained


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "sleep" else [pytest.mark.slow]) for name in PLANTS])
@pytest.mark.needs("torch")
def test_a_planted_reason_is_the_largest_cause_at_its_line(name: str, tmp_path: Path) -> None:
    """In one of three recordings: where the system runs other programs meanwhile, their time is idle time that nothing explains."""
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        found = analysed(folder, PLANTS[name])
        found.analysis.breakdown.validate()
        assert found.analysis.breakdown.idle_ns == intervals.measure_spans(intervals.build_spans(found.analysis.idle))
        if _told(found, PLANTS[name]):
            return
    pytest.fail(str(found))


@pytest.mark.slow
def test_recompiles_are_compilation_at_the_call_of_the_compiled_model(tmp_path: Path) -> None:
    plant = Plant(
        "idle_compile", "compiled(x.repeat", forward="return compiled(x.repeat(step + 1, 1))[:8]",
        setup="torch._dynamo.config.recompile_limit = 64\n"
        'compiled = torch.compile(lambda x: model(x), backend="aot_eager", dynamic=False)',
    )  # fmt: skip
    found = analysed(tmp_path, plant)
    assert found.cause == "idle_compile", found
    assert found.place in found.lines, found


@pytest.mark.slow
@pytest.mark.needs("torch")
def test_a_quiet_loop_has_no_cause_but_python(tmp_path: Path) -> None:
    found = analysed(tmp_path, Plant("idle_launch", "enumerate(prof.steps"))
    sums = found.analysis.idle.group_by("cause").agg(time=(pl.col("end_ns") - pl.col("start_ns")).sum())
    shares = {cause: time / found.analysis.wall_ns for cause, time in sums.iter_rows()}
    assert max(shares.get(cause, 0.0) for cause in ("idle_io", "idle_gc", "idle_compile", "idle_allocation")) < 0.05
