"""Writing the files of a bundle: each whole or not at all; a trace without its host name, compressed."""

from __future__ import annotations

import errno
import gzip
import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

try:  # here and not in the thread: a DataLoader worker that is forked during an import finds that module locked for ever
    from isal import igzip
except ImportError:  # other processors than x86-64 and arm64
    igzip = None

CHUNK_BYTES = 1 << 18
"""Bytes read at a time when a trace is compressed."""

OVERLAP_BYTES = 1 << 13
"""Bytes kept back between chunks so that a replaced text is never cut in two (PATH_MAX is 4,096)."""

RESERVE_BYTES = 128 << 20
"""A plain trace of a few steps of a large model takes up to about 100 MB: where less is free, none is written beside the training."""

_HOST_NAME = re.compile(rb'("host_name":\s*")[^"\n]*(")')


def write_atomic(path: Path, data: bytes) -> int:
    """Return the bytes written: `path` holds either the old or the new content, never a part. Raises OSError."""
    scratch = path.with_name(f".{path.name}.tmp")
    try:
        with open(scratch, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
    return len(data)


def discard_trace(plain: Path) -> None:
    """Remove what the profiler has written, and the file under whose name Kineto writes it: that one stays where the disk is full.

    Kineto keeps it open then, so that removing its name alone gives no space back.
    """
    for path in (plain, plain.with_name(f"{plain.name}.tmp")):
        with suppress(OSError):
            os.truncate(path, 0)
        with suppress(OSError):
            path.unlink(missing_ok=True)


def export_trace(export: Callable[[Path], None], plain: Path, last_bytes: int) -> int:
    """Return the bytes that export(plain) wrote; `last_bytes`: those of the largest trace so far.

    Raises OSError (ENOSPC) where little space is left, OSError where nothing was written: Kineto fails silently. Then no file is left.
    """
    free, wanted = shutil.disk_usage(plain.parent).free, max(RESERVE_BYTES, 4 * last_bytes)  # with stacks a trace is a few times as large
    if free < wanted:
        raise OSError(errno.ENOSPC, f"only {free >> 20} MB are left, traces are written where {wanted >> 20} MB are")
    try:
        export(plain)
        if plain.exists():
            return plain.stat().st_size
        # A disk with less than this left is full for the profiler, whose file did not fit
        if shutil.disk_usage(plain.parent).free < 1 << 20:
            raise OSError(errno.ENOSPC, "the disk is full")
        raise OSError("the profiler wrote no trace: a limit on the size of files, or a disk that was full for a moment")
    except BaseException:
        discard_trace(plain)
        raise


def compress_trace(source: Path, target: Path, replacements: Sequence[tuple[bytes, bytes]] = ()) -> int:
    """Return the bytes written to `target` (.gz): `source` without its host name and with `replacements` made; removes `source`.

    The profiler writes the machine's name and the path of the export into a trace; neither belongs in a bundle. Raises OSError.
    """
    scratch = target.with_name(f".{target.name}.tmp")
    packer: Any = gzip if igzip is None else igzip
    try:
        with open(source, "rb") as plain, packer.open(scratch, "wb", compresslevel=3 if igzip is None else 2) as packed:
            rest = b""
            while chunk := plain.read(CHUNK_BYTES):
                data = rest + chunk
                for old, new in replacements:
                    data = data.replace(old, new)
                if b'"host_name"' in data:
                    data = _HOST_NAME.sub(rb"\1\2", data)
                packed.write(data[:-OVERLAP_BYTES])
                rest = data[-OVERLAP_BYTES:]
            packed.write(rest)
        descriptor = os.open(scratch, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(scratch, target)
    finally:  # also when the disk is full: a plain trace is ten times the size of a compressed one
        discard_trace(source)
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
    return target.stat().st_size
