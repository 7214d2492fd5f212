"""Digests of what a result was made from: files by content, the program by its sources, measured peaks.

Two equal digests mean an equal result. Whoever is not sure gets None, and nothing is kept.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path

from gpudiag.api.cache import BESIDE, IN_BUNDLE
from gpudiag.api.installed import version
from gpudiag.capture.folder import is_bundle
from gpudiag.hardware.peaks_cache import peaks_folder

QUICK_ABOVE_BYTES = 1 << 30
"""Files of more than this together are told by size, times and their first and last MiB: reading all of them would take seconds."""

TEXT_PER_BYTE = 15
"""Uncompressed bytes of a byte of .gz or .zst, about (real traces: 9 to 30). Only decides whether keeping is worth while."""

_END_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20
_SETTLED_S = 2.0
"""A file that changed less than this before it was read may change again without a new time stamp (git: racy-git documentation)."""
_MOST_FILES = 20_000
_TRACE = re.compile(r"\.(json|json\.gz|json\.zst|sqlite)$", re.IGNORECASE)
_COMPRESSED = re.compile(r"\.(gz|zst)$", re.IGNORECASE)
_OF_RANK = re.compile(r"rank(\d{1,9})")
_REPORT = re.compile(r"report\.(json|html|md)")
"""What reports are saved as in a bundle; no report is made from them."""

_KNOWN: dict[tuple[str, int, int, int, int, int], str] = {}
"""Digests of this process by path, device, inode, size, and times of change: a file is read once however often it is asked for."""


def of_file(path: Path, *, quick: bool = False) -> str | None:
    """Return the digest of a file's bytes; None where it cannot be read or is no regular file.

    `quick`, and beyond QUICK_ABOVE_BYTES always: of its size, its times of change and its first and last MiB.
    """
    try:
        before = path.stat()
        if not stat.S_ISREG(before.st_mode):
            return None
        times = (before.st_size, before.st_mtime_ns, before.st_ctime_ns)
        with path.open("rb") as file:
            if quick or before.st_size > QUICK_ABOVE_BYTES:
                head = file.read(_END_BYTES)
                file.seek(max(0, before.st_size - _END_BYTES))
                return digest("quick", *times, head, file.read(_END_BYTES))
            name = (os.path.abspath(path), before.st_dev, before.st_ino, *times)
            if name not in _KNOWN:
                found = _of_bytes(iter(lambda: file.read(_PIECE_BYTES), b""))
                if time.time() - max(before.st_mtime_ns, before.st_ctime_ns) / 1e9 < _SETTLED_S:
                    return found
                _KNOWN[name] = found
            return _KNOWN[name]
    except (OSError, ValueError):  # ValueError: a name with a zero byte
        return None


def _of_bytes(pieces: Iterable[bytes]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


def digest(*parts: object) -> str:
    """Return the digest of values, told apart by kind and length: bytes as they are, all else by its repr()."""
    pieces = [b"b" + part if isinstance(part, bytes) else repr(part).encode("utf-8", "surrogatepass") for part in parts]
    return _of_bytes(piece for each in pieces for piece in (len(each).to_bytes(8, "little"), each))


def recordings(paths: Iterable[Path], rank: int | None = None) -> str | None:
    """Return the digest of recordings: files, bundles, folders of ranks; None where one of them cannot be read.

    `rank`: files of a bundle whose names say that they are of another rank do not count.
    """
    try:
        found = [(str(index), *each) for index, path in enumerate(paths) for each in _files(path, rank)]
        quick = sum(path.stat().st_size for _, _, path in found) > QUICK_ABOVE_BYTES
    except (OSError, ValueError):
        return None
    if not found or len(found) > _MOST_FILES:
        return None
    return _together((index, name, of_file(path, quick=quick)) for index, name, path in found)


def _together(found: Iterable[tuple[str, str, str | None]]) -> str | None:
    """Return the digest of files with their names; None where one of them could not be read."""
    entries = sorted(found)
    return None if any(content is None for *_, content in entries) else digest(entries)


def _files(path: Path, rank: int | None) -> list[tuple[str, Path]]:
    """Return the files that a report on `path` rests on, each with its name in there."""
    if not path.is_dir():
        return [(path.name, path)] if path.exists() or not glob.has_magic(str(path)) else _matching(str(path))
    if is_bundle(path):
        inside = [(child.relative_to(path).as_posix(), child) for child in _below(path)]
        return [(name, child) for name, child in inside if not _REPORT.fullmatch(name) and _counts(name, rank)]
    return [(child.name, child) for child in path.iterdir() if _TRACE.search(child.name) and child.is_file()]


def _matching(pattern: str) -> list[tuple[str, Path]]:
    return [(name, Path(name)) for name in glob.glob(pattern, recursive=True) if os.path.isfile(name)]


def _counts(name: str, rank: int | None) -> bool:
    return rank is None or all(int(found) == rank for found in _OF_RANK.findall(name))


def _below(bundle: Path) -> Iterator[Path]:
    """Yield the files of a bundle but for what is kept in it. Links are not followed, as its readers do not follow them."""
    for folder, below, names in os.walk(bundle):
        if Path(folder) == bundle:
            below[:] = [name for name in below if name != IN_BUNDLE]
        below[:] = [name for name in below if name != BESIDE]
        yield from (path for name in names if not (path := Path(folder, name)).is_symlink())


def text_bytes(paths: Iterable[Path]) -> int:
    """Return about how much text the traces of recordings hold, in bytes, from their sizes alone; 0 where they cannot be read."""
    total = 0
    for path in paths:
        try:
            for name, file in _files(path, None):
                if _TRACE.search(name):
                    total += file.stat().st_size * (TEXT_PER_BYTE if _COMPRESSED.search(name) else 1)
        except (OSError, ValueError):
            continue
    return total


def rule_files(folders: Iterable[str]) -> str | None:
    """Return the digest of the rule files below `folders`; None where one cannot be read."""
    found = [(folder, path.as_posix(), path) for folder in folders if folder.strip() for path in sorted(Path(folder).rglob("*.yaml"))]
    return _together((folder, name, of_file(path)) for folder, name, path in found)


@cache
def code() -> str:
    """Return the digest of what computes: versions of gpudiag, Python and libraries; names, sizes and times of gpudiag's own files.

    Versions as installed: to import polars and numpy for them would take most of the time in which a kept report is shown.
    """
    libraries = (sys.version, *(version(name) for name in ("gpudiag", "polars", "numpy", "msgspec")))
    return digest(libraries, sorted(entry for package in ("gpudiag", "gpudiag_rules") for entry in _sources(str(files(package)))))


def _sources(folder: str) -> Iterator[tuple[str, int, int]]:
    for place, _, names in os.walk(folder):
        for name in names:
            if not name.endswith(".pyc"):
                found = os.stat(os.path.join(place, name))
                yield os.path.relpath(os.path.join(place, name), folder), found.st_size, found.st_mtime_ns


def peaks() -> str | None:
    """Return the digest of all measured peaks that are kept for reports on this machine; None where one cannot be read."""
    folder = peaks_folder()
    found = sorted(folder.glob("*.json")) if folder is not None else []
    return _together((path.name, "", of_file(path)) for path in found)
