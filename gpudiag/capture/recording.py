"""The bundle that one rank writes: files written atomically and off the training thread, the manifest, the warnings."""

from __future__ import annotations

import os
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

from gpudiag.bundle.layout import SEGMENT_FOLDERS, manifest_name
from gpudiag.bundle.segments import encode_segment
from gpudiag.bundle.writer import write_atomic
from gpudiag.capture.hooks import Events, Patches
from gpudiag.capture.host_marks import PACKAGE, HostMarks
from gpudiag.capture.torch_profiler import defer_signals
from gpudiag.errors import warn_user
from gpudiag.model.notices import Notice, NoticeCode, make_notice


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


def find_stack_level() -> int:
    """Return the `stacklevel` with which the caller's warnings.warn points at the line outside gpudiag and torch that led to it.

    1 where there is none: in threads of our own, and while Python shuts down.
    """
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    inside = (PACKAGE, os.path.dirname(torch) + os.sep) if torch else (PACKAGE,)
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
        target = self.path / SEGMENT_FOLDERS[table] / f"rank{self.rank}" / f"{sequence:06d}.json"
        self.submit(target, partial(encode_segment, table, columns))

    def manifest_path(self) -> Path:
        """Return where this rank's manifest stands."""
        return self.path / manifest_name(self.rank)

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
