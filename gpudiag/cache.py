"""What is kept of large recordings, so that the second look at one takes a second: tables, reports, summaries of ranks, measured steps.

    ~/.cache/gpudiag/recordings/<recording>/<kind>/<subject>/<key>.zip

An entry is a file that appears whole, by a rename, or not at all. Its key is a digest of all that it was made from: the content of the
recordings, the rules, the measured peaks, gpudiag itself, and what was asked. So nothing is ever updated, and two equal keys mean an equal
result; whoever is not sure gets None. Never fails: what cannot be read is made anew, what cannot be written is not kept.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import os
import re
import stat
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import msgspec

from gpudiag.capture.bundle_folder import is_bundle
from gpudiag.document_cache import find_cache_folder
from gpudiag.hardware.peaks_cache import find_peaks_folder
from gpudiag.model.report import ReportData

NO_CACHE = "GPUDIAG_NO_CACHE"
"""Environment variable: 1 keeps nothing and uses nothing that was kept, in this process and in those that it starts."""

MIN_TEXT_BYTES = 32_000_000
"""Uncompressed size from which something is kept: what is smaller is read in the time that starting takes."""

WHOLE_FOLDER = "all"
"""Subject of what is made from all of a bundle or folder."""

MOST_BYTES = 8 << 30
"""Of all entries together; those that were used longest ago go first. The tables of the largest trace that is read at all
(trace.decompression.MAX_TEXT_BYTES) take 1.2 GB."""

_STALE_S = 3600.0
"""Age at which a file that was not finished is of a process that died."""
_DAMAGED = (OSError, ValueError, KeyError, EOFError, RuntimeError, OverflowError, zipfile.BadZipFile, zlib.error)

EntryKind = Literal["tables", "report", "rank", "measured"]


class Slot(NamedTuple):
    """Where one entry lies: folder of the recording, what it is, of which file (or WHOLE_FOLDER), digest of all that goes into it."""

    place: Path
    kind: str
    subject: str
    key: str

    @property
    def path(self) -> Path:
        """The file of the entry; beside it lie all others of this kind and subject."""
        return self.place / self.kind / self.subject / f"{self.key}.zip"


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


def find_place(path: str | Path) -> Path | None:
    """Find where entries of a bundle, a trace in one, a trace file or a folder of ranks lie. It may not exist.

    None for a URL, what cannot be looked into, and where there is no home folder.
    """
    root, recording = find_cache_folder(), Path(os.path.abspath(path))
    if root is None or "://" in str(path):
        return None
    try:
        if recording.parent.name == "trace" and is_bundle(recording.parent.parent):
            recording = recording.parent.parent
        elif not recording.is_dir():
            recording = recording.parent
    except OSError:  # a name that is too long, a folder that may not be looked into
        return None
    return root / "recordings" / f"{recording.name[:40]}-{digest_values(str(recording))}"


def load_entry(slot: Slot) -> dict[str, bytes] | None:
    """Load the files of an entry; None where there is none, or where anything about it is not as it was written."""
    with suppress(*_DAMAGED):
        with zipfile.ZipFile(slot.path) as entry:
            found = {name: entry.read(name) for name in entry.namelist()}
        os.utime(slot.path)
        return found
    return None


def store_entry(slot: Slot, files: Iterable[tuple[str, bytes]]) -> bool:
    """Keep an entry of the files that the iterator yields one after the other; return whether it is there. Never raises OSError."""
    try:
        slot.path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=slot.path.parent, prefix=".")  # only its user may read it
        try:
            with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w") as entry:
                for name, data in files:
                    entry.writestr(name, data)
            os.replace(temporary, slot.path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError:
        return False
    with suppress(OSError):  # another process removes entries too
        _remove_oldest(slot.place.parent)
    return True


def _remove_oldest(root: Path) -> None:
    stats = [(path, path.lstat()) for path in root.glob("*/*/*/*")]
    total = 0
    for path, state in sorted(stats, key=lambda row: row[1].st_mtime, reverse=True):
        total += state.st_size
        dead = path.name.startswith(".") and time.time() - state.st_mtime > _STALE_S
        if total > MOST_BYTES or dead:
            path.unlink(missing_ok=True)


def find_version(package: str) -> str | None:
    """Find the version of an installed package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


QUICK_ABOVE_BYTES = 1 << 30
"""Files of more than this together are told by size, times and their first and last MiB: reading all of them would take seconds."""

TEXT_PER_BYTE = 15
"""Uncompressed bytes of a byte of .gz or .zst, about (real traces: 9 to 30). Decides only what is worth while."""

_END_BYTES = 1 << 20
_SETTLED_S = 2.0
"""A file that changed less than this before it was read may change again without a new time stamp (git: racy-git documentation)."""
_TRACE = re.compile(r"\.(json|json\.gz|json\.zst|sqlite)$", re.IGNORECASE)
_COMPRESSED = re.compile(r"\.(gz|zst)$", re.IGNORECASE)
_OF_RANK = re.compile(r"rank(\d{1,9})")
_REPORT = re.compile(r"report\.(json|html|md)")
"""What reports are saved as in a bundle; no report is made from them."""

_KNOWN_DIGESTS: dict[tuple[str, int, int, int, int, int], str] = {}
"""Digests of this process by path, device, inode, size, and times of change: a file is read once however often it is asked for."""


def digest_file(path: Path, *, quick: bool = False) -> str | None:
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
                return digest_values("quick", *times, head, file.read(_END_BYTES))
            name = (os.path.abspath(path), before.st_dev, before.st_ino, *times)
            if name not in _KNOWN_DIGESTS:
                found = _digest_bytes(iter(lambda: file.read(1 << 20), b""))
                if time.time() - max(before.st_mtime_ns, before.st_ctime_ns) / 1e9 < _SETTLED_S:
                    return found
                _KNOWN_DIGESTS[name] = found
            return _KNOWN_DIGESTS[name]
    except (OSError, ValueError):  # ValueError: a name with a zero byte
        return None


def _digest_bytes(pieces: Iterable[bytes]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


def digest_values(*parts: object) -> str:
    """Return the digest of values, told apart by kind and length: bytes as they are, all else by its repr()."""
    pieces = [b"b" + part if isinstance(part, bytes) else repr(part).encode("utf-8", "surrogatepass") for part in parts]
    return _digest_bytes(piece for each in pieces for piece in (len(each).to_bytes(8, "little"), each))


def digest_recordings(paths: Iterable[Path], rank: int | None = None) -> str | None:
    """Return the digest of recordings: files, bundles, folders of ranks; None where one of them cannot be read.

    `rank`: files of a bundle whose names say that they are of another rank do not count.
    """
    try:
        found = [(str(index), *each) for index, path in enumerate(paths) for each in _list_report_inputs(path, rank)]
        quick = sum(path.stat().st_size for _, _, path in found) > QUICK_ABOVE_BYTES
    except (OSError, ValueError):
        return None
    if not found or len(found) > 20_000:
        return None
    return _digest_named_files((index, name, digest_file(path, quick=quick)) for index, name, path in found)


def _digest_named_files(found: Iterable[tuple[str, str, str | None]]) -> str | None:
    entries = sorted(found)
    return None if any(content is None for *_, content in entries) else digest_values(entries)


def _list_report_inputs(path: Path, rank: int | None) -> list[tuple[str, Path]]:
    """List (name, file) of what a report on `path` is made from. Links are not followed, as the readers of a bundle do not follow them."""
    if not path.is_dir():
        if path.exists() or not glob.has_magic(str(path)):
            return [(path.name, path)]
        return [(name, Path(name)) for name in glob.glob(str(path), recursive=True) if os.path.isfile(name)]
    if not is_bundle(path):
        return [(child.name, child) for child in path.iterdir() if _TRACE.search(child.name) and child.is_file()]
    found = []
    for folder, _, names in os.walk(path):
        for child in (Path(folder, one) for one in names):
            name = child.relative_to(path).as_posix()
            ours = rank is None or all(int(number) == rank for number in _OF_RANK.findall(name))
            if ours and not _REPORT.fullmatch(name) and not child.is_symlink():
                found.append((name, child))
    return found


def estimate_text_bytes(paths: Iterable[Path]) -> int:
    """Estimate about how much text the traces of recordings hold, in bytes, from their sizes alone; 0 where they cannot be read."""
    total = 0
    for path in paths:
        try:
            for name, file in _list_report_inputs(path, None):
                if _TRACE.search(name):
                    total += file.stat().st_size * (TEXT_PER_BYTE if _COMPRESSED.search(name) else 1)
        except (OSError, ValueError):
            continue
    return total


def digest_rule_files(folders: Iterable[str]) -> str | None:
    """Return the digest of the rule files below `folders`; None where one cannot be read."""
    found = [(folder, path.as_posix(), path) for folder in folders if folder.strip() for path in sorted(Path(folder).rglob("*.yaml"))]
    return _digest_named_files((folder, name, digest_file(path)) for folder, name, path in found)


@functools.cache
def digest_code() -> str:
    """Return the digest of what computes: versions of gpudiag, Python and libraries; names, sizes and times of gpudiag's own files.

    Versions as installed: to import polars and numpy for them would take most of the time in which a kept report is shown.
    """
    libraries = (sys.version, *(find_version(name) for name in ("gpudiag", "polars", "numpy", "msgspec")))
    sources = (row for package in ("gpudiag", "gpudiag_rules") for row in list_sources(str(files(package))))
    return digest_values(libraries, sorted(sources))


def list_sources(folder: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, size and time of change (ns) of the files below `folder`, without byte code."""
    for place, _, names in os.walk(folder):
        for path in (os.path.join(place, name) for name in names if not name.endswith(".pyc")):
            found = os.stat(path)
            yield os.path.relpath(path, folder), found.st_size, found.st_mtime_ns


def digest_peaks() -> str | None:
    """Return the digest of all measured peaks that are kept for reports on this machine; None where one cannot be read."""
    folder = find_peaks_folder()
    found = sorted(folder.glob("*.json")) if folder is not None else []
    return _digest_named_files((path.name, "", digest_file(path)) for path in found)


Result = TypeVar("Result")

_DATA_FILE = "data"


class ResultKey(NamedTuple):
    """What a result was made from."""

    kind: EntryKind
    paths: tuple[str | Path, ...]
    """Everything that was read: traces, bundles, folders of ranks. The result is kept as one of the first one."""
    asked: tuple[object, ...] = ()
    """Whatever else the result depends on, told apart by its repr()."""
    rank: int | None = None
    """Of bundles: files whose names say that they are of another rank do not count. None: all files count."""
    rules: tuple[str, ...] = ()
    """Folders of rules besides the built-in ones."""


class CachedResult:
    """Where the result of `key` is kept. Nothing is looked up or kept for small recordings, and for URLs."""

    def __init__(self, key: ResultKey) -> None:
        self._key = key
        self._slot = _find_slot(key)

    def load(self, kind: type[Result]) -> Result | None:
        """Load the result, a struct or bytes; None where none is kept."""
        files = None if self._slot is None else load_entry(self._slot)
        if files is not None:
            with suppress(KeyError, ValueError, RecursionError, msgspec.MsgspecError):  # written by somebody else
                return msgspec.msgpack.decode(files[_DATA_FILE], type=kind)
        return None

    def store(self, result: msgspec.Struct | bytes) -> None:
        """Keep the result, unless the recording has changed while it was made."""
        if self._slot is not None and _find_slot(self._key) == self._slot:
            store_entry(self._slot, [(_DATA_FILE, msgspec.msgpack.encode(result))])


def _find_slot(key: ResultKey) -> Slot | None:
    if is_switched_off() or not key.paths or any("://" in str(path) for path in key.paths):
        return None
    paths = [Path(path) for path in key.paths]
    place = find_place(paths[0])
    if place is None or estimate_text_bytes(paths) < MIN_TEXT_BYTES:
        return None
    made_from = (digest_recordings(paths, key.rank), digest_rule_files(key.rules), digest_peaks(), digest_code())
    if None in made_from:
        return None
    asked = (*key.asked, key.rank, *((str(path), os.path.abspath(path)) for path in paths))  # results may name where they were read
    subject = paths[0].name if paths[0].is_file() else WHOLE_FOLDER
    return Slot(place, key.kind, subject, digest_values(*made_from, *asked))


def is_complete(report: ReportData) -> bool:
    """Return whether every rank could be read: one that could not, such as on a worker that was killed, may be readable next time."""
    return not any(row.unread for row in report.ranks or ())
