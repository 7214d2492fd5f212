"""Finds and ends the processes of an experiment by a mark in their environment; as a program, when the experiment's own process is gone.

Imports the standard library alone: it is run by its path. Launchers give each worker a session of its own, so that killing a process group
leaves them; what a process was started with stands in /proc/PID/environ for good (proc(5)), unless it gave its children another
environment, or wrote over it (setproctitle). So what stands below a marked process belongs to it too, for as long as it lives.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from typing import NamedTuple

MARK = "GPUDIAG_TRIAL"
"""Environment variable that all processes of an arm have: '<experiment>.<arm>'."""

_ROUNDS = 50
_TRIES, _AGAIN_S = 5, 0.2
"""To remove a folder: the kernel may still be taking a killed process apart."""

_STATE, _PARENT, _SESSION, _START = 0, 1, 3, 19
"""Places in /proc/PID/stat behind the name (proc(5), fields 3, 4, 6 and 22)."""


class _Process(NamedTuple):
    """What /proc says of a living process; pid and start together name it for good."""

    parent: int
    session: int
    start: int


class Family:
    """The processes of an experiment or of one arm: those whose mark begins with `prefix`, those of `sessions`, and what they started.

    A process that was seen once stays a member when its parents are gone. Without this process.
    """

    def __init__(self, prefix: str, sessions: frozenset[int] = frozenset()) -> None:
        self._wanted = f"{MARK}={prefix}".encode()
        self._sessions = set(sessions)
        self._seen: set[tuple[int, int]] = set()

    def members(self) -> set[int]:
        """List the ids of the living ones."""
        try:
            pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
        except OSError:
            pids = []
        living = {pid: one for pid in pids if (one := _read_stat(pid)) is not None}
        found = {pid for pid, one in living.items() if one.session in self._sessions or (pid, one.start) in self._seen}
        for pid in living.keys() - found:
            with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
                if any(entry.startswith(self._wanted) for entry in file.read().split(b"\0")):
                    found.add(pid)
        while below := {pid for pid, one in living.items() if one.parent in found} - found:
            found |= below
        self._seen |= {(pid, living[pid].start) for pid in found}
        self._sessions |= {living[pid].session for pid in found} - {0, os.getsid(0)}  # 0: its leader is outside of the container
        return found

    def kill(self) -> bool:
        """Kill all of them, also those that they start meanwhile; return whether none is left."""
        for _ in range(_ROUNDS):
            left = self.members()
            if not left:
                return True
            send_signal(left, signal.SIGKILL)
            time.sleep(0.02)
        return False


def _read_stat(pid: int) -> _Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if not fields or fields[_STATE] in (b"Z", b"X"):
        return None
    return _Process(int(fields[_PARENT]), int(fields[_SESSION]), int(fields[_START]))


def send_signal(pids: set[int], number: int) -> None:
    """Send a signal to processes; those that are gone are left out."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def remove_folder(folder: str) -> bool:
    """Remove a folder with all that is in it, folders without permissions (the work of an overlay) too; return whether it is gone."""
    for _ in range(_TRIES):
        for parent, names, _files in os.walk(folder):
            for name in names:
                path = os.path.join(parent, name)
                with suppress(OSError):
                    if not os.path.islink(path):
                        os.chmod(path, 0o700)
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.lexists(folder):
            return True
        time.sleep(_AGAIN_S)
    return False


def main() -> None:
    """Wait until the other end of standard input is closed, then end all processes of the experiment, and remove its folder."""
    sys.stdin.buffer.read()
    mark, folder = sys.argv[1:3]
    Family(mark).kill()
    if folder:
        remove_folder(folder)


if __name__ == "__main__":
    main()
