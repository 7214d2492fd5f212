"""What is kept between commands, so that the second look at a large recording takes a second: `cache/` in a bundle, else `.gpudiag-cache/`.

    .gpudiag-cache/v1/<kind>/<subject>/<key>/seal.json and the files that it names

An entry is a folder that appears whole, by a rename, or not at all; its seal holds size and checksum of each file. The key is a digest of
everything that the entry was made from (result_cache.py), so nothing is ever updated. Never fails: what cannot be read is made anew, what
cannot be written is not kept. Links are not followed, and nothing that gpudiag did not write is removed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from gpudiag.capture.bundle_folder import is_bundle
from gpudiag.model.bundle import UNREADABLE

CACHE_VERSION = 1
"""Raised when the layout of an entry changes; entries of older versions are removed when a new one is written."""

NO_CACHE = "GPUDIAG_NO_CACHE"
"""Environment variable: 1 keeps nothing and uses nothing that was kept, in this process and in those that it starts."""

BESIDE, IN_BUNDLE = ".gpudiag-cache", "cache"

MIN_TEXT_BYTES = 32_000_000
"""Uncompressed size from which something is kept: what is smaller is read in the time that starting takes."""

WHOLE_FOLDER = "all"
"""Subject of what is made from all of a bundle or folder."""

MOST_ENTRIES = 2
"""Entries of one kind and subject: the present state and the one before, or two ways of asking."""

MAX_ENTRY_BYTES = 2 << 30
"""Largest entry that is read back: the tables of the largest trace that is read at all (trace.decompression.MAX_TEXT_BYTES) take 1.2 GB."""

_SEAL, _MAX_SEAL_BYTES = "seal.json", 1 << 20
_VERSION_FOLDER = re.compile(r"v(\d{1,6})")
_STALE_S = 3600.0
"""Age at which a folder that was not finished is of a process that died."""
_TRIES = 100
"""To remove what others remove at the same time: each makes what is left smaller."""
_READ_ONLY = os.O_RDONLY | sum(getattr(os, flag, 0) for flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
"""Neither through a link nor waiting for the writer of a pipe; not every system has all flags."""
_MARKS = {
    # https://bford.info/cachedir: backup programs leave such folders out
    "CACHEDIR.TAG": "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# Made by gpudiag, may be deleted at any time: gpudiag cache clear PATH\n",
    ".gitignore": "*\n",
}

EntryKind = Literal["tables", "report", "rank", "measured"]


class Slot(NamedTuple):
    """Where one entry lies: the cache folder, what it is, of which file (or WHOLE), and the digest of all that goes into it."""

    place: Path
    kind: EntryKind
    subject: str
    key: str

    @property
    def folder(self) -> Path:
        """The folder of the entry; beside it lie all others of this kind and subject."""
        return self.place / f"v{CACHE_VERSION}" / self.kind / self.subject / self.key


class CachedEntry(NamedTuple):
    """One entry as `gpudiag cache` lists it."""

    kind: str
    subject: str
    path: Path
    size_bytes: int


class _EntryFile(msgspec.Struct, frozen=True):
    """A file of an entry: size in bytes, BLAKE2b digest."""

    size: int
    digest: str


class _Seal(msgspec.Struct, frozen=True):
    files: dict[str, _EntryFile]


def is_switched_off() -> bool:
    """Return whether this process keeps nothing."""
    return os.environ.get(NO_CACHE, "") not in ("", "0")


@contextmanager
def allow_cache(wanted: bool) -> Iterator[None]:
    """Keep nothing inside where `wanted` is False, neither here nor in processes that are started inside."""
    before = os.environ.get(NO_CACHE)
    if not wanted:
        os.environ[NO_CACHE] = "1"
    try:
        yield
    finally:
        if not wanted:
            os.environ.pop(NO_CACHE, None)
            if before is not None:
                os.environ[NO_CACHE] = before


def find_cache_folder(path: str | Path) -> Path | None:
    """Find the cache folder of a bundle, a trace in one, a trace file or a folder of ranks; None for a URL. It may not exist."""
    if "://" in str(path):
        return None
    recording = Path(os.path.abspath(path))
    try:
        for folder in (recording, recording.parent.parent if recording.parent.name == "trace" else recording):
            if is_bundle(folder):
                return folder / IN_BUNDLE
        return (recording if recording.is_dir() else recording.parent) / BESIDE
    except OSError:  # a name that is too long, a folder that may not be looked into
        return None


def load_entry(slot: Slot) -> dict[str, bytes] | None:
    """Load the files of an entry; None where there is none, or where anything about it is not as it was written."""
    with suppress(OSError, *UNREADABLE):
        for level in (slot.folder, *slot.folder.parents[:4]):  # up to the cache folder: none of them may be a link
            _check_folder(level)
        seal = msgspec.json.decode(_read_bytes(slot.folder / _SEAL, _MAX_SEAL_BYTES), type=_Seal)
        if sum(abs(file.size) for file in seal.files.values()) <= MAX_ENTRY_BYTES:
            files = {}
            for name, file in seal.files.items():
                data = b"" if os.path.basename(name) != name else _read_bytes(slot.folder / name, abs(file.size))
                if (len(data), hashlib.blake2b(data, digest_size=16).hexdigest()) != (file.size, file.digest):
                    return None
                files[name] = data
            return files
    return None


def _check_folder(path: Path) -> None:
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(path))


def _read_bytes(path: Path, most: int) -> bytes:
    with open(os.open(path, _READ_ONLY), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is no regular file")
        return file.read(most + 1)


def store_entry(slot: Slot, files: Iterable[tuple[str, bytes]]) -> bool:
    """Keep an entry of the files that the iterator yields one after the other; return whether it is there. Never raises OSError."""
    beside = slot.folder.parent
    temporary = beside / f".{secrets.token_hex(8)}"
    try:
        if not is_writable(slot.place.parent):
            return False
        for level in reversed(slot.folder.parents[:4]):
            with suppress(FileExistsError):
                level.mkdir()
            _check_folder(level)
        for name, text in _MARKS.items():  # also where the process that made the folder was killed before it came to them
            with suppress(FileExistsError), open(slot.place / name, "x") as file:
                file.write(text)
        temporary.mkdir()
        try:
            sealed = {}
            for name, data in files:
                (temporary / name).write_bytes(data)
                sealed[name] = _EntryFile(len(data), hashlib.blake2b(data, digest_size=16).hexdigest())
            (temporary / _SEAL).write_bytes(msgspec.json.encode(_Seal(sealed)))
            # an entry that lies there already was damaged, or another process was faster
            aside = temporary.with_name(f"{temporary.name}-old")
            with suppress(FileNotFoundError):
                os.rename(slot.folder, aside)
            if aside.is_symlink() or aside.is_file():
                aside.unlink()
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(temporary, slot.folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        # all but the newest entries, what processes left that died, and entries of older versions
        entries = sorted(((path.lstat().st_mtime_ns, path) for path in beside.iterdir()), reverse=True)
        ready = [path for _, path in entries if not path.name.startswith(".")]
        dead = [path for when, path in entries if path.name.startswith(".") and time.time() - when / 1e9 > _STALE_S]
        older = [path for path, version in _list_versions(slot.place).items() if version < CACHE_VERSION]
        for path in (*ready[MOST_ENTRIES:], *dead, *older):
            shutil.rmtree(path, ignore_errors=True)
    except OSError:
        return False
    return True


def is_writable(folder: Path) -> bool:
    """Return whether this process may write into `folder`; False where it is read-only for all, though root could write. Raises OSError."""
    return bool(folder.stat().st_mode & 0o222) and os.access(folder, os.W_OK)


def _list_versions(place: Path) -> dict[Path, int]:
    found = {path: _VERSION_FOLDER.fullmatch(path.name) for path in _list_folders([place])}
    return {path: int(match[1]) for path, match in found.items() if match}


def _list_folders(inside: Iterable[Path]) -> list[Path]:
    """List the folders in each of `inside`; neither `inside` nor they may be links. Raises OSError, not for what is removed meanwhile."""
    found: list[Path] = []
    for folder in inside:
        if folder.is_dir() and not folder.is_symlink():
            with suppress(FileNotFoundError):
                found += [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    return sorted(found)


def list_entries(place: Path, subject: str | None = None) -> tuple[CachedEntry, ...]:
    """List what is kept in a cache folder, of all versions; `subject`: of this file alone. Empty where it cannot be read."""
    kept = []
    with suppress(OSError):
        for folder in _list_folders(_list_folders(_list_folders(_list_versions(place)))):
            size = 0
            with suppress(FileNotFoundError):  # another process is removing it
                for path in folder.rglob("*"):
                    size += path.lstat().st_size if path.is_file() else 0
            if subject in (None, folder.parent.name):
                kept.append(CachedEntry(folder.parent.parent.name, folder.parent.name, folder, size))
        return tuple(kept)
    return ()


def clear_cache(place: Path, subject: str | None = None) -> int:
    """Remove what is kept in a cache folder, `subject`: of this file alone; return the bytes that this freed. Raises OSError."""
    kept = list_entries(place, subject)
    for one in kept:
        for _ in range(_TRIES):
            with suppress(FileNotFoundError):
                shutil.rmtree(one.path)
            if not os.path.lexists(one.path):
                break
        for empty in one.path.parents[:3]:
            with suppress(OSError):
                empty.rmdir()
    with suppress(FileNotFoundError):
        if not place.is_symlink() and place.is_dir() and {path.name for path in place.iterdir()} <= set(_MARKS):
            shutil.rmtree(place)
    return sum(one.size_bytes for one in kept)
