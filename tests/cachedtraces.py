"""Helpers of the tests of what is kept between commands; the fixture `keeping` stands in conftest.py."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from gpudiag import cache

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


def list_entries(place: Path, subject: str | None = None) -> dict[cache.Slot, int]:
    """List what is kept of a recording, with the size in bytes; `subject`: of this file alone."""
    sizes = {}
    for path in sorted(place.glob("*/*/[!.]*.zip")):
        with suppress(OSError):  # another process is removing it
            sizes[cache.Slot(place, path.parent.parent.name, path.parent.name, path.stem)] = path.stat().st_size
    return {slot: size for slot, size in sizes.items() if subject in (None, slot.subject)}


def clear_entries(place: Path, subject: str | None = None) -> int:
    """Remove what is kept of a recording, `subject`: of this file alone; return the bytes that this freed. Raises OSError."""
    sizes = list_entries(place, subject)
    for slot in sizes:
        slot.path.unlink(missing_ok=True)
        for empty in slot.path.parents[:3]:
            with suppress(OSError):
                empty.rmdir()
    return sum(sizes.values())
