"""Which reader a file needs: told by its first bytes, never by its name."""

from __future__ import annotations

from pathlib import Path

from gpudiag.errors import InputError
from gpudiag.files import open_file
from gpudiag.model.trace import Trace
from gpudiag.trace import reader
from gpudiag.trace.snapshot import is_old_pickle, is_pickle
from gpudiag.trace.source import shown

_SQLITE = b"SQLite format 3\0"
"""The first bytes of every SQLite file (https://www.sqlite.org/fileformat.html)."""

_NSYS_REPORTS = (".nsys-rep", ".qdrep")
"""Nsight Systems' own format, which is not documented (.qdrep before 2021.4)."""


def read(path: str | Path) -> Trace:
    """Return the tables of a trace of PyTorch's profiler or of an SQLite export of Nsight Systems.

    Raises InputError where it is neither, or cannot be used.
    """
    source = str(path)
    if source.lower().endswith(_NSYS_REPORTS):
        message = f"{shown(source)} is a report in Nsight Systems' own format"
        raise InputError(message, f"export it: nsys export --type sqlite {shown(source)}")
    if "://" not in source:
        _check_no_pickle(Path(source))
    if not is_sqlite(source):
        return reader.read(path)
    from gpudiag.trace import nsys

    return nsys.read(source)


def _check_no_pickle(path: Path) -> None:
    """Raise InputError where the file is a pickle: what is pickled beside traces are snapshots of the CUDA allocator."""
    name = shown(str(path))
    if is_pickle(path):
        raise InputError(f"{name} is a pickle, not a trace", f"a snapshot of the CUDA allocator is read by: gpudiag memory {name}")
    if is_old_pickle(path):
        message = f"{name} is a pickle of protocol 0 or 1, which is not read"
        raise InputError(message, "write the snapshot with torch.cuda.memory._dump_snapshot, then: gpudiag memory PATH")


def is_sqlite(path: str) -> bool:
    """Return whether the file at `path` is an SQLite database; False where it cannot be read (the reader says why)."""
    if "://" in path:
        return False
    try:
        with open_file(path) as file:
            return file.read(len(_SQLITE)) == _SQLITE
    except (OSError, ValueError):
        return False
