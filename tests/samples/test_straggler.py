"""A late rank among three (gloo), recorded by `gpudiag run torchrun`: the report names it, since when and why; of equal ranks none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpudiag.bundle.reader import open_bundle
from gpudiag.model.job import Job
from gpudiag.model.report import decode_report

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("known_peaks"),
    pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc, to find the launcher"),
]

SCRIPT = Path(__file__).parents[2] / "samples" / "straggler" / "train.py"
STEPS, FROM = 80, 40

Recorded = Callable[..., Job]


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    """What the report that ends `gpudiag run torchrun ...` says of the ranks."""

    def record(*words: str) -> Job:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", str(SCRIPT), "--steps", str(STEPS), *words]
        command = [sys.executable, "-m", "gpudiag", "run", "-o", "run", *launch]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        data = decode_report((tmp_path / "run" / "report.json").read_bytes())
        assert data.job is not None, done.stderr
        assert [row.rank for row in data.job.ranks] == [0, 1, 2]
        return data.job

    return record


@pytest.mark.long  # tests/api/test_ranks_compared.py has a late rank
def test_a_rank_whose_loader_is_slow(recorded: Recorded) -> None:
    job = recorded("--late", "loader", "--rank", "0")
    found = job.straggler
    assert found is not None, job.no_straggler
    assert (found.rank, found.cause, found.since_step) == (0, "loader", None)
    assert 15e6 < found.excess_ns < 60e6  # planted: 23 ms a step
    assert job.shown_rank != 0


@pytest.mark.long
def test_a_rank_with_larger_batches(recorded: Recorded) -> None:
    job = recorded("--late", "batch", "--rank", "2")
    found = job.straggler
    assert found is not None, job.no_straggler
    assert (found.rank, found.since_step) == (2, None)
    assert found.cause == "more work", found.reason


@pytest.mark.long
def test_a_rank_that_is_late_from_some_step_on(recorded: Recorded, tmp_path: Path) -> None:
    job = recorded("--late", "later", "--rank", "1", "--from", str(FROM))
    found = job.straggler
    assert found is not None, job.no_straggler
    assert (found.rank, found.cause, found.whole_run) == (1, "loader", True)
    before = STEPS - open_bundle(tmp_path / "run").step_records.height  # steps until the loop was understood have no number
    assert found.since_step is not None
    assert abs(found.since_step + before - FROM) <= 3


@pytest.mark.long
def test_ranks_that_are_alike(recorded: Recorded) -> None:
    job = recorded("--fixed")
    assert job.straggler is None
    assert "no rank is late for long" in job.no_straggler
