"""Work that processes of the tests do on request: quick, slow, failing, deadly."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from gpudiag.errors import InputError


def twice(request: bytes) -> bytes:
    """Return the request twice."""
    return request * 2


def pid(request: bytes) -> bytes:
    """Return the number of this process."""
    return str(os.getpid()).encode()


def threads_of_polars(request: bytes) -> bytes:
    """Return how many threads polars has in this process."""
    import polars as pl

    return str(pl.thread_pool_size()).encode()


def prints(request: bytes) -> bytes:
    """Print, as a library might, and return the request."""
    print("a word", flush=True)  # noqa: T201 -- what is tested
    os.write(1, b"another word")
    return request


def fails(request: bytes) -> bytes:
    """Fail as the request says."""
    if request == b"input":
        raise InputError("t.json is empty", "record again")
    if request == b"bug":
        raise KeyError("kernels")
    return request


def dies_once(request: bytes) -> bytes:
    """Die of signal 9 the first time: 'path to a file that remembers'; other requests (b'') are answered."""
    if request:
        memory = Path(request.decode())
        if not memory.exists():
            memory.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return b"alive"


def dies(request: bytes) -> bytes:
    """Die of signal 9 where the request says so, leave with a message where it says that."""
    if request == b"kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if request == b"leave":
        os.write(2, b"no more room\n")
        os._exit(7)
    return request


def waits(request: bytes) -> bytes:
    """Write this process's number into the folder of the request and wait until 'go' is there, or for a minute."""
    folder = Path(request.decode())
    (folder / f"pid-{os.getpid()}").touch()
    for _ in range(600):
        if (folder / "go").exists():
            break
        time.sleep(0.1)
    return str(os.getpid()).encode()


def waits_or_dies(request: bytes) -> bytes:
    """Wait as `waits`; die of signal 9 where the folder holds 'deadly'."""
    if (Path(request.decode()) / "deadly").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return waits(request)
