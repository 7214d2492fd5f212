"""The steps of a training loop: the marked batches of a loader, and the rows of table step_records."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from gpudiag.capture.hooks import Listener
from gpudiag.capture.schedule import StepLabel
from gpudiag.model import trace

Batch = TypeVar("Batch")
BatchOut = TypeVar("BatchOut", covariant=True)


class Batches(Iterator[BatchOut]):
    """The batches of `loader`, once.

    A class and not a generator: a generator is over once its loader has raised, so that a loop that leaves out a bad batch would end
    early; and what it does when it is dropped is done in a destructor, where a Ctrl-C is lost. Nothing is done here on dropping:
    who keeps the marks sees at the next of them that this object is no more.
    """

    __slots__ = ("__weakref__", "_counted", "_group", "_iterator", "_loader", "_mark", "_over")

    # Calls a method of loop.Loop by its name; returns whether it was done. It never raises: a failure ends the recording, not the loop
    def __init__(self, loader: Iterable[BatchOut], group: int, mark: Callable[..., bool]) -> None:
        self._loader, self._group, self._mark = loader, group, mark
        self._iterator: Iterator[BatchOut] | None = None
        self._counted = self._over = False

    def __iter__(self) -> Batches[BatchOut]:
        if self._over:
            self._mark("again")
        return self

    def __next__(self) -> BatchOut:
        if self._over:
            raise StopIteration
        iterator = self._iterator
        if iterator is None:
            iterator = self._iterator = iter(self._loader)
            self._counted = self._mark("begin_epoch", self, self._loader, self._group)
        asked = self._counted and self._mark("ask")
        try:
            batch = next(iterator)
        except StopIteration:
            self._over, self._iterator = True, None
            if self._counted:
                self._mark("exhausted")
            raise
        except BaseException:
            if asked:
                self._mark("failed")
            raise
        if asked:
            self._mark("received", batch, self._loader)
        return batch


class SizedBatches(Batches[BatchOut]):
    """The batches of a loader that has a length: len() is the loader's."""

    __slots__ = ()

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # Session.steps() looks


class LoopExit(Listener):
    """Calls `left` when the training thread does something: where a loop was left by `break`, the next mark may be far away."""

    def __init__(self, left: Callable[[], object]) -> None:
        self._left = left

    def batch_asked(self, *_: Any, **__: Any) -> None:
        """Look whether the loop is left: the batch may be one of another loop, such as one of a validation."""
        self._left()

    backward_began = optimizer_began = batch_asked


_COLUMNS = tuple(trace.build_table_schema("step_records"))

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
        row = StepRow(self.number, self._start_unix_ns, now_ns - self._start_ns)
        row.loader_wait_ns, row.samples, row.window, row.written_bytes = self.wait_ns, self.samples, self.label, written
        self._rows.append(row)
        self.running = False
        self.number += 1
        return row

    def take(self, *, unready: bool = False) -> dict[str, list[Any]] | None:
        """Return the columns of the rows since the last call up to the first that is not ready; None where there are none.

        `unready`: of all rows, complete or not.
        """
        ready = len(self._rows) if unready else next((at for at, row in enumerate(self._rows) if not row.ready), len(self._rows))
        rows, self._rows = self._rows[:ready], self._rows[ready:]
        return {column: [getattr(row, column) for row in rows] for column in _COLUMNS} if rows else None


def read_clocks() -> tuple[int, int]:
    """Return the monotonic clock and Unix time, both in ns."""
    return time.perf_counter_ns(), time.time_ns()
