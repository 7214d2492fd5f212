"""Experiments of a dashboard that was killed: nobody was left to end them, so they run on. The next dashboard sees them and says so."""

from __future__ import annotations

import os
import shlex
import time
from typing import NamedTuple

import psutil

from gpudiag.errors import UsageError

MARK = "GPUDIAG_STARTED_BY"
"""Environment variable of what a dashboard starts: the dashboard's process and when that began, for numbers of processes come again."""

_COMMAND = ["-m", "gpudiag", "ab"]
"""Its own processes inherit the mark, but not these words (api.offers.argv)."""


class Orphan(NamedTuple):
    """One experiment that runs on."""

    pid: int
    command: str
    """As a person would type it; as it stands: escape it."""
    seconds: float
    """Since it was started."""

    @property
    def told(self) -> str:
        """Return what is to be said of it."""
        shown = "".join(letter if letter.isprintable() else "?" for letter in self.command)
        return f"an experiment of a dashboard that is gone still runs, since {self.seconds / 60:.0f} min: process {self.pid}, {shown}"

    @property
    def hint(self) -> str:
        """Return how to end it."""
        return f"wait for its end, or end it with: kill -INT {self.pid}"


def mark() -> str:
    """Return the mark of this dashboard."""
    return _mark(psutil.Process())


def orphans() -> tuple[Orphan, ...]:
    """Return the experiments of this user whose dashboard is gone."""
    found = (_orphan(process) for process in psutil.process_iter())
    return tuple(one for one in found if one is not None)


def refuse() -> None:
    """Raise UsageError where an experiment of an earlier dashboard still runs: two at once disturb each other."""
    for one in orphans():
        raise UsageError(one.told, one.hint)


def _orphan(process: psutil.Process) -> Orphan | None:
    try:
        words = process.cmdline()
        if words[1:4] != _COMMAND or _lives(process.environ().get(MARK)):
            return None
        return Orphan(process.pid, shlex.join(words[2:]), max(0.0, time.time() - process.create_time()))
    except (psutil.Error, OSError):  # of another user, or ended meanwhile
        return None


def _lives(given: str | None) -> bool:
    """Return whether the dashboard of this mark still runs; also for no mark at all: a person started it."""
    if given is None:
        return True
    pid = given.partition("-")[0]
    if not (pid.isascii() and pid.isdigit()) or len(pid) > 9:
        return True
    try:
        return _mark(psutil.Process(int(pid))) == given
    except psutil.Error:
        return False


def _mark(process: psutil.Process) -> str:
    return f"{process.pid}-{process.create_time():.2f}"


def environment() -> dict[str, str]:
    """Return the environment of what this dashboard starts."""
    return {**os.environ, MARK: mark()}
