"""What else the process does while it trains: waiting for batches, garbage collection, torch.save, files opened for writing."""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from gpudiag.capture.gc_runs import Collections
from gpudiag.capture.patches import Patches
from gpudiag.model import tables

FLOOR_NS = 20_000
"""Collections and loader waits shorter than this leave no mark: they are as short as a few kernel launches and explain no gap."""

MAX_MARKS = 20_000
"""Marks kept between two segments; more are counted, not kept (a loop that opens files without end must not fill memory)."""

_MAX_FRAMES = 64
_PACKAGE = str(Path(__file__).resolve().parents[1])


def _library(*names: str) -> tuple[str, ...]:
    return tuple({path + os.sep for path in (sysconfig.get_path(name) for name in names) if path})


_STANDARD, _SITE = ("<", *_library("stdlib", "platstdlib")), _library("purelib", "platlib")
_INSTALLED = (_PACKAGE + os.sep, *_STANDARD, *_SITE)
_NO_FILES = ("/dev/", "/proc/", "/sys/")

_live: HostMarks | None = None
_hooked = False


def caller_site(frame: FrameType | None) -> str | None:
    """Return 'file.py:line' of the nearest frame of the user's own code: not installed, not the standard library, not gpudiag."""
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return None
        name = frame.f_code.co_filename
        if not name.startswith(_INSTALLED):
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def own(frame: FrameType | None) -> bool:
    """Return whether gpudiag itself asked the standard library for what is happening; our wrapper round torch.save is not that."""
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return False
        name = frame.f_code.co_filename
        if name.startswith(_SITE) or not name.startswith(_STANDARD):
            return name.startswith(_PACKAGE + os.sep)
        frame = frame.f_back
    return False


class HostMarks:
    """The marks since the last segment. `on` is False before attach(), after detach() and in a forked child."""

    def __init__(self, ignore: Path) -> None:
        self.on = False
        self.dropped = 0
        self._step: int | None = None
        self._collections = Collections()
        self._rows: list[tuple[str, str, int, int, str | None, int | None]] = []
        self._ignore = str(ignore) + os.sep

    @property
    def step(self) -> int | None:
        """Return the number of the step that is running."""
        return self._step

    @step.setter
    def step(self, number: int | None) -> None:
        self._note_collections()
        self._step = number

    def add(self, kind: str, name: str, start_unix_ns: int, duration_ns: int, site: str | None) -> None:
        """Keep one mark (columns of the table host_marks)."""
        if len(self._rows) < MAX_MARKS:
            self._rows.append((kind, name, start_unix_ns, duration_ns, site, self.step))
        else:
            self.dropped += 1

    def waited(self, what: str, wait_ns: int, frame: FrameType | None) -> None:
        """Keep a mark of a wait for a batch that has just ended; `frame`: whoever asked for it."""
        if self.on and wait_ns >= FLOOR_NS:
            self.add("loader", what, time.time_ns() - wait_ns, wait_ns, caller_site(frame))

    def take(self) -> dict[str, list[Any]] | None:
        """Return the columns of the marks since the last call, None where there are none."""
        self._note_collections()
        rows, self._rows = self._rows, []
        return dict(zip(tables.schema("host_marks"), map(list, zip(*rows, strict=True)), strict=True)) if rows else None

    def attach(self) -> None:
        """Start to listen. The audit hook stays in the process for good (Python cannot remove one) but does nothing when detached."""
        global _live, _hooked
        if not _hooked:
            sys.addaudithook(_audit)
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=_detach_in_child)
            _hooked = True
        self._collections.attach()
        _live, self.on = self, True

    def detach(self) -> None:
        """Stop to listen."""
        global _live
        self.on = False
        if _live is self:
            _live = None
        self._collections.detach()

    def install(self, patches: Patches) -> None:
        """Wrap gc.collect: the one collection whose place in the loop's code can be known, and is worth knowing."""
        patches.wrap(gc, "collect", self._collect)

    def _collect(self, original: Any) -> Any:
        def noted_collect(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return original(*args, **kwargs)
            with suppress(Exception):  # a mark that fails is left out
                self._note_collections()
            try:
                return original(*args, **kwargs)
            finally:
                frame = sys._getframe(1)
                with suppress(Exception):
                    self._note_collections(caller_site(frame))

        return noted_collect

    def _note_collections(self, site: str | None = None) -> None:
        """Keep the marks of the collections since the last call."""
        runs, lost = self._collections.take()
        self.dropped += lost
        for run in runs:
            if run.duration_ns >= FLOOR_NS:
                self.add("gc", f"gen {run.generation}", run.start_unix_ns, run.duration_ns, site)

    def opened(self, path: object, mode: object, flags: object) -> None:
        """Keep a mark where the arguments of an 'open' audit event are those of a file opened for writing."""
        if not _writes(mode, flags) or not isinstance(path, (str, bytes)):
            return
        name = os.fsdecode(path)
        frame = sys._getframe(2)
        if not name.startswith((*_NO_FILES, self._ignore)) and not own(frame):
            self.add("file_write", os.path.basename(name), time.time_ns(), 0, caller_site(frame))


def _writes(mode: object, flags: object) -> bool:
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event != "open" or _live is None:
        return
    with suppress(Exception):  # an exception here would make the user's open() fail
        _live.opened(*args)


def _detach_in_child() -> None:
    if _live is not None:
        _live.detach()
