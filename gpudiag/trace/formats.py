"""Which reader a file needs: told by its first bytes, never by its name."""

from __future__ import annotations

from pathlib import Path

from gpudiag.errors import InputError
from gpudiag.model.trace import Trace
from gpudiag.trace import nsys, reader
from gpudiag.trace.nsys.database import MAGIC
from gpudiag.trace.source import shown

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
    return nsys.read(source) if is_sqlite(source) else reader.read(path)


def is_sqlite(path: str) -> bool:
    """Return whether the file at `path` is an SQLite database; False where it cannot be read (the reader says why)."""
    if "://" in path:
        return False
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False
