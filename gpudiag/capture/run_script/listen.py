"""`gpudiag.listen()`: a training that runs may be asked by `gpudiag attach` to record some of its steps.

A thread waits at a Unix socket in a folder that only this user may enter. What it is asked for begins on the training thread, at the next
backward pass or gpudiag.step(): the thread itself touches nothing of torch's but the method `Tensor.backward`, which is replaced in one
piece. When the steps are recorded, or whoever asked has gone, everything is taken back.
"""

from __future__ import annotations

import atexit
import os
import socket
import stat
import sys
import threading
from contextlib import suppress
from pathlib import Path

import msgspec

from gpudiag.errors import GpudiagError, warn_user

MOST_BYTES = 64 << 10
"""Of a request; a plan has some hundred."""

ASK_S = 5.0
"""How long a request and its answer may take."""

_listener: Listener | None = None


class Answer(msgspec.Struct):
    """What a process says to a request; `refused`: why not, '' where it records."""

    refused: str = ""


def find_socket(pid: int) -> Path:
    """Return where the process `pid` of this user listens. The folder is the same whatever TMPDIR says: both sides must find it."""
    return Path(f"/tmp/gpudiag-{os.getuid()}/{pid}.sock")  # noqa: S108 - its owner and mode are checked


def check_folder(folder: Path) -> None:
    """Raise GpudiagError where others may have made or may enter `folder`."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise GpudiagError(f"{folder} is not a folder of this user alone", "remove it")


def read_line(connection: socket.socket) -> bytes:
    """Return what came up to the end of a line, at most MOST_BYTES. Raises OSError."""
    received = b""
    while not received.endswith(b"\n") and len(received) < MOST_BYTES and (more := connection.recv(MOST_BYTES)):
        received += more
    return received


class Listener:
    """Answers requests one after the other, in a thread of its own. `once`: only the first."""

    def __init__(self, *, once: bool = False) -> None:
        self._once, self._owner_pid = once, os.getpid()
        self.path = find_socket(self._owner_pid)
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        check_folder(self.path.parent)
        self.path.unlink(missing_ok=True)  # of an earlier process of this number
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(self.path))
        self._socket.listen(1)
        atexit.register(self.close)
        threading.Thread(target=self._serve, name="gpudiag-listen", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with suppress(Exception), connection:  # the training run comes first
                self._answer(connection)
            if self._once:
                self.close()

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(ASK_S)
        request = read_line(connection)
        if "torch" not in sys.modules:
            refused, watching = "it has not imported torch", None
        else:
            from gpudiag.capture.run_script.watch import attach

            try:
                refused, watching = attach(request.decode())
            except ValueError:  # neither text nor a plan (msgspec's errors are of this kind)
                refused, watching = "it does not understand what it is asked: its gpudiag is of another version", None
        connection.sendall(msgspec.json.encode(Answer(refused)) + b"\n")
        if watching is not None:
            connection.settimeout(None)
            try:
                connection.recv(1)  # returns when whoever asked closes, or is killed
            finally:
                watching.abandon()

    def close(self) -> None:
        """Listen no more; in a child that was forked nothing is done."""
        if os.getpid() == self._owner_pid:
            atexit.unregister(self.close)
            self.path.unlink(missing_ok=True)
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # close() alone leaves accept() waiting
            self._socket.close()


def listen(*, once: bool = False) -> None:
    """Let `gpudiag attach PID` record some steps of this process while it runs, asked for by the same user on this machine.

    Call it once, anywhere before the training loop. Until somebody asks it costs a thread that sleeps. `once`: end after the first request.
    Nothing is raised: where it cannot listen (Windows, no /tmp), it warns, and the training goes on.
    """
    global _listener
    if _listener is not None and _listener._owner_pid == os.getpid() and _listener.path.exists():
        return
    try:
        _listener = Listener(once=once)
    except Exception as error:  # noqa: BLE001 - the training run comes first
        warn_user(f"gpudiag: gpudiag.listen() does not listen ({error})", 2)
