"""A folder of traces, one a rank: which file belongs to which rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
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
    by_name = {path.name: path for path in inside}
    names = traces_among(by_name)
    if not names:
        raise InputError(
            f"{folder}: no trace in this folder",
            "give a .json, .json.gz or .json.zst trace, an SQLite export of Nsight Systems, or a bundle of gpudiag.profile",
        )
    files = [by_name[name] for name in names]
    for ranks in (*(_told(_after_word(names, pattern)) for pattern in _RANK), _only_difference(names)):
        if len(set(ranks)) == len(files):
            return dict(sorted(zip(ranks, files, strict=True)))
    return dict(enumerate(files))


def traces_among(names: Iterable[str]) -> list[str]:
    """Return those of `names` that are traces, by their numbers ('r2' before 'r10'); exports of Nsight Systems where there is no other."""
    known = list(names)
    found = [name for name in known if _TRACE.search(name)] or [name for name in known if _EXPORT.search(name)]
    return sorted(found, key=_pieces)


def is_trace_name(name: str) -> bool:
    """Return whether `name` ends as traces and exports of Nsight Systems do."""
    return bool(_TRACE.search(name) or _EXPORT.search(name))


def ranks_by_name(names: Sequence[str]) -> tuple[tuple[int | None, ...], bool]:
    """Return the rank that each of `names` (paths with '/') tells, and whether it stands there in words.

    The number after 'rank' or 'worker', where at least half of the names have it (None for the others; a number may stand there twice);
    else the one number in which the names differ; else None for all.
    """
    for pattern in _RANK:
        found = _after_word(names, pattern)
        if found.count(None) * 2 <= len(names) and set(found) != {None}:
            return tuple(found), True
    return tuple(_only_difference(names)) or (None,) * len(names), False


def _pieces(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts names by their texts and, as numbers, by their numbers: 'r2' before 'r10'."""
    return [(0, int(piece), piece) if piece.isdecimal() else (1, 0, piece) for piece in _NUMBER.split(name)]


def _after_word(names: Sequence[str], pattern: re.Pattern[str]) -> list[int | None]:
    """Return the number after the word in each name, of the file before that of its folders; None where there is none."""
    found = [next(filter(None, map(pattern.search, reversed(name.split("/")))), None) for name in names]
    return [int(match.group(1)) if match else None for match in found]


def _told(ranks: list[int | None]) -> list[int]:
    return [rank for rank in ranks if rank is not None]


def _only_difference(names: Sequence[str]) -> list[int]:
    """Return the numbers at the only place where `names` differ; nothing where they differ in more, or where these cannot be ranks."""
    split = [_NUMBER.split(name) for name in names]
    if len({len(pieces) for pieces in split}) > 1:
        return []
    columns = [column for column in zip(*split, strict=True) if len(set(column)) > 1]
    if len(columns) != 1 or not all(piece.isdecimal() and len(piece) < 10 and int(piece) < _LARGEST_RANK for piece in columns[0]):
        return []
    return [int(piece) for piece in columns[0]]
