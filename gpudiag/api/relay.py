"""Hands the signals that `gpudiag run` gets on to its command, unless the command has got them itself."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_SIGNALS = ("SIGINT", "SIGQUIT", "SIGHUP", "SIGTERM", "SIGUSR1", "SIGUSR2")
_OF_TERMINAL = ("SIGINT", "SIGQUIT", "SIGHUP")

PATIENCE_S = 0.05
"""How long a signal may take to reach the whole group: the kernel goes through it in one call, `timeout` and `scancel` in a few."""


class Witness:
    """A process of our process group that holds back every signal, so that it can be asked which ones the whole group was sent.

    Who sends a signal says nothing of whom else it went to: a terminal, `timeout` and a scheduler send it to the group or to every process
    of the job, the command's among them; `kill` to this one alone. The witness is a `cat` of a pipe: it ends with us, however we end.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._held: set[int] = set()
        self._program = shutil.which("cat") if Path("/proc/self/status").exists() else None  # what is pending is told by Linux alone
        self._renew()

    def _renew(self) -> None:
        """Put a new one in place: what a witness has seen stays pending in it for good."""
        self.close()
        if self._program is None:
            return
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _numbers())  # a child begins with the mask of its parent
        try:
            with suppress(OSError):
                self._process = subprocess.Popen(  # noqa: S603 - a fixed program
                    [self._program], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/"
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def saw(self, number: int) -> bool | None:
        """Return whether the group was sent this signal too; None where that is not known."""
        process, deadline = self._process, time.monotonic() + PATIENCE_S
        while process is not None and number not in self._held:
            pending = _pending(process.pid)
            if pending is None:
                return None
            if number in pending:
                self._held |= pending  # another one's turn comes next, and the new witness knows nothing of it
                self._renew()
            elif time.monotonic() > deadline:
                return False
            else:
                time.sleep(0.002)
        if number not in self._held:
            return None
        self._held.discard(number)
        return True

    def close(self) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(OSError):
                process.kill()
            if process.stdin is not None:
                process.stdin.close()
            process.wait()


def _pending(pid: int) -> set[int] | None:
    """Return the signals that wait for the process (/proc/<pid>/status, ShdPnd: proc(5)); None where that cannot be read."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        mask = next(int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    return {number for number in _numbers() if mask >> (number - 1) & 1}


class Relay:
    """Hands signals on to the child that have not reached it by themselves, as they reach all processes of a group."""

    def __init__(self, saw: Callable[[int], bool | None]) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.interrupted = False
        """Whether the user pressed Ctrl-C meanwhile."""
        self._saw = saw

    def __call__(self, number: int, _: object) -> None:
        """Hand the signal on, where the child has not got it."""
        self.interrupted = self.interrupted or number == signal.SIGINT
        child = self.child  # before it has started there is nobody to hand a signal to
        seen = self._saw(number)
        if seen is None:
            seen = signal.Signals(number).name in _OF_TERMINAL and _in_foreground()
        if child is not None and not seen:
            with suppress(OSError):
                child.send_signal(number)


def _in_foreground() -> bool:
    """Return whether this process belongs to the foreground group of a terminal."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _numbers() -> list[int]:
    return [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]


@contextmanager
def relayed() -> Iterator[Relay]:
    """Yield the relay, in force until the child has ended. Signals that are ignored (nohup) stay so, here and in the child."""
    witness = Witness()
    relay = Relay(witness.saw)
    before: dict[int, Any] = {}
    for number in _numbers():
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_IGN)  # anew: a library may have put a handler of its own there, behind Python's back (polars)
        elif signal.getsignal(number) is not None:
            before[number] = signal.signal(number, relay)  # a handler of ours is the default again in the child
    try:
        yield relay
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        witness.close()
