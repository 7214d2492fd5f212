"""Who got a signal, told with real ones: this process alone, or all of its group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from gpudiag import script_runner as run
from gpudiag.script_runner import Relay, Witness, relay_signals

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="what is pending is told by Linux alone")


class Child:
    def __init__(self) -> None:
        self.got: list[int] = []

    def send_signal(self, number: int) -> None:
        self.got.append(number)


def in_a_group_of_its_own(code: str) -> str:
    """Return what `code` prints, run where a signal to the group meets nobody else."""
    head = "import os, signal, subprocess, sys, time\nfrom gpudiag.script_runner import Witness, relay_signals\n"
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(code)],
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_signal_to_the_group_was_seen_and_one_to_this_process_was_not() -> None:
    code = """
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda *_: None)
        witness = Witness()
        os.kill(os.getpid(), signal.SIGTERM)
        print(witness.saw(signal.SIGTERM))
        os.killpg(0, signal.SIGUSR1)
        os.killpg(0, signal.SIGUSR2)
        print(witness.saw(signal.SIGUSR2), witness.saw(signal.SIGUSR1), witness.saw(signal.SIGUSR1), witness.saw(signal.SIGTERM))
        witness.close()
        print(witness.saw(signal.SIGUSR1))
        """
    assert in_a_group_of_its_own(code) == "False\nTrue True False False\nNone\n"


@pytest.mark.slow
def test_the_child_gets_each_signal_once() -> None:
    count = "import signal, sys, time; n = []; signal.signal(signal.SIGUSR1, lambda *_: n.append(1)); print(1, flush=True)"
    code = f"""
        with relay_signals() as relay:
            child = subprocess.Popen([sys.executable, "-c", {count + "; sys.stdin.read(); print(len(n))"!r}], stdin=-1, stdout=-1)
            child.stdout.readline()
            relay.child = child
            for send in (lambda: os.killpg(0, signal.SIGUSR1), lambda: os.kill(os.getpid(), signal.SIGUSR1)) * 2:
                send()
                time.sleep(0.2)
            print(child.communicate()[0].decode(), end="")
        """
    assert in_a_group_of_its_own(code) == "4\n"


def test_where_nobody_can_tell_what_the_terminal_sends_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    handed = Relay(lambda _: None)
    handed.child = child = Child()  # type: ignore[assignment]
    monkeypatch.setattr(run, "_is_in_foreground", lambda: True)
    handed(signal.SIGINT, None)
    handed(signal.SIGTERM, None)
    monkeypatch.setattr(run, "_is_in_foreground", lambda: False)
    handed(signal.SIGINT, None)
    assert child.got == [signal.SIGTERM, signal.SIGINT]
    assert handed.interrupted


def test_without_a_witness_the_command_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpudiag.script_runner.shutil.which", lambda _: "/no/such/program")
    assert Witness().saw(signal.SIGTERM) is None


def test_everything_is_put_back() -> None:
    before = signal.getsignal(signal.SIGUSR1), signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with relay_signals():
        assert signal.getsignal(signal.SIGUSR1) != before[0]
    assert (signal.getsignal(signal.SIGUSR1), signal.pthread_sigmask(signal.SIG_BLOCK, [])) == before
