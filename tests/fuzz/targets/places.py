"""One file that every input in turn is written to, for what reads files."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path


@functools.cache
def folder() -> Path:
    """Return the folder of this process, which goes with it."""
    _KEPT.append(tempfile.TemporaryDirectory(prefix="gpudiag-fuzz-"))
    return Path(_KEPT[0].name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def written(name: str, data: bytes) -> Path:
    """Return the path of the file `name`, which now holds `data`."""
    path = folder() / name
    path.write_bytes(data)
    return path
