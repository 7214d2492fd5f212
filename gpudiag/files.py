"""Files of unknown origin, opened so that none can hold the reader up; files of our own, replaced whole or not at all, and their locks."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_WITHOUT_WAITING = os.O_RDONLY | sum(getattr(os, flag, 0) for flag in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
"""open() would wait for the writer of a pipe, for ever. Not every system has all flags; files themselves never wait."""


_TRIES, _AGAIN_S = 20, 0.01


class NoFileError(OSError):
    """A pipe, socket or device stands where a file was asked for."""


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Return a file opened for reading. Raises OSError, NoFileError for a pipe or a device; ValueError for a name with a null byte."""
    descriptor = os.open(path, _WITHOUT_WAITING)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise NoFileError(errno.EINVAL, "a pipe, socket or device, no file", os.fspath(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_file(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the bytes of a file. Raises OSError as open_file does, and for more than `most` bytes, however they came to be there."""
    with open_file(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most >> 20} MiB", os.fspath(path))
    return data


def digest_content(data: bytes) -> str:
    """Return what tells the content of a file from any other (BLAKE2b, 128 bits, in hexadecimal)."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def hold_lock(path: str | os.PathLike[str]) -> BinaryIO | None:
    """Return a file that holds the lock of `path` until it is closed or this process ends, in whatever way.

    None where files cannot be locked here, or another process holds it. Raises OSError where it cannot be opened.
    """
    try:
        import fcntl  # not on every system
    except ImportError:
        return None
    file = open(path, "ab")  # noqa: SIM115 closed by whoever holds it
    for _ in range(_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:  # who asks whether it is held holds it for a moment
            time.sleep(_AGAIN_S)
        except OSError:
            break
    file.close()
    return None


def is_locked(path: str | os.PathLike[str]) -> bool | None:
    """Return whether another process holds the lock of `path` (`hold_lock`); None where that cannot be told."""
    try:
        import fcntl

        with open_file(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False
    except (ImportError, OSError, ValueError):
        return None


def replace_file(path: Path, data: bytes) -> None:
    """Write a file of our own whole or not at all; only its user may read it. Raises OSError."""
    import tempfile  # takes as long to load as all of this module, and files are seldom written

    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise
