"""`gpudiag attach`: ask a training that runs for a recording of some of its steps, and wait for it."""

from __future__ import annotations

import os
import select
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from gpudiag.capture.launch import choose_default_path
from gpudiag.capture.run_script.listen import ASK_S, Answer, check_folder, find_socket, read_line
from gpudiag.capture.run_script.plan import OptionValue, Plan, read_journal
from gpudiag.errors import GpudiagError, InputError
from gpudiag.script_runner import RunResult
from gpudiag.units import Progress

LOOK_S = 0.1
LEAVE_S = 30.0
"""How long the end of a recording that was given up is waited for: until the step that runs has ended."""

_OVER = ("ended", "failed", "aside")


def attach(pid: int, path: str = "", options: Mapping[str, OptionValue] | None = None, *, wait_s: float, tell: Progress) -> RunResult:
    """Return what the process `pid` recorded of itself into a bundle at `path` (default runs/<time>), as `options` of gpudiag.profile say.

    After `wait_s` the recording is given up; what it holds by then is kept. `tell` is told what is waited for.
    Raises InputError where the process cannot be asked, or refuses.
    """
    folder = Path(path) if path else choose_default_path()
    with tempfile.TemporaryDirectory(prefix="gpudiag-attach-") as scratch, _connect(pid, tell) as connection:
        journal = Path(scratch) / "journal"
        journal.touch()
        plan = Plan(os.path.abspath(folder), None, dict(options or {}), str(journal))
        connection.settimeout(2 * ASK_S)
        try:
            connection.sendall(plan.text().encode() + b"\n")
            answer = msgspec.json.decode(read_line(connection), type=Answer)
        except (OSError, msgspec.MsgspecError) as error:
            raise InputError(f"process {pid} gave no answer ({error})", "is its gpudiag of the same version?") from None
        if answer.refused:
            raise InputError(f"process {pid} is not recorded: {answer.refused}", "try again when that has changed")
        interrupted = False
        try:
            _follow(connection, journal, time.monotonic() + wait_s, tell)
        except KeyboardInterrupt:
            interrupted = True
        if not _is_over(journal):
            connection.shutdown(socket.SHUT_RDWR)  # it takes everything back at its next step
            _wait_for_end(journal)
        return RunResult(0, tuple(read_journal(journal)), interrupted)


def _connect(pid: int, tell: Progress) -> socket.socket:
    if not hasattr(socket, "AF_UNIX"):
        raise InputError("this system has no Unix sockets", "record the program from its start: gpudiag run")
    path = find_socket(pid)
    try:
        owner = psutil.Process(pid).uids().effective
    except psutil.NoSuchProcess:
        raise InputError(f"there is no process {pid}", "give the number of the training process, as `ps` shows it") from None
    if owner != os.geteuid():  # root, too, would have it run a script that it may not read
        raise InputError(f"process {pid} is another user's", "attach as the user who started it")
    if not path.exists():
        _have_it_listen(pid, path, tell)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        check_folder(path.parent)
        connection.connect(str(path))
    except OSError as error:
        connection.close()
        raise InputError(f"process {pid} does not listen any more ({error.strerror})", "call gpudiag.listen() in it") from None
    except GpudiagError:
        connection.close()
        raise
    return connection


_HOW = "call gpudiag.listen() in the program before its loop, or start it with `gpudiag run --at-step STEP`"

_HAVE_LISTEN = """
import time
if time.time() < {until!r}:
    try:
        import gpudiag
        gpudiag.listen(once=True)
    except Exception as error:
        import os
        with open({failed!r} + ".part", "w") as file:
            file.write(f"{{type(error).__name__}}: {{error}}")
        os.replace({failed!r} + ".part", {failed!r})
"""


def _have_it_listen(pid: int, path: Path, tell: Progress) -> None:
    """Have Python 3.14 run gpudiag.listen() in the process (PEP 768: at a safe point of its main thread). Raises InputError."""
    remote_exec = getattr(sys, "remote_exec", None)
    if remote_exec is None:
        raise InputError(f"process {pid} does not listen", _HOW)
    scratch, until = Path(tempfile.mkdtemp(prefix="gpudiag-attach-")), time.time() + 2 * ASK_S
    script, failed = scratch / "listen.py", scratch / "failed"
    script.write_text(_HAVE_LISTEN.format(until=until, failed=str(failed)), encoding="utf-8")
    try:
        remote_exec(pid, str(script))
    except (OSError, RuntimeError, ValueError) as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise InputError(f"process {pid} does not listen, and cannot be made to ({error})", _HOW) from None
    tell("waiting for the process to listen")
    while not path.exists() and not failed.exists():
        if time.time() > until:  # the script stays: a program that comes to it later, and finds none, prints a traceback
            raise InputError(f"process {pid} does not listen: its main thread ran no Python for {2 * ASK_S:.0f} s", _HOW)
        time.sleep(LOOK_S)
    reason = failed.read_text(errors="replace")[:200] if failed.exists() else ""
    shutil.rmtree(scratch, ignore_errors=True)
    if reason:
        raise InputError(f"process {pid} cannot listen: {reason}", _HOW)


def _is_over(journal: Path) -> bool:
    return any(entry.what in _OVER for entry in read_journal(journal))


def _follow(connection: socket.socket, journal: Path, deadline: float, tell: Progress) -> None:
    """Wait until the recording is over, the process is gone, or `deadline`."""
    tell("waiting for a training step")
    begun = False
    while time.monotonic() < deadline and not _is_over(journal):
        if not begun and any(entry.what == "bundle" for entry in read_journal(journal)):
            begun = True
            tell("recording")
        if select.select([connection], [], [], LOOK_S)[0]:  # the other end has closed: the process has ended, or its thread has
            _wait_for_end(journal)
            return


def _wait_for_end(journal: Path) -> None:
    begun = any(entry.what == "training" for entry in read_journal(journal))
    deadline = time.monotonic() + (LEAVE_S if begun else 0)
    while time.monotonic() < deadline and not _is_over(journal):
        with suppress(KeyboardInterrupt):
            time.sleep(LOOK_S)


def explain_nothing_recorded(ran: RunResult, pid: int) -> str:
    """Explain why nothing was recorded, in one line."""
    if failed := ran.told("failed"):
        return f"the recording failed: {failed[0].text}"
    if ran.told("aside"):
        return "the program began to record itself with gpudiag.profile: the bundle is where that put it"
    if ran.interrupted:
        return f"nothing was recorded: interrupted; process {pid} goes on as before"
    return (
        f"nothing was recorded: process {pid} came to no backward pass and no gpudiag.step() meanwhile (a pause, an evaluation, a loop "
        "without gradients, or it has ended)"
    )
