"""The one experiment that a dashboard may run: a process of its own, started from a list of arguments, never through a shell."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Literal, Protocol

import msgspec
from gpudiag_dashboard import orphans

from gpudiag.errors import UsageError

GRACE_S = 30.0
"""After Ctrl-C an experiment ends its processes and writes what it has; where that takes longer it is ended by SIGTERM."""

CLOSE_S = 5.0
"""How long the end of the dashboard waits for each of these."""

TAIL_BYTES = 16_384

Status = Literal["running", "stopping", "ended"]


class Process(Protocol):
    """What is used of subprocess.Popen."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""
        ...

    def send_signal(self, sig: int) -> None:
        """Send a signal to this process alone."""
        ...


class Job(msgspec.Struct, frozen=True):
    """An experiment that was started here, as it is now."""

    bundle: str
    """Name of the recording in the library."""
    fix: str
    command: str
    """As a person would type it: `gpudiag ab ...`."""
    started_unix: float
    status: Status
    seconds: float
    """Since it was started; until its end, once it has ended."""
    exit_code: int | None = None
    """Negative: the number of the signal that ended it."""
    output: str = ""
    """The end of what it printed, as it stands: escape it."""


Popen = Callable[[Sequence[str], IO[bytes]], Process]


def spawn(argv: Sequence[str], log: IO[bytes]) -> Process:
    """Return a process in a session of its own that prints into `log`: no Ctrl-C of a terminal reaches it, only ours. Raises OSError."""
    return subprocess.Popen(  # noqa: S603 - a list, made by starting.argv
        argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=orphans.environment()
    )


class Jobs:
    """Starts and stops; one at a time. Close it at the end of the dashboard: no experiment outlives it."""

    def __init__(self, popen: Popen = spawn, *, grace_s: float = GRACE_S, close_s: float = CLOSE_S) -> None:
        self._popen, self._grace_s, self._close_s = popen, grace_s, close_s
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._log: Path | None = None
        self._job: Job | None = None
        self._timer: threading.Timer | None = None
        self._closed = False

    def start(self, argv: Sequence[str], *, bundle: str, fix: str, shown: str) -> Job:
        """Return the job that has begun. Raises UsageError where one runs already, or it cannot be started."""
        with self._lock:
            now = self._now()
            if now is not None and now.status != "ended":
                raise UsageError(f"an experiment is running already: {now.fix} on {now.bundle}", "stop it, or wait for its end")
            if self._closed:
                raise UsageError("the dashboard is ending", "start it again")
            self._forget_log()
            handle, name = tempfile.mkstemp(prefix="gpudiag-dashboard-", suffix=".log")
            with os.fdopen(handle, "wb") as log:
                try:
                    self._process = self._popen(argv, log)
                except OSError as error:
                    Path(name).unlink(missing_ok=True)
                    raise UsageError(f"the experiment could not be started: {error.strerror or error}", "see the command below") from None
            self._log = Path(name)
            self._job = Job(bundle, fix, shown, time.time(), "running", 0.0)
            return self._job

    def now(self) -> Job | None:
        """Return the job that runs, or the last one that has ended; None where there was none."""
        with self._lock:
            return self._now()

    def stop(self) -> bool:
        """Return whether there was anything to stop: it is asked as by Ctrl-C, and after the grace it is ended."""
        with self._lock:
            now = self._now()
            if self._process is None or now is None or now.status == "ended":
                return False
            if now.status == "running":
                self._job = msgspec.structs.replace(now, status="stopping")
                self._timer = threading.Timer(self._grace_s, self._terminate, (self._process,))
                self._timer.daemon = True
                self._timer.start()
            _send(self._process, signal.SIGINT)
            return True

    def close(self) -> None:
        """End what runs, and wait for it: Ctrl-C, then SIGTERM, then SIGKILL. The guard of an experiment ends its arms in any case."""
        with self._lock:
            self._closed = True
            process, timer = self._process, self._timer
        if timer is not None:
            timer.cancel()
        if process is not None:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
                if process.poll() is not None:
                    break
                _send(process, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=self._close_s)
        with self._lock:
            self._now()
            self._forget_log()

    # -- with the lock held ---------------------------------------------------------------------------------------------

    def _now(self) -> Job | None:
        """Return the job as it is; one that has ended keeps its time and the end of its output."""
        if self._job is None or self._job.status == "ended" or self._process is None:
            return self._job
        code = self._process.poll()
        made = msgspec.structs.replace(self._job, seconds=time.time() - self._job.started_unix, output=_tail(self._log))
        if code is not None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
            made = msgspec.structs.replace(made, status="ended", exit_code=code)
        self._job = made
        return made

    def _terminate(self, process: Process) -> None:
        with self._lock:
            if process is self._process:
                _send(process, signal.SIGTERM)

    def _forget_log(self) -> None:
        if self._log is not None:
            self._log.unlink(missing_ok=True)
        self._log = None


def _send(process: Process, number: int) -> None:
    """Send a signal to the process, never to its group; nothing where it has ended (Popen looks before it sends)."""
    with contextlib.suppress(OSError):
        process.send_signal(number)


def _tail(path: Path | None) -> str:
    """Return the end of a log, from the beginning of a line on."""
    if path is None:
        return ""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            data = file.read(TAIL_BYTES)
    except OSError:
        return ""
    if size > TAIL_BYTES:
        data = data.partition(b"\n")[2]
    return data.decode(errors="replace")
