"""Experiments started from the dashboard: what may be started, the process that runs."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Literal

import msgspec
from gpudiag_dashboard.library import Library

from gpudiag.errors import GpudiagError, InputError, UsageError
from gpudiag.experiment import offers
from gpudiag.recordings.live import GrowingRecording
from gpudiag.recordings.recorded_command import find_recorded_words, read_recorded_script

_PLACEHOLDER = ("train.py", "ARGS")


class RunPlan(msgspec.Struct, frozen=True):
    """One experiment as it would be started."""

    offer: offers.Offer
    arguments: tuple[str, ...] = ()
    """Of gpudiag; () where it cannot be started from here."""
    shown: str = ""
    """The same as a person types it; with placeholders where the program is not known."""
    why_not: str = ""
    """Why it cannot be started from here; '' where it can, as far as the recording is concerned."""
    hint: str = ""

    @property
    def argv(self) -> list[str]:
        """Return the command as a list of arguments."""
        return [sys.executable, "-m", "gpudiag", *self.arguments]

    @property
    def digest(self) -> str:
        """Return a digest of the command: that which was shown is the one that is started. '' where there is none."""
        return offers.digest_command(self.arguments) if self.arguments else ""


def plan_run(library: Library, name: str, fix: str) -> RunPlan:
    """Return how `fix` would be tried on the recording `name`. Raises InputError for a recording or a fix that is not to be had."""
    offer = offers.choose_offer(offers.list_offers(library.report(name).data), fix)
    entry, path = library.entry(name), library.path(name)
    if entry.kind != "bundle":
        shown = shlex.join(["gpudiag", "ab", "--fix", str(offer.call), *_PLACEHOLDER])
        return RunPlan(offer, (), shown, "a trace does not tell which program it was recorded from", "type the command with your program")
    words: tuple[str, ...] = ()
    why, hint = offers.NOT_RECORDED, "type the command with your program"
    try:
        words = find_recorded_words(GrowingRecording(path).read().manifest)
    except GpudiagError as error:
        why, hint = error.message, error.hint or ""
    if words and entry.status == "live":
        why, hint = "the run still records: an experiment beside it would disturb both", "wait for its end"
    elif words and (path / "experiments").is_symlink():
        why, hint = "the folder of its experiments is a link", "results are written into the recording itself"
    elif words:
        why = offers.explain_missing_program(words)
        hint = f"start the dashboard in the folder in which the program was run; this one is {os.getcwd()}" if why else ""

    # The command as a person types it in this folder, then as it is started
    ceilings = offers.has_report(path)
    typed = offers.build_ab_arguments(offer.call, name_place(path), words or _PLACEHOLDER, ceilings=ceilings)
    shown = shlex.join(["gpudiag", *(word for word in typed if word != "--" or "--" in words)])
    if why:
        return RunPlan(offer, (), shown, why, hint)
    return RunPlan(offer, tuple(offers.build_ab_arguments(offer.call, str(path), words, ceilings=ceilings)), shown)


def name_place(path: Path) -> str:
    """Return where a recording lies as a person types it in this folder."""
    place = os.path.relpath(path)
    return str(path) if place.startswith(os.pardir) else place


def find_script(library: Library, name: str) -> str:
    """Find the recorded program and its arguments as words of a shell; '' where they are not known. Raises InputError for no recording."""
    return read_recorded_script([str(library.path(name))])


def check_run_plan(library: Library, name: str, fix: str, digest: str) -> RunPlan:
    """Return the plan that a person has seen, to be started. Raises InputError where it cannot be, or is another by now."""
    made = plan_run(library, name, fix)
    if made.why_not:
        raise InputError(made.why_not, made.hint or None)
    if not digest or made.digest != digest:
        raise InputError("the recording has changed since the command was shown", "load the page anew, and look at the command again")
    return made


GRACE_S = 30.0
"""After Ctrl-C an experiment ends its processes and writes what it has; where that takes longer it is ended by SIGTERM."""

TAIL_BYTES = 16_384


class Job(msgspec.Struct, frozen=True):
    """An experiment that was started here, as it is now."""

    bundle: str
    fix: str
    command: str
    started_unix: float
    status: Literal["running", "stopping", "ended"]
    seconds: float
    exit_code: int | None = None
    """Negative: the number of the signal that ended it."""
    output: str = ""
    """The end of what it printed, as it stands: escape it."""


Popen = Callable[[Sequence[str], IO[bytes]], subprocess.Popen[bytes]]


def spawn(argv: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Return a process in a session of its own that prints into `log`: no Ctrl-C of a terminal reaches it, only ours. Raises OSError.

    It ends with this one, also where that is killed (cli.command.end_with_starter).
    """
    environment = {**os.environ, offers.STARTED_BY: str(os.getpid())}
    return subprocess.Popen(  # noqa: S603 - a list, made by plan_run
        argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment
    )


class Jobs:
    """Starts and stops; one at a time. Close it at the end of the dashboard: no experiment outlives it."""

    def __init__(self, popen: Popen = spawn, *, grace_s: float = GRACE_S, close_s: float = 5.0) -> None:
        self._popen, self._grace_s, self._close_s = popen, grace_s, close_s
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._job: Job | None = None
        self._closed = False

    def start(self, argv: Sequence[str], *, bundle: str, fix: str, shown: str) -> Job:
        """Return the job that has begun. Raises UsageError where one runs already, or it cannot be started."""
        with self._lock:
            now = self.now()
            if now is not None and now.status != "ended":
                raise UsageError(f"an experiment is running already: {now.fix} on {now.bundle}", "stop it, or wait for its end")
            if self._closed:
                raise UsageError("the dashboard is ending", "start it again")
            log: IO[bytes] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - read until the next one starts
            try:
                self._process = self._popen(argv, log)
            except OSError as error:
                raise UsageError(f"the experiment could not be started: {error.strerror or error}", "see the command below") from None
            self._log, self._job = log, Job(bundle, fix, shown, time.time(), "running", 0.0)
            return self._job

    def now(self) -> Job | None:
        """Return the job that runs, or the last one that has ended, with its time and the end of its output; None where there was none."""
        with self._lock:
            if self._job is None or self._job.status == "ended" or self._process is None or self._log is None:
                return self._job
            code = self._process.poll()
            size = os.fstat(self._log.fileno()).st_size
            tail = os.pread(self._log.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES))  # the process writes on where it was
            if size > TAIL_BYTES:
                tail = tail.partition(b"\n")[2]  # from the beginning of a line on
            made = msgspec.structs.replace(self._job, seconds=time.time() - self._job.started_unix, output=tail.decode(errors="replace"))
            self._job = made if code is None else msgspec.structs.replace(made, status="ended", exit_code=code)
            return self._job

    def stop(self) -> bool:
        """Return whether there was anything to stop: it is asked as by Ctrl-C, and after the grace it is ended."""
        with self._lock:
            now = self.now()
            if self._process is None or now is None or now.status == "ended":
                return False
            if now.status == "running":
                self._job = msgspec.structs.replace(now, status="stopping")
                timer = threading.Timer(self._grace_s, _send_signal, (self._process, signal.SIGTERM))
                timer.daemon = True
                timer.start()
            _send_signal(self._process, signal.SIGINT)
            return True

    def close(self) -> None:
        """End what runs, and wait for it: Ctrl-C, then SIGTERM, then SIGKILL. The guard of an experiment ends its arms in any case."""
        with self._lock:
            self._closed, process = True, self._process
        if process is not None:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
                _send_signal(process, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=self._close_s)
        self.now()


def _send_signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the process, never to its group: an experiment ends its own arms. Nothing where it has ended."""
    with contextlib.suppress(OSError):
        if process.poll() is None:
            process.send_signal(number)
