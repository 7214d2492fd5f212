"""The rows of table step_records, and what the system counts of the process meanwhile."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import Any

import msgspec

from gpudiag.capture.schedule import StepLabel

WRITTEN = "/proc/self/io", re.compile(rb"wchar: (\d+)")
"""Bytes that this process passed to write()."""

PREEMPTED = "/proc/thread-self/schedstat", re.compile(rb"\d+ (\d+)")
"""Time in ns that the thread could run and waited for a processor (Linux, Documentation/scheduler/sched-stats.rst)."""


class ProcCounter:
    """A number that the system counts for this process, or for the thread that makes this object (Linux only)."""

    def __init__(self, path: str, pattern: re.Pattern[bytes]) -> None:
        self._pattern = pattern
        try:
            self._file = os.open(path, os.O_RDONLY)
            self._is = os.fstat(self._file)
        except OSError:
            self._file = -1

    def read(self) -> int | None:
        """Return the count since the process or thread began; None where the system does not say."""
        try:
            found = self._pattern.search(os.pread(self._file, 128, 0)) if self._file >= 0 else None
        except OSError:
            return None
        return int(found[1]) if found else None

    def close(self) -> None:
        """Release the file descriptor, unless the program has closed it: its number may be that of another file by now."""
        number, self._file = self._file, -1
        with suppress(OSError):
            if number >= 0 and os.path.samestat(os.fstat(number), self._is):
                os.close(number)


class StepRow(msgspec.Struct, eq=False):
    """One row of table step_records while it is being filled; None: not known."""

    step: int
    start_unix_ns: int
    wall_ns: int
    loader_wait_ns: int | None = None
    samples: int | None = None
    window: StepLabel | None = None
    written_bytes: int | None = None
    h2d_ns: int | None = None
    forward_ns: int | None = None
    backward_ns: int | None = None
    optimizer_ns: int | None = None
    phase_clock: str | None = None
    backwards: int | None = None
    optimizer_steps: int | None = None
    batch_elements: int | None = None
    padded_elements: int | None = None
    ready: bool = True
    """No column. False while a part still waits for a figure of this row (the device answers later)."""


class StepRows:
    """The step that runs, and the rows of those that ended since the last segment."""

    def __init__(self) -> None:
        self.number = 0
        """Number of the step that runs or comes next."""
        self.dropped = 0
        """Numbers left out for steps that had no end: other ranks have a step of that number."""
        self.running = False
        self.label: StepLabel = "plain"
        self.wait_ns: int | None = None
        self.samples: int | None = None
        self._start_ns = self._start_unix_ns = 0
        self._rows: list[StepRow] = []

    def begin(self, now_ns: int, unix_ns: int) -> None:
        """Start the step `number` at a mark."""
        self.running = True
        self.wait_ns = self.samples = None
        self._start_ns, self._start_unix_ns = now_ns, unix_ns

    def end(self, now_ns: int, written: int | None) -> StepRow:
        """Return the row of the step that ends at this mark; it is kept until taken."""
        row = StepRow(self.number, self._start_unix_ns, now_ns - self._start_ns, self.wait_ns, self.samples, self.label, written)
        self._rows.append(row)
        self.running = False
        self.number += 1
        return row

    def take(self, *, unready: bool = False) -> dict[str, tuple[Any, ...]] | None:
        """Return the columns of the rows since the last call up to the first that is not ready; None where there are none.

        `unready`: of all rows, complete or not.
        """
        ready = len(self._rows) if unready else next((at for at, row in enumerate(self._rows) if not row.ready), len(self._rows))
        rows, self._rows = self._rows[:ready], self._rows[ready:]
        values = zip(*map(msgspec.structs.astuple, rows), strict=True)
        return dict(zip(StepRow.__struct_fields__, values, strict=True)) if rows else None
