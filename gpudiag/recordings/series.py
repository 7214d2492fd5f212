"""The files of `gpudiag ab` in a folder: which there are, and whether the one that writes still lives."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from gpudiag.bundle.layout import EXPERIMENTS_FOLDER
from gpudiag.files import is_locked, open_file
from gpudiag.model.bundle import UNREADABLE

PATIENCE_S = 600.0
"""A series of a version without locks that has written nothing for so long was ended, or measures something very slow: a pair takes a
minute or two."""

_HEAD_BYTES = 1 << 20


class SeriesHead(msgspec.Struct, frozen=True):
    """What the first row of a series says, as far as a list of recordings shows it."""

    command: tuple[str, ...] = ()
    locked: bool = False
    """Whether the process that writes it holds the lock of the file."""


class FoundSeries(NamedTuple):
    """The newest series of a folder."""

    status: Literal["live", "finished", "damaged"]
    command: tuple[str, ...]
    begun_unix_ns: int


def find_series(folder: Path) -> FoundSeries | None:
    """Find the newest series in `folder`/experiments; None where there is none. Links are not followed."""
    place = folder / EXPERIMENTS_FOLDER
    try:
        if place.is_symlink():
            return None
        there = [path for path in place.iterdir() if path.suffix in (".json", ".jsonl") and not path.is_symlink()]
    except OSError:
        return None
    names = sorted({path.stem for path in there})
    if not names:
        return None
    rows, result = place / f"{names[-1]}.jsonl", place / f"{names[-1]}.json"
    written, ended = _read_time(rows), _read_time(result)
    status: Literal["live", "finished", "damaged"] = "damaged"
    if ended and ended >= written:
        status = "finished"
    elif is_alive(rows, written):
        status = "live"
    return FoundSeries(status, read_head(rows).command, min(filter(None, (written, ended)), default=0))


def is_alive(rows: Path, changed_unix_ns: int) -> bool:
    """Return whether the process that writes the series `rows`, last at `changed_unix_ns`, still runs."""
    held = is_locked(rows)
    if held is not None and (held or read_head(rows).locked):
        return held
    return time.time() - changed_unix_ns / 1e9 < PATIENCE_S


def read_head(rows: Path) -> SeriesHead:
    """Read the first row of a series; an empty one where it cannot be read."""
    with suppress(OSError, *UNREADABLE), open_file(rows) as file:
        return msgspec.json.decode(file.readline(_HEAD_BYTES), type=SeriesHead)
    return SeriesHead()


def _read_time(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0
