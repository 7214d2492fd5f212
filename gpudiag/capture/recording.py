"""The bundle that one rank writes: files written atomically and off the training thread, the manifest, the warnings."""

from __future__ import annotations

import errno
import gzip
import os
import re
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from gpudiag.capture import bundle_folder, segments
from gpudiag.capture.hooks import Events, Patches
from gpudiag.capture.host_marks import HostMarks
from gpudiag.capture.torch_profiler import defer_signals
from gpudiag.errors import warn_user
from gpudiag.model.bundle import Manifest
from gpudiag.model.notices import Notice, NoticeCode, make_notice

try:  # here and not in the thread: a DataLoader worker that is forked during an import finds that module locked for ever
    from isal import igzip
except ImportError:  # other processors than x86-64 and arm64
    igzip = None

CHUNK_BYTES = 1 << 18
"""Bytes read at a time when a trace is compressed."""

OVERLAP_BYTES = 1 << 13
"""Bytes kept back between chunks so that a replaced text is never cut in two (PATH_MAX is 4,096)."""

RESERVE_BYTES = 128 << 20
"""A plain trace of a few steps of a large model takes up to about 100 MB: where less is free, none is written beside the training."""

_HOST_NAME = re.compile(rb'("host_name":\s*")[^"\n]*(")')


def write_atomic(path: Path, data: bytes) -> int:
    """Return the bytes written: `path` holds either the old or the new content, never a part. Raises OSError."""
    scratch = path.with_name(f".{path.name}.tmp")
    try:
        with open(scratch, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
    return len(data)


def discard_trace(plain: Path) -> None:
    """Remove what the profiler has written, and the file under whose name Kineto writes it: that one stays where the disk is full.

    Kineto keeps it open then, so that removing its name alone gives no space back.
    """
    for path in (plain, plain.with_name(f"{plain.name}.tmp")):
        with suppress(OSError):
            os.truncate(path, 0)
        with suppress(OSError):
            path.unlink(missing_ok=True)


def export_trace(export: Callable[[Path], None], plain: Path, last_bytes: int) -> int:
    """Return the bytes that export(plain) wrote; `last_bytes`: those of the largest trace so far.

    Raises OSError (ENOSPC) where little space is left, OSError where nothing was written: Kineto fails silently. Then no file is left.
    """
    free, wanted = shutil.disk_usage(plain.parent).free, max(RESERVE_BYTES, 4 * last_bytes)  # with stacks a trace is a few times as large
    if free < wanted:
        raise OSError(errno.ENOSPC, f"only {free >> 20} MB are left, traces are written where {wanted >> 20} MB are")
    try:
        export(plain)
        if plain.exists():
            return plain.stat().st_size
        # A disk with less than this left is full for the profiler, whose file did not fit
        if shutil.disk_usage(plain.parent).free < 1 << 20:
            raise OSError(errno.ENOSPC, "the disk is full")
        raise OSError("the profiler wrote no trace: a limit on the size of files, or a disk that was full for a moment")
    except BaseException:
        discard_trace(plain)
        raise


def compress_trace(source: Path, target: Path, replacements: Sequence[tuple[bytes, bytes]] = ()) -> int:
    """Return the bytes written to `target` (.gz): `source` without its host name and with `replacements` made; removes `source`.

    The profiler writes the machine's name and the path of the export into a trace; neither belongs in a bundle. Raises OSError.
    """
    scratch = target.with_name(f".{target.name}.tmp")
    packer: Any = gzip if igzip is None else igzip
    try:
        with open(source, "rb") as plain, packer.open(scratch, "wb", compresslevel=3 if igzip is None else 2) as packed:
            rest = b""
            while chunk := plain.read(CHUNK_BYTES):
                data = rest + chunk
                for old, new in replacements:
                    data = data.replace(old, new)
                if b'"host_name"' in data:
                    data = _HOST_NAME.sub(rb"\1\2", data)
                packed.write(data[:-OVERLAP_BYTES])
                rest = data[-OVERLAP_BYTES:]
            packed.write(rest)
        descriptor = os.open(scratch, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(scratch, target)
    finally:  # also when the disk is full: a plain trace is ten times the size of a compressed one
        discard_trace(source)
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
    return target.stat().st_size


class BackgroundWriter:
    """Runs jobs one after the other in a thread that lives only while there is work; while Python shuts down, in the caller's.

    A job returns the bytes that it wrote. The first failure ends the work: later jobs are not run and `error` holds it.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._jobs: deque[Callable[[], int]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.written = 0
        """Bytes that finished jobs wrote."""

    @property
    def busy(self) -> bool:
        """Return whether a job is running or waiting."""
        return self._thread is not None

    def submit(self, job: Callable[[], int]) -> None:
        """Run `job` after those submitted before. Raises RuntimeError where no thread can be started."""
        # a Ctrl-C inside Thread.start() would leave a thread at work of which join() knows nothing
        with defer_signals(), self._lock:
            self._jobs.append(job)
            if self._thread is None and threading.main_thread().is_alive():
                self._thread = threading.Thread(target=self._run, name="gpudiag-writer", daemon=True)
                try:
                    self._thread.start()
                except Exception:
                    self._thread = None
                    raise
            handed_over = self._thread is not None
        if not handed_over:
            self._run()  # in an atexit handler: Python 3.12 and later start no thread there

    def join(self, timeout_s: float) -> bool:
        """Return whether all jobs ended within `timeout_s` seconds."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return not self.busy

    def _run(self) -> None:
        while True:
            with self._lock:
                if self.error is not None:
                    self._jobs.clear()
                if not self._jobs:
                    self._thread = None
                    return
                job = self._jobs.popleft()
            try:
                self.written += job()
            except BaseException as error:  # noqa: BLE001 - it is handed to the session, which warns once
                self.error = error


_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep


def find_stack_level() -> int:
    """Return the `stacklevel` with which the caller's warnings.warn points at the line outside gpudiag and torch that led to it.

    1 where there is none: in threads of our own, and while Python shuts down.
    """
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    inside = (_PACKAGE, os.path.dirname(torch) + os.sep) if torch else (_PACKAGE,)
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    return 1 if frame is None else level


class Recording:
    """The bundle that is being written by one rank (hooks.Context)."""

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        self.path, self.rank, self.world_size = path, rank, world_size
        self.created_ns = time.time_ns()
        self.warnings: list[str] = []
        self._codes: dict[str, NoticeCode] = {}
        self.patches = Patches()
        self.marks = HostMarks(path)
        self.events = Events(self.marks, self.note)
        self.background = BackgroundWriter()
        self.say: Callable[[str], None] = lambda text: warn_user(text, find_stack_level())
        """Where note() says something: a warning of Python's, unless the script is not to see any."""
        self._segments: dict[str, int] = {}
        self._failed = False

    def move(self, path: Path) -> None:
        """Write to `path` instead: for before anything is written."""
        self.path = self.marks.ignore = path

    def submit(self, target: Path, encode: Callable[[], bytes]) -> None:
        """Write encode() to `target` atomically, in the background."""
        self.background.submit(lambda: write_atomic(target, encode()))

    def segment(self, table: str, columns: Mapping[str, Sequence[Any]]) -> None:
        """Write `columns` as the next segment of `table` (model.trace), in the background."""
        sequence = self._segments.get(table, 0)
        self._segments[table] = sequence + 1
        target = self.path / bundle_folder.SEGMENT_FOLDERS[table] / f"rank{self.rank}" / f"{sequence:06d}.json"
        self.submit(target, partial(segments.encode_segment, table, columns))

    def manifest_path(self) -> Path:
        """Return where this rank's manifest stands."""
        return self.path / bundle_folder.manifest_name(self.rank)

    def remember(self, message: str, code: NoticeCode = NoticeCode.FROM_MANIFEST) -> bool:
        """Return whether `message` is new; it goes into the manifest, with `code` where readers decide by it."""
        if message in self.warnings:
            return False
        self.warnings.append(message)
        self._codes[message] = code
        return True

    def notices(self) -> tuple[Notice, ...]:
        """Return the warnings with their codes."""
        return tuple(make_notice(self._codes.get(text, NoticeCode.FROM_MANIFEST), text=text) for text in self.warnings)

    def note(self, message: str, error: BaseException | None, code: NoticeCode = NoticeCode.FROM_MANIFEST, /) -> None:
        """Say once what is not recorded, and why. The manifest keeps the kind of error, not its text (it may name paths).

        Of several errors only the first is said aloud: the others follow from it more often than not, and are in the manifest.
        """
        if not self.remember(f"{message}: {type(error).__name__}" if error is not None else message, code):
            return
        if error is not None and self._failed:
            return
        self._failed = self._failed or error is not None
        text = f"gpudiag: {message}"
        if error is not None:
            reason = type(error).__name__
            with suppress(Exception):  # an error that the program defines may fail at telling its text
                reason = f"{reason}: {error}"
            text = f"{text} ({reason})"
        self.say(text)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as it stands in the bundle: JSON, indented."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
