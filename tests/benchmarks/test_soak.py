"""A run of some thousand steps with many windows keeps nothing; `make soak` is the long one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
import bench_soak
from flat import trend

pytest.importorskip("scipy", reason="scipy is not installed")


def test_what_grows_is_told_from_what_does_not() -> None:
    steps = list(range(0, 10_000, 100))
    flat = [100.0 + 5 * (step % 300 == 0) for step in steps]  # a third of the looks fall into the writing of a trace
    assert trend(steps, flat, per=10_000, limit=1.0).verdict == "flat"
    leak = [value + step / 1000 for value, step in zip(flat, steps, strict=True)]
    found = trend(steps, leak, per=10_000, limit=1.0)
    assert found.verdict == "grows"
    assert found.low <= 10.0 <= found.high
    first = [50.0 * (step < 3000) for step in steps]  # libraries are loaded once
    assert trend(steps, first, per=10_000, limit=1.0).verdict == "flat"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells what a process holds")
def test_two_thousand_steps_with_forty_windows_keep_nothing(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    plan = bench_soak.Plan(2_000, 40)
    found = bench_soak.run("gpudiag", tmp_path / "run", plan)
    assert bench_soak.faults(tmp_path / "run", plan) == []
    last, middle = found["seen"][-1], found["seen"][len(found["seen"]) // 2]
    for name in ("files", "threads"):
        assert last[name] <= middle[name] + 1, name  # the writer's thread and file are there for a moment now and then
    assert last["objects"] - middle["objects"] < 100 * plan.windows
    assert last["rss_mb"] - middle["rss_mb"] < 64  # some MB a window would be more
