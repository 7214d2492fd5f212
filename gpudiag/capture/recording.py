"""What a session shares with its parts: the bundle's folder, its files, and the warnings."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from gpudiag.capture import folder, parquet
from gpudiag.capture.events import Events
from gpudiag.capture.hostmarks import HostMarks
from gpudiag.capture.patches import Patches
from gpudiag.capture.writer import Background, write_atomic
from gpudiag.model.bundle import Manifest
from gpudiag.warned import warn

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep


def stack_level() -> int:
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
    """The bundle that is being written by one rank (parts.Context)."""

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        self.path, self.rank, self.world_size = path, rank, world_size
        self.created_ns = time.time_ns()
        self.warnings: list[str] = []
        self.patches = Patches()
        self.marks = HostMarks(path)
        self.events = Events(self.marks, self.note)
        self.background = Background()
        self.say: Callable[[str], None] = _warn
        """Where note() says something: a warning of Python's, unless the script is not to see any."""
        self._segments: dict[str, int] = {}
        self._failed = False

    def move(self, path: Path) -> None:
        """Write to `path` instead: for before anything is written."""
        self.path = path
        self.marks = HostMarks(path)
        self.events = Events(self.marks, self.note)

    # -- files ------------------------------------------------------------------------------------------------------

    def submit(self, target: Path, encode: Callable[[], bytes]) -> None:
        """Write encode() to `target` atomically, in the background."""
        self.background.submit(lambda: write_atomic(target, encode()))

    def segment(self, table: str, columns: Mapping[str, Sequence[Any]]) -> None:
        """Write `columns` as the next segment of `table` (model.tables), in the background."""
        sequence = self._segments.get(table, 0)
        self._segments[table] = sequence + 1
        self.submit(self.path / folder.segment_name(table, self.rank, sequence), partial(parquet.encode, table, columns))

    def manifest_path(self) -> Path:
        """Return where this rank's manifest stands."""
        return self.path / folder.manifest_name(self.rank)

    # -- warnings ---------------------------------------------------------------------------------------------------

    def remember(self, message: str) -> bool:
        """Return whether `message` is new; it goes into the manifest."""
        if message in self.warnings:
            return False
        self.warnings.append(message)
        return True

    def note(self, message: str, error: BaseException | None) -> None:
        """Say once what is not recorded, and why. The manifest keeps the kind of error, not its text (it may name paths).

        Of several errors only the first is said aloud: the others follow from it more often than not, and are in the manifest.
        """
        if not self.remember(f"{message}: {type(error).__name__}" if error is not None else message):
            return
        if error is not None and self._failed:
            return
        self._failed = self._failed or error is not None
        self.say(f"gpudiag: {message}" + (f" ({_told(error)})" if error is not None else ""))


def _told(error: BaseException) -> str:
    """Return the kind of an error and its text, where it can be told: one that the program defines may fail at that."""
    with suppress(Exception):
        return f"{type(error).__name__}: {error}"
    return type(error).__name__


def _warn(text: str) -> None:
    warn(text, stack_level())


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as it stands in the bundle: JSON, indented."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
