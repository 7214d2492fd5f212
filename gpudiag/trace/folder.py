"""A folder of traces, one a rank: which file belongs to which rank."""

from __future__ import annotations

import re
from pathlib import Path

from gpudiag.errors import InputError

_TRACE = re.compile(r"\.json(\.gz|\.zst)?$", re.IGNORECASE)
_EXPORT = re.compile(r"\.sqlite$", re.IGNORECASE)
"""Exports of Nsight Systems; taken where a folder holds no other trace."""
_RANK = (re.compile(r"rank[-_ ]?(\d{1,9})", re.IGNORECASE), re.compile(r"worker[-_ ]?(\d{1,9})", re.IGNORECASE))
_NUMBER = re.compile(r"(\d+)")
_LARGEST_RANK = 10**6
"""Numbers beyond are process ids or times, no ranks."""


def rank_files(folder: Path) -> dict[int, Path]:
    """Return the trace files of `folder` by rank.

    The rank is the number after 'rank' or 'worker' in the name, else the one number in which the names differ, else their order.
    Raises InputError where the folder cannot be read or holds no trace.
    """
    try:
        inside = [path for path in folder.iterdir() if path.is_file()]
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror})", "check the path and its permissions") from error
    files = [path for path in inside if _TRACE.search(path.name)] or [path for path in inside if _EXPORT.search(path.name)]
    if not files:
        raise InputError(
            f"{folder}: no trace in this folder",
            "give a .json, .json.gz or .json.zst trace, an SQLite export of Nsight Systems, or a bundle of gpudiag.profile",
        )
    files.sort(key=lambda path: _pieces(path.name))
    names = [path.name for path in files]
    for ranks in (*(_after_word(names, pattern) for pattern in _RANK), _only_difference(names)):
        if len(set(ranks)) == len(files):
            return dict(sorted(zip(ranks, files, strict=True)))
    return dict(enumerate(files))


def _pieces(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts names by their texts and, as numbers, by their numbers: 'r2' before 'r10'."""
    return [(0, int(piece), piece) if piece.isdecimal() else (1, 0, piece) for piece in _NUMBER.split(name)]


def _after_word(names: list[str], pattern: re.Pattern[str]) -> list[int]:
    found = [pattern.search(name) for name in names]
    return [int(match.group(1)) for match in found if match]


def _only_difference(names: list[str]) -> list[int]:
    """Return the numbers at the only place where `names` differ; nothing where they differ in more, or where these cannot be ranks."""
    split = [_NUMBER.split(name) for name in names]
    if len({len(pieces) for pieces in split}) > 1:
        return []
    columns = [column for column in zip(*split, strict=True) if len(set(column)) > 1]
    if len(columns) != 1 or not all(piece.isdecimal() and len(piece) < 10 and int(piece) < _LARGEST_RANK for piece in columns[0]):
        return []
    return [int(piece) for piece in columns[0]]
