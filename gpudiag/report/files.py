"""Files that hold a report: written whole or not at all."""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from gpudiag.errors import InputError, UsageError

_RANDOM = re.compile(r"[0-9a-f]{16}")
"""How the name of a temporary file ends."""

_STALE_S = 3600.0
"""Age at which a temporary file is of a process that died: a report is written in seconds."""


def write_file(target: Path, data: bytes) -> None:
    """Write `data` to `target` by a temporary file beside it and a rename. Raises InputError where that fails.

    A link is followed, a file that exists keeps its permissions, a new one gets those that open() would give it.
    """
    write_file_pieces(target, [data])


def write_file_pieces(target: Path, pieces: Iterable[bytes]) -> None:
    """Write `pieces`, one after the other, as `write_file` does: all of them or no file."""
    write_file_with(target, lambda file: file.writelines(pieces))


def write_file_with(target: Path, put: Callable[[IO[bytes]], None]) -> None:
    """Write what `put` writes into the file that it is given, as `write_file` does: all of it or no file."""
    try:
        path = Path(os.path.realpath(target))
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "a folder, pipe, socket or device stands there")  # a rename would take its place
        begins = f".{path.name[:40]}."
        # Remove what processes left that were killed while they wrote; what is young may be another one's that writes at this moment
        with suppress(OSError), os.scandir(path.parent) as entries:
            for entry in entries:
                ours = entry.name.startswith(begins) and _RANDOM.fullmatch(entry.name, len(begins))
                if ours and time.time() - entry.stat(follow_symlinks=False).st_mtime > _STALE_S:
                    os.unlink(entry.path)
        temporary = path.with_name(f"{begins}{os.urandom(8).hex()}")
        # Mode of a new file before the process's mask, as open() has it
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # the mask is applied by the system
        try:
            with os.fdopen(handle, "wb") as file:
                with suppress(FileNotFoundError):
                    os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
                put(file)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror or error}", "choose another place") from error


def save_by_suffix(path: str | os.PathLike[str], makers: Mapping[str, Callable[[], bytes]]) -> None:
    """Write what the maker of the suffix of `path` makes; the whole file or none of it.

    Raises UsageError for another suffix, InputError where the file cannot be written.
    """
    target = Path(os.fspath(path))
    maker = makers.get(target.suffix.lower())
    if maker is None:
        raise UsageError(f"{target}: cannot tell the format", f"use one of {', '.join(makers)}")
    write_file(target, maker())
