"""Signals that end a command in order, and what becomes of them before and after."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from gpudiag.cli.command import end_with_starter, interrupt_on_signals
from gpudiag.experiment.offers import STARTED_BY

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="signals of POSIX")


@pytest.fixture
def heard() -> Iterator[None]:
    """The tests themselves may run under nohup, and what that has ignored stays so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_breaks_off_and_is_the_exit_code(number: signal.Signals) -> None:
    put_in_order = False
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(typer.Exit) as told, interrupt_on_signals():  # noqa: PT012 - what is done on the way out is the point
        try:
            os.kill(os.getpid(), number)
            pytest.fail("it went on")
        except KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGHUP if number == signal.SIGTERM else signal.SIGTERM) if number != signal.SIGINT else None
            put_in_order = True
            raise
    assert told.value.exit_code == 128 + number
    assert put_in_order, "the second signal came between"
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)] == before


def test_what_nohup_has_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupt_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


STARTED = """
import os, subprocess, sys, time
program = (
    "from gpudiag.cli.command import end_with_starter; import sys, time; end_with_starter(0.02); print('up', flush=True)\\n"
    "try: time.sleep(60)\\nexcept KeyboardInterrupt: open(sys.argv[1], 'w').close()"
)
child = subprocess.Popen([sys.executable, "-c", program, sys.argv[1]], env={**os.environ, "GPUDIAG_STARTED_BY": str(os.getpid())})
time.sleep(60)
"""


@pytest.mark.slow
def test_an_experiment_is_interrupted_when_its_dashboard_is_killed(tmp_path: Path) -> None:
    interrupted = tmp_path / "interrupted"
    starter = subprocess.Popen([sys.executable, "-c", STARTED, str(interrupted)], stdout=subprocess.PIPE)
    assert starter.stdout is not None
    assert starter.stdout.readline() == b"up\n"
    assert not interrupted.exists()
    starter.kill()
    starter.wait()
    assert starter.stdout.read() == b"", "its end, without a traceback"
    assert interrupted.exists()


def test_what_a_person_started_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STARTED_BY, raising=False)
    before = threading.active_count()
    end_with_starter()
    assert threading.active_count() == before
