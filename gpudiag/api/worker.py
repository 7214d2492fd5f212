"""A process that works on ranks for another one: it reads requests from its standard input and writes the answers to its output.

A request or an answer is a frame: 8 bytes of length (little endian), then so many bytes. The first byte of an answer tells a result from
a reason. Nothing is pickled, and no file of the program that asks is imported: it may be a training script.
"""

from __future__ import annotations

import importlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from gpudiag.api.unread import Answer, Unread, guarded

_LENGTH_BYTES = 8
_RESULT, _REASON = b"\0", b"\1"
_MAIN = "import sys; from gpudiag.api.worker import serve; serve(sys.argv[1])"
_ERRORS = "stderr"
_LAST_BYTES = 2_000
"""Of what a process wrote to its standard error, looked at when it died."""


class DiedError(Exception):
    """The process ended without an answer; the text says how."""


def write_frame(stream: IO[bytes], data: bytes) -> None:
    """Write one frame."""
    stream.write(len(data).to_bytes(_LENGTH_BYTES, "little"))
    stream.write(data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Return the content of the next frame; None where the stream ends before or in it."""
    head = stream.read(_LENGTH_BYTES)
    if len(head) < _LENGTH_BYTES:
        return None
    size = int.from_bytes(head, "little")
    data = stream.read(size)
    return data if len(data) == size else None


def function(name: str) -> Callable[[bytes], bytes]:
    """Return the function 'module:name' of our own; imported here, as it brings the libraries of the analysis."""
    module, _, attribute = name.partition(":")
    found: Callable[[bytes], bytes] = getattr(importlib.import_module(module), attribute)
    return found


# -- in the process that works ------------------------------------------------------------------------------------------------


def serve(name: str) -> None:
    """Answer requests with the function `name` ('module:function', bytes -> bytes) until the standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the one that asked ends this one
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not stand among the answers
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(sys.stdin.buffer, requests), daemon=True).start()
    make = function(name)
    while True:
        found = guarded(make, requests.get())
        write_frame(answers, _REASON + msgspec.json.encode(found) if isinstance(found, Unread) else _RESULT + found)


def _receive(stream: IO[bytes], requests: queue.SimpleQueue[bytes]) -> None:
    """Put requests into the queue; end the process at once when nobody is there any more who could read the answers."""
    while (data := read_frame(stream)) is not None:
        requests.put(data)
    os._exit(0)


# -- in the process that asks -------------------------------------------------------------------------------------------------


class Worker:
    """A process that answers one request after the other with the function `name`. `answered`: requests so far."""

    def __init__(self, name: str) -> None:
        self.answered = 0
        self._scratch = tempfile.TemporaryDirectory(prefix="gpudiag-rank-")
        with open(Path(self._scratch.name) / _ERRORS, "wb") as errors:
            self._process = subprocess.Popen(  # noqa: S603 -- own interpreter, own code
                [sys.executable or "python3", "-c", _MAIN, name],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=self._scratch.name, env=_environment(os.environ),
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """Return the number of the process."""
        return self._process.pid

    def ask(self, request: bytes) -> Answer:
        """Return the answer to `request`. Raises DiedError where the process ends before."""
        assert self._process.stdin is not None  # noqa: S101 -- pipes were asked for
        assert self._process.stdout is not None  # noqa: S101
        try:
            write_frame(self._process.stdin, request)
            found = read_frame(self._process.stdout)
        except (OSError, ValueError):
            found = None
        if not found:
            raise DiedError(self._how())
        self.answered += 1
        return found[1:] if found[:1] == _RESULT else msgspec.json.decode(found[1:], type=Unread)

    def kill(self) -> None:
        """End the process now, whatever it does. `ask` in another thread raises DiedError."""
        self._process.kill()

    def close(self) -> None:
        """End the process and remove what it left."""
        self.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # a request that was not taken
                if stream is not None:
                    stream.close()
        self._scratch.cleanup()

    def _how(self) -> str:
        """Return how the process ended, to go on after 'the process'."""
        code = self._process.wait()
        if code < 0:
            killed = f"was killed by signal {-code}"
            return f"{killed} (out of memory?)" if -code == getattr(signal, "SIGKILL", 9) else killed
        written = (Path(self._scratch.name) / _ERRORS).read_bytes()[-_LAST_BYTES:]
        said = written.decode(errors="replace").strip().splitlines()
        return f"ended with exit code {code}: {said[-1] if said else 'no message'}"


def _environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the process: the same places to import from; one thread for polars, as each core has a process."""
    places = os.pathsep.join(str(Path(folder).absolute()) for folder in sys.path if folder)
    return {**base, "PYTHONPATH": places, "POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"}
