"""Files of unknown origin, opened so that none can hold the reader up; files of our own, replaced whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_WITHOUT_WAITING = os.O_RDONLY | sum(getattr(os, flag, 0) for flag in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
"""open() would wait for the writer of a pipe, for ever. Not every system has all flags; files themselves never wait."""


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
