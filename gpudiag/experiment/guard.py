"""Finds and ends the processes of an experiment by a mark in their environment; as a program, when the experiment's own process is gone.

Imports the standard library alone: it is run by its path. Launchers give each worker a session of its own, so that killing a process group
leaves them; what a process was started with stands in /proc/PID/environ for good (proc(5)).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

MARK = "GPUDIAG_TRIAL"
"""Environment variable that all processes of an arm have: '<experiment>.<arm>'."""

_ROUNDS = 50
_STAT_SESSION = 3  # of /proc/PID/stat behind the name: state, ppid, pgrp, session


def marked(prefix: str, sessions: frozenset[int] = frozenset()) -> set[int]:
    """Return the ids of living processes whose mark begins with `prefix`, or that belong to one of `sessions`; without this one."""
    wanted = f"{MARK}={prefix}".encode()
    return {pid for pid in _processes() if _has(pid, wanted) or (sessions and _session(pid) in sessions)}


def _processes() -> list[int]:
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    return [int(name) for name in names if name.isdigit() and int(name) != os.getpid()]


def _has(pid: int, wanted: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return any(entry.startswith(wanted) for entry in file.read().split(b"\0"))
    except OSError:
        return False


def _session(pid: int) -> int | None:
    """Return the session of a process; None for one that is gone, or dead and not yet waited for."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[_STAT_SESSION])


def send(pids: set[int], number: int) -> None:
    """Send a signal to processes; those that are gone are left out."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill(prefix: str, sessions: frozenset[int] = frozenset()) -> bool:
    """Kill all processes with the mark, also those that they start meanwhile; return whether none is left."""
    for _ in range(_ROUNDS):
        left = marked(prefix, sessions)
        if not left:
            return True
        send(left, signal.SIGKILL)
        time.sleep(0.02)
    return False


def main() -> None:
    """Wait until the other end of standard input is closed, then end all processes of the experiment."""
    sys.stdin.buffer.read()
    kill(sys.argv[1])


if __name__ == "__main__":
    main()
