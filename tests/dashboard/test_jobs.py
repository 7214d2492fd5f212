"""One experiment at a time, ended in order: by Ctrl-C, after a grace by SIGTERM, and never later than the dashboard itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import psutil
import pytest

pytest.importorskip("dash", reason="the dashboard's libraries are not installed: pip install gpudiag[dashboard]")
from gpudiag_dashboard import jobs as module
from gpudiag_dashboard.jobs import Jobs

from gpudiag.errors import UsageError
from gpudiag.experiment import offers


class Fake:
    """A process that ends when it is told to, or at one of the signals in `obeys`."""

    pid = 4711

    def __init__(self, obeys: dict[int, int]) -> None:
        self.obeys, self.code, self.signals = obeys, None, []
        self.argv: list[str] = []

    code: int | None
    signals: list[int]

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        if self.code is None:
            raise subprocess.TimeoutExpired(self.argv, timeout or 0)
        return self.code

    def send_signal(self, sig: int) -> None:
        self.signals.append(sig)
        self.code = self.obeys.get(sig, self.code)


def fake_jobs(fake: Fake, said: bytes = b"", **options: float) -> Jobs:
    def popen(argv: Sequence[str], log: IO[bytes]) -> Fake:
        fake.argv = list(argv)
        log.write(said)
        return fake

    return Jobs(popen, **options)


def start(jobs: Jobs, fix: str = "bf16") -> None:
    jobs.start(["python", "-m", "gpudiag", "ab"], bundle="runs/a", fix=fix, shown="gpudiag ab")


def until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_second_one_is_refused_until_the_first_has_ended() -> None:
    fake = Fake({})
    jobs = fake_jobs(fake)
    assert jobs.now() is None
    assert jobs.stop() is False
    start(jobs)
    with pytest.raises(UsageError, match="running already: bf16 on runs/a"):
        start(jobs, "tf32")
    fake.code = 0
    ended = jobs.now()
    assert ended is not None
    assert (ended.status, ended.exit_code) == ("ended", 0)
    start(jobs, "tf32")
    fake.code = None
    assert fake.argv == ["python", "-m", "gpudiag", "ab"]
    jobs.close()


def test_stopping_is_ctrl_c_to_that_process_and_sigterm_after_the_grace() -> None:
    fake = Fake({signal.SIGTERM: -15})
    jobs = fake_jobs(fake, grace_s=0.2)
    start(jobs)
    assert jobs.stop()
    now = jobs.now()
    assert now is not None
    assert (now.status, fake.signals) == ("stopping", [signal.SIGINT])
    until(lambda: fake.code is not None)
    assert fake.signals == [signal.SIGINT, signal.SIGTERM]
    now = jobs.now()
    assert now is not None
    assert (now.status, now.exit_code) == ("ended", -15)


def test_one_that_obeys_is_not_ended_again() -> None:
    fake = Fake({signal.SIGINT: 130})
    jobs = fake_jobs(fake, grace_s=0.1)
    start(jobs)
    jobs.stop()
    assert jobs.now() is not None
    time.sleep(0.3)
    assert fake.signals == [signal.SIGINT]
    assert jobs.stop() is False


@pytest.mark.parametrize(
    ("obeys", "sent"),
    [
        ({signal.SIGINT: 130}, [signal.SIGINT]),
        ({signal.SIGTERM: -15}, [signal.SIGINT, signal.SIGTERM]),
        ({signal.SIGKILL: -9}, [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]),
    ],
)
def test_the_end_of_the_dashboard_ends_it_whatever_it_takes(obeys: dict[int, int], sent: list[int]) -> None:
    fake = Fake(obeys)
    jobs = fake_jobs(fake, close_s=0.01)
    start(jobs)
    jobs.close()
    assert fake.signals == sent
    jobs.close()
    assert fake.signals == sent
    with pytest.raises(UsageError, match="the dashboard is ending"):
        start(jobs)


def test_the_end_of_its_output_is_shown_from_the_beginning_of_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TAIL_BYTES", 20)
    jobs = fake_jobs(Fake({signal.SIGINT: 130}), "first line\nsecond línea\nthird\n".encode())
    start(jobs)
    now = jobs.now()
    assert now is not None
    assert now.output == "third\n"
    jobs.close()


def test_a_program_that_cannot_be_started_is_one_clear_line(tmp_path: Path) -> None:
    jobs = Jobs()
    with pytest.raises(UsageError, match="could not be started: No such file"):
        jobs.start([str(tmp_path / "nothing")], bundle="a", fix="b", shown="c")
    assert jobs.now() is None


# -- real processes -----------------------------------------------------------------------------------------------------------

PROGRAM = "import time; print('up', flush=True); time.sleep(600)"


@pytest.fixture
def real() -> Iterator[Jobs]:
    jobs = Jobs(grace_s=20)
    yield jobs
    jobs.close()


def running(jobs: Jobs, program: str = PROGRAM) -> int:
    jobs.start([sys.executable, "-c", program, "; touch x", "$(touch y)"], bundle="a", fix="b", shown="c")
    until(lambda: "up" in (jobs.now().output if jobs.now() else ""))  # type: ignore[union-attr]
    assert jobs._process is not None
    return jobs._process.pid


def test_it_runs_in_a_session_of_its_own_without_a_shell_or_an_input(real: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pid = running(real, f"import sys, os; print(os.getcwd(), repr(sys.stdin.read()), sys.argv[1:], flush=True); {PROGRAM}")
    assert os.getsid(pid) == pid != os.getsid(0)
    assert psutil.Process(pid).environ()[offers.STARTED_BY] == str(os.getpid())
    now = real.now()
    assert now is not None
    assert now.output.splitlines()[0] == f"{tmp_path} '' ['; touch x', '$(touch y)']"
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_reaches_it_and_none_of_its_children(real: Jobs) -> None:
    """An experiment ends its own arms; a signal to its whole session would end them behind its back."""
    child = "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print(child.pid, flush=True)"
    pid = running(real, f"import subprocess, sys; {child}; {PROGRAM}")
    now = real.now()
    assert now is not None
    other = int(now.output.split()[0])
    real.stop()
    until(lambda: real.now().status == "ended")  # type: ignore[union-attr]
    try:
        os.kill(other, 0)
        assert os.getsid(other) == pid
    finally:
        os.kill(other, signal.SIGKILL)
    now = real.now()
    assert now is not None
    assert now.exit_code == -signal.SIGINT
