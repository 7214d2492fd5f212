"""The rows of table step_records: one for every step, profiled or not."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Any

from gpudiag.capture.schedule import Label
from gpudiag.model import tables

_COLUMNS = tuple(tables.schema("step_records"))


class WrittenBytes:
    """Bytes that this process passed to write() (field wchar of /proc/self/io; Linux only)."""

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/self/io", os.O_RDONLY)
            self._is = os.fstat(self._file)
        except OSError:
            self._file = -1

    def read(self) -> int | None:
        """Return the count since the process began; None where the system does not say."""
        if self._file < 0:
            return None
        try:
            return int(os.pread(self._file, 128, 0).split(b"wchar: ", 1)[1].split(b"\n", 1)[0])
        except (OSError, IndexError, ValueError):
            return None

    def close(self) -> None:
        """Release the file descriptor, unless the program has closed it: its number may be that of another file by now."""
        number, self._file = self._file, -1
        with suppress(OSError):
            if number >= 0 and os.path.samestat(os.fstat(number), self._is):
                os.close(number)


class StepRow:
    """One row of table step_records while it is being filled; attributes are its columns. None: not known."""

    loader_wait_ns: int | None = None
    samples: int | None = None
    window: str | None = None
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
    """False while a part still waits for a figure of this row (the device answers later)."""

    def __init__(self, step: int, start_unix_ns: int, wall_ns: int) -> None:
        self.step, self.start_unix_ns, self.wall_ns = step, start_unix_ns, wall_ns

    def cells(self) -> tuple[Any, ...]:
        """Return the values in the order of the columns."""
        return tuple(getattr(self, column) for column in _COLUMNS)


class StepRows:
    """The step that runs, and the rows of those that ended since the last segment."""

    def __init__(self) -> None:
        self.number = 0
        self._dropped = 0
        """Number of the step that runs or comes next."""
        self.running = False
        self.label: Label = "plain"
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
        row = StepRow(self.number, self._start_unix_ns, now_ns - self._start_ns)
        row.loader_wait_ns, row.samples, row.window, row.written_bytes = self.wait_ns, self.samples, self.label, written
        self._rows.append(row)
        self.running = False
        self.number += 1
        return row

    def drop(self) -> None:
        """Leave out the number of a step that had no end: other ranks have a step of that number."""
        self.number += 1
        self._dropped += 1

    @property
    def made(self) -> int:
        """Return how many steps ended."""
        return self.number - self._dropped

    def take(self, *, unready: bool = False) -> dict[str, list[Any]] | None:
        """Return the columns of the rows since the last call up to the first that is not ready; None where there are none.

        `unready`: of all rows, complete or not.
        """
        ready = len(self._rows) if unready else next((at for at, row in enumerate(self._rows) if not row.ready), len(self._rows))
        rows, self._rows = self._rows[:ready], self._rows[ready:]
        return dict(zip(_COLUMNS, map(list, zip(*(row.cells() for row in rows), strict=True)), strict=True)) if rows else None


def now() -> tuple[int, int]:
    """Return the monotonic clock and Unix time, both in ns."""
    return time.perf_counter_ns(), time.time_ns()
