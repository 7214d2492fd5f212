"""Real torchrun jobs of two processes (gloo): one bundle for all ranks, also where one comes late, crashes or is restarted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from noticewords import format_notices

from gpudiag.bundle.reader import open_bundle

pytestmark = pytest.mark.slow

TRAIN = """
import os, sys, time, torch
from gpudiag import profile
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
model = torch.nn.Linear(4, 4)
def train(prof, steps):
    for index, batch in enumerate(prof.steps(torch.ones(2, 4) for _ in range(steps))):
        model(batch).sum().backward()
        yield index
"""

GLOO = """
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(model)
"""


def start(tmp_path: Path, body: str, *options: str) -> subprocess.Popen[str]:
    script = tmp_path / f"train{len(list(tmp_path.glob('*.py')))}.py"
    script.write_text(TRAIN + body)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options, str(script)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=180)
    return process.returncode, errors


@pytest.mark.long
def test_two_jobs_at_once_with_default_paths_do_not_mix(tmp_path: Path) -> None:
    """Rank 1 records other steps than rank 0 and enters later; both jobs may have started within the same second."""
    body = f"""{GLOO}
if rank == 1:
    time.sleep(0.5)
with profile(skip=2 + rank, warm=1, record=3, sites=0, telemetry_hz=0) as prof:
    for _ in train(prof, 20):
        pass
dist.destroy_process_group()
"""
    jobs = [start(tmp_path, body, "--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0") for _ in range(2)]
    for job in jobs:
        code, errors = finish(job)
        assert code == 0, errors
    bundles = sorted((tmp_path / "runs").iterdir())
    assert len(bundles) == 2
    launches = set()
    for path in bundles:
        first, second = open_bundle(path), open_bundle(path, rank=1)
        assert first.ranks == (0, 1)
        assert not [
            text for text in (*format_notices(first.notices), *format_notices(second.notices)) if "already holds a recording" not in text
        ]
        assert (first.manifest.finished, second.manifest.finished) == (True, True)
        assert first.manifest.launch == second.manifest.launch
        assert [(state.rank, state.finished) for state in first.manifest.ranks] == [(1, True)]
        assert [bundle.recorded()[0].first_step for bundle in (first, second)] == [3, 4]
        assert first.step_records.height == second.step_records.height == 20
        assert not list(path.glob(".*"))
        launches.add(first.manifest.launch)
    assert len(launches) == 2


def test_a_crash_and_a_restart_leave_two_bundles_that_say_who_finished(tmp_path: Path) -> None:
    """In the first attempt rank 1 dies in the loop and torchrun ends rank 0; the second attempt has a folder of its own.

    Without a process group: gloo itself sometimes cannot connect again after a restart.
    """
    body = """
with profile("runs/x", skip=2, warm=1, record=3, sites=0, telemetry_hz=0) as prof:
    for index in train(prof, 20):
        if attempt == 0 and rank == 1 and index == 9:
            os._exit(7)
        time.sleep(0.1 * (attempt == 0))
"""
    code, errors = finish(start(tmp_path, body, "--standalone", "--max-restarts", "1"))
    assert code == 0, errors
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["x", "x-2"]
    crashed, whole = open_bundle(tmp_path / "runs" / "x"), open_bundle(tmp_path / "runs" / "x-2")
    assert crashed.ranks == whole.ranks == (0, 1)
    assert crashed.unfinished == (1,)
    assert whole.unfinished == ()
    assert [(state.rank, state.finished) for state in whole.manifest.ranks] == [(1, True)]
