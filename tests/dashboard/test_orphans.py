"""An experiment whose dashboard was killed is seen by the next one; what a person started, or a dashboard that lives, is not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("dash", reason="the dashboard's libraries are not installed: pip install gpudiag[dashboard]")
from gpudiag_dashboard import jobs

from gpudiag.errors import UsageError

GONE = "999999999-1.00"
"""The mark of a process that no system has."""


@pytest.fixture
def experiment(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Starts a stand-in for `gpudiag ab`, with a mark, and returns its process number."""
    (tmp_path / "gpudiag").mkdir()
    (tmp_path / "gpudiag" / "__main__.py").write_text("import time; time.sleep(60)")
    running = []

    def start(mark: str | None, *words: str) -> int:
        environ = {**{name: value for name, value in os.environ.items() if name != jobs.OWNER_VARIABLE}, "PYTHONPATH": str(tmp_path)}
        process = subprocess.Popen(
            [sys.executable, "-m", "gpudiag", "ab", *words],
            cwd=tmp_path,
            env=environ if mark is None else {**environ, jobs.OWNER_VARIABLE: mark},
        )
        running.append(process)
        return process.pid

    yield start
    for process in running:
        process.kill()
        process.wait()


def seen(pid: int) -> jobs.Orphan | None:
    return next((one for one in jobs.find_orphans() if one.pid == pid), None)


def test_the_experiment_of_a_dashboard_that_is_gone_is_told_and_keeps_others_from_starting(experiment: Callable[..., int]) -> None:
    pid = experiment(GONE, "--fix", "bf16", "train.py", "a\x1b[2Jb")
    until = time.monotonic() + 20
    while (found := seen(pid)) is None:  # it is another program from exec on
        assert time.monotonic() < until
        time.sleep(0.01)
    assert f"process {pid}, gpudiag ab --fix bf16 train.py" in found.message
    assert found.message.isprintable()
    assert found.hint.endswith(f"kill -INT {pid}")
    with pytest.raises(UsageError, match="still runs"):
        jobs.refuse_second_run()


def test_what_somebody_looks_after_is_none(experiment: Callable[..., int]) -> None:
    looked_after = [experiment(mark) for mark in (None, jobs.make_owner_mark(), "", "x")]
    gone = [experiment(mark) for mark in ("1-", GONE)]  # process 1 began at another moment
    until = time.monotonic() + 20
    while not all(map(seen, gone)):  # started last, so the others are programs too
        assert time.monotonic() < until
        time.sleep(0.01)
    assert not any(map(seen, looked_after))
