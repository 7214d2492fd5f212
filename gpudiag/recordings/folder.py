"""What a folder holds that can be looked at: bundles, traces, folders of ranks; told from manifests and first bytes alone."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Literal

import msgspec

from gpudiag.bundle.layout import EXPERIMENTS_FOLDER, is_bundle, list_manifests
from gpudiag.bundle.manifest import read_manifest
from gpudiag.bundle.segments import SUFFIXES, NotASegmentError, count_rows
from gpudiag.errors import InputError
from gpudiag.model.bundle import Manifest
from gpudiag.recordings.live import estimate_patience_s
from gpudiag.recordings.series import FoundSeries, find_series
from gpudiag.trace.decompression import read_text_blocks

RecordingStatus = Literal["live", "finished", "damaged", "unreadable"]

MOST_DEPTH = 5
"""Folders below the one that was given: bundles lie in runs/<time>, at most a few deeper."""

MOST_ENTRIES = 1_000
"""Recordings listed; whoever has more names a folder further down."""

HEAD_BYTES = 1 << 16
"""Text of a file that is looked at to tell whether it is a trace."""

KILLED = "the run was killed, or stopped writing: what it had written until then can be read"

ABANDONED = "it was ended without a result: gpudiag ab --resume goes on"

_LONGEST_PROGRAM = 400

_TRACE_NAME = re.compile(r"\.(json|json\.gz|json\.zst|sqlite)$", re.IGNORECASE)
_RANK_NAME = re.compile(r"(?:rank|worker)[-_ ]?(\d{1,9})", re.IGNORECASE)
_SIGNS = (b'"traceEvents"', b'"deviceProperties"', b'"schemaVersion"')
"""One of these stands at the head of what Kineto and other writers of Chrome traces write as an object."""
_SQLITE = b"SQLite format 3\0"
_CHANGING = ("trace", "memory", "inductor", EXPERIMENTS_FOLDER)
"""Folders of a bundle whose files a report rests on; telemetry and steps grow all the time while a run records."""


class Entry(msgspec.Struct, frozen=True):
    """One recording. Unknown is None, and `note` says why where something is wrong."""

    name: str
    """Path below the folder, with '/' on every system; '.' where that folder is the recording itself."""
    kind: Literal["bundle", "trace", "folder", "experiments"]
    """experiments: results of `gpudiag ab -o DIR`, without a recording."""
    status: RecordingStatus
    steps: int | None = None
    """All steps of the run, also the unprofiled; of a bundle only."""
    device: str | None = None
    created_unix_ns: int | None = None
    size_bytes: int = 0
    ranks: int = 1
    note: str = ""
    program: str = ""
    """The recorded program and its arguments; '' where they are not known without reading more."""


Stamp = tuple[int, int]
"""Time of the last change in ns, and size: what changes when a file does."""


class Lister:
    """Lists a folder; what was read of a file is kept until the file changes."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._known: dict[Path, tuple[Stamp, object]] = {}
        self._finished: dict[Path, tuple[Path, Stamp, Stamp, Entry]] = {}
        """Of each finished bundle its first manifest, the stamps of that and of the folder, and what was found: nothing is read again."""

    def entries(self) -> tuple[Entry, ...]:
        """Return the recordings below the folder, the newest first; at most MOST_ENTRIES. Links are not followed."""
        found = list(islice(self._walk(self.root, MOST_DEPTH), MOST_ENTRIES))
        return tuple(sorted(found, key=lambda entry: (-(entry.created_unix_ns or 0), entry.name)))

    def _walk(self, folder: Path, depth: int) -> Iterator[Entry]:
        if folder in self._finished:
            manifest, *stamps, entry = self._finished[folder]
            with suppress(OSError):
                if [_read_stamp(manifest), _read_stamp(folder)] == stamps:
                    yield entry
                    return
        if is_bundle(folder):
            inside, found = [], [folder]
        elif (series := find_series(folder)) is not None:
            yield from self._read_series(folder, series)
            inside, found = [child for child in _list_children(folder) if child.name != EXPERIMENTS_FOLDER], []
        else:
            inside = _list_children(folder)
            found = _select_traces(inside)
            # several traces, each named by another rank, and nothing else beside them: the ranks of one run
            numbers = [match.group(1) for path in found if (match := _RANK_NAME.search(path.name))]
            if len(found) > 1 and len(set(numbers)) == len(found) and len({_RANK_NAME.sub("", path.name) for path in found}) == 1:
                found = [folder]
        for path in found:
            read = self._read_entry(path)
            if read is not None:
                yield read
        for child in inside if depth else ():
            if child.is_dir() and not child.name.startswith(".") and child.name not in {"node_modules", "__pycache__", "site-packages"}:
                yield from self._walk(child, depth - 1)

    def _read_series(self, folder: Path, found: FoundSeries) -> Iterator[Entry]:
        name = folder.relative_to(self.root).as_posix()
        with suppress(OSError, UnicodeEncodeError):  # gone meanwhile, or a name that no address could hold
            name.encode("utf-8")
            size = sum(child.lstat().st_size for child in (folder / EXPERIMENTS_FOLDER).iterdir())
            note, begun = ABANDONED if found.status == "damaged" else "", found.begun_unix_ns or None
            yield Entry(name, "experiments", found.status, None, None, begun, size, note=note, program=_join_command(found.command))

    def _read_entry(self, path: Path) -> Entry | None:
        name = path.relative_to(self.root).as_posix()
        try:
            name.encode("utf-8")
            if is_bundle(path):
                return self._read_bundle(path, name)
            if path.is_dir():
                stats = [child.stat() for child in _select_traces(_list_children(path))]
                newest = max(stat.st_mtime_ns for stat in stats)
                return Entry(name, "folder", "finished", None, None, newest, sum(stat.st_size for stat in stats), len(stats))
            stat, fault = path.stat(), self._remember(path, _find_fault)
            if fault is None:
                return None
            return Entry(name, "trace", "unreadable" if fault else "finished", None, None, stat.st_mtime_ns, stat.st_size, note=str(fault))
        except UnicodeEncodeError:  # no address of a page could name it
            return Entry(name, "trace", "unreadable", note="its name is no valid UTF-8: rename it")
        except OSError as error:
            return Entry(name, "trace", "unreadable", note=f"cannot be read ({error.strerror})")

    def _read_bundle(self, path: Path, name: str) -> Entry:
        manifests = list_manifests(path)
        stamps = (_read_stamp(manifests[0]), _read_stamp(path))  # taken before anything is read
        stats = [os.lstat(os.path.join(folder, file)) for folder, _, names in os.walk(path) for file in names]
        size, newest = sum(stat.st_size for stat in stats), max((stat.st_mtime_ns for stat in stats), default=0)
        found = self._remember(manifests[0], read_manifest)
        if not isinstance(found, Manifest):
            return Entry(name, "bundle", "unreadable", created_unix_ns=newest, size_bytes=size, ranks=len(manifests), note=str(found))
        status: RecordingStatus = "finished" if found.finished else "live"
        if status == "live" and time.time() - newest / 1e9 >= estimate_patience_s(found.created_unix_ns, newest):
            status = "damaged"
        steps = found.steps
        if not found.finished:  # its manifest has not been written again
            written = 0
            for segment in (path / "steps" / f"rank{found.rank}").glob("[!.]*"):
                with suppress(NotASegmentError, OSError):  # being written, or damaged
                    written += count_rows(segment) if segment.suffix in SUFFIXES and not segment.is_symlink() else 0
            steps = max(steps, written)
        device = (found.device.name if found.device else "") or (found.machine.cpu if found.device_kind == "cpu" else "")
        created = found.created_unix_ns or newest
        entry = Entry(
            name, "bundle", status, steps, device or None, created, size, len(manifests), KILLED if status == "damaged" else "",
            _join_command(found.command or ()),
        )  # fmt: skip
        if found.finished and len(manifests) >= found.world_size:
            self._finished[path] = (manifests[0], *stamps, entry)
        return entry

    def _remember(self, path: Path, read: Callable[[Path], object]) -> object:
        stamp = _read_stamp(path)
        known = self._known.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        try:
            found = read(path)
        except InputError as error:
            found = str(error).removeprefix(str(path)).lstrip(": ")
        self._known[path] = (stamp, found)
        return found


def _join_command(words: tuple[str, ...]) -> str:
    """Return a command for a list: of an absolute path its last two parts, which tell more than its beginning."""
    near = ["/".join(word.rsplit("/", 2)[-2:]) if word.startswith("/") else word for word in words[:100]]
    return shlex.join(near)[:_LONGEST_PROGRAM]


def read_version_stamp(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Read what changes when a report on `path` would: names, times and sizes of the files that it rests on."""
    if not path.is_dir():
        files = [path]
    elif is_bundle(path):
        inside = [child for folder in _CHANGING for child in sorted((path / folder).glob("*")) if child.suffix != ".jsonl"]
        files = [*list_manifests(path), *inside]
    else:
        files = _select_traces(_list_children(path))
    return tuple((file.name, stat.st_mtime_ns, stat.st_size) for file in files for stat in (file.stat(),))


def _read_stamp(path: Path) -> Stamp:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


def _list_children(folder: Path) -> list[Path]:
    """List what lies in a folder, without links: they may lead out of it."""
    try:
        with os.scandir(folder) as found:
            return sorted(Path(entry.path) for entry in found if not entry.is_symlink())
    except OSError:
        return []


def _select_traces(paths: list[Path]) -> list[Path]:
    return [path for path in paths if _TRACE_NAME.search(path.name) and path.is_file()]


def _find_fault(path: Path) -> str | None:
    compressed = not path.name.lower().endswith((".json", ".sqlite"))
    try:
        if path.name.lower().endswith(".sqlite"):
            with path.open("rb") as file:
                return "" if file.read(len(_SQLITE)) == _SQLITE else None
        with closing(read_text_blocks(str(path), HEAD_BYTES)) as blocks:
            head = next(blocks, b"")[:HEAD_BYTES]
    except InputError as error:
        return error.message.removeprefix(str(path)).strip() if compressed else None
    is_list = head.lstrip()[:1] == b"[" and b'"ph"' in head and b'"ts"' in head
    return "" if is_list or any(sign in head for sign in _SIGNS) else None
