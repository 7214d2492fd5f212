"""Helpers of the tests of what is kept between commands; the fixture `keeping` stands in conftest.py."""

from __future__ import annotations

import os
from pathlib import Path

from gpudiag.api import cache

LONG_AGO_S = 100.0


def settled(path: Path) -> Path:
    """Return `path`, whose file was last written long ago: its digest need not be made twice."""
    when = path.stat().st_mtime - LONG_AGO_S
    os.utime(path, (when, when))
    return path


def entries(path: Path, kind: str = "*") -> list[Path]:
    """Return the entries of a recording."""
    place = cache.find_place(path)
    return sorted(place.glob(f"{kind}/*/[!.]*")) if place else []
