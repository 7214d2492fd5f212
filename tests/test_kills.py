"""kill -9 at random moments; tests/benchmarks/bench_kills.py does it two hundred times (`make kill`)."""

from __future__ import annotations

import os
import time
from pathlib import Path

import kills
import pytest
from dashclient import small_bundle

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("scipy", reason="scipy is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")]

SEED = int(os.environ.get("GPUDIAG_SEED", time.time_ns() % 10_000))


@pytest.mark.long
def test_a_recording_that_is_killed_can_be_read_and_says_so(tmp_path: Path) -> None:
    seen = kills.recordings(tmp_path, 6, SEED)
    assert seen["said_unfinished"] + seen["finished"] == 6, SEED


@pytest.mark.long
def test_reports_are_the_old_or_the_new_ones_and_no_litter_grows(tmp_path: Path) -> None:
    seen = kills.reports(tmp_path, small_bundle(tmp_path / "run"), 4, SEED)
    assert seen["old"] + seen["new"] == 3 * 4, SEED


@pytest.mark.long
def test_an_experiment_leaves_nobody_behind_and_goes_on(tmp_path: Path) -> None:
    made = kills.places(tmp_path)
    seen = kills.experiments(lambda: next(made), 3, SEED)
    assert seen["kills"] + seen["over"] == 3, SEED
