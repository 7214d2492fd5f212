"""The marks of a training loop: which step runs, in which thread, and what each mark sets in motion."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable

from gpudiag.capture.environment.loaders import loader_settings
from gpudiag.capture.parts import Parts
from gpudiag.capture.recording import Recording
from gpudiag.capture.seen import Seen
from gpudiag.capture.steps import StepRows, WrittenBytes, now
from gpudiag.capture.triggers import Triggers
from gpudiag.capture.windows import Windows
from gpudiag.model.bundle import LoaderSettings


def _alive(ident: int) -> bool:
    return any(thread.ident == ident for thread in threading.enumerate())


class Loop:
    """Counts the steps of one session. Its methods may raise: the session guards them.

    One thread owns the marks, the first that makes one: the profiler sees one thread, and so do the events. Marks of another are noted,
    not counted, until the owner has left its loop over steps(), or has ended.
    """

    def __init__(self, recording: Recording, windows: Windows, parts: Parts, triggers: Triggers, seen: Seen) -> None:
        self.rows = StepRows()
        self.loader: LoaderSettings | None = None
        """Of the loader given to steps()."""
        self._files, self._windows, self._parts, self._triggers, self._seen = recording, windows, parts, triggers, seen
        self._written = WrittenBytes()
        self._count = self._written.read()
        self._spanning = self._counting = self._manual = False
        self._entered_at = now()
        self._asked_ns = 0
        self._group, self._asked = 1, 0
        self._retrying = False
        self._batches: weakref.ref[object] | None = None
        self._first = self._longest = self._epochs = 0
        self.after_mark: Callable[[int], None] = lambda _: None
        """Called last at every mark, with its time."""

    def close(self) -> None:
        """Release what the counting holds."""
        self._counting = False
        self._written.close()

    # -- steps() ------------------------------------------------------------------------------------------------------

    def begin_epoch(self, batches: object, loader: object, group: int) -> bool:
        """Return whether the batches of `loader` are counted, `group` of them as one step: a loop inside a loop is not.

        `batches` is what the training loop iterates over; that it is no more says that the loop was left.
        """
        self.notice()
        if self._counting or self._manual:
            self._files.note("steps() inside a loop that already marks its steps: those batches are not counted as steps", None)
            return False
        self._own()
        self._counting, self._group, self._asked, self._retrying = True, group, 0, False
        self._batches, self._first = weakref.ref(batches), self.rows.number
        self.loader = self.loader or loader_settings(loader)
        return True

    def notice(self) -> None:
        """End the epoch where its loop was left by `break` or an exception.

        To be called on the way: in the destructor of the loop's iterator a Ctrl-C that comes while a trace is written would be lost.
        """
        if self._counting and self._batches is not None and self._batches() is None:
            self.end_epoch()

    def ask(self) -> bool:
        """A batch is asked for: mark, where it is the first of its step. Return whether it is counted."""
        if not self._own():
            return False
        if self._asked % self._group == 0 and not self._retrying:
            self._mark()
        self._retrying = False
        self._asked += 1
        self._files.events.muted = True
        self._files.events.emit("batch_asked")
        self._asked_ns = time.perf_counter_ns()
        return True

    def failed(self) -> None:
        """The loader raised: where the loop goes on, the next batch takes the place of this one, in the same step."""
        self._files.events.muted = False
        self.rows.wait_ns = (self.rows.wait_ns or 0) + time.perf_counter_ns() - self._asked_ns
        self._asked -= 1
        self._retrying = True

    def received(self, batch: object, loader: object) -> None:
        """The batch that was asked for is here."""
        rows, events = self.rows, self._files.events
        events.muted = False
        wait = time.perf_counter_ns() - self._asked_ns
        rows.wait_ns = (rows.wait_ns or 0) + wait
        self._seen.take_waits()  # of other loaders, meanwhile
        events.emit("batch_received", wait, batch, loader)
        _, samples = self._seen.take_waits()
        if samples is not None:
            rows.samples = (rows.samples or 0) + samples
        self._files.marks.waited("steps()", wait, sys._getframe(1))

    def exhausted(self) -> None:
        """The epoch ends. A last group that is not full is no step: with fewer batches, and often without an update."""
        left = max(0, self._asked - 1) % self._group
        if left:
            self._files.remember(f"accumulation={self._group}: an epoch ended with a group of {left}, which is not counted as a step")
        self.end_epoch()

    def again(self) -> None:
        """A loop was begun over batches that had come to their end."""
        self._files.note("a loop over batches that had come to their end got none: call steps() once an epoch", None)

    def end_epoch(self) -> None:
        """The step that runs has no end: it is not counted, and what follows belongs to no step."""
        if self.rows.running:
            self._parts.call("interrupted")
        if self._counting:
            self._epochs += 1
            self._longest = max(self._longest, self.rows.number - self._first)
        self._counting = self._files.events.muted = self.rows.running = False
        self._windows.interrupt(self.rows.number)
        self._files.marks.step = None

    def missing(self, window_steps: int) -> list[str]:
        """Return why no window of `window_steps` could be recorded, in words, where the epochs are the reason."""
        if self._epochs < 2 or self._longest >= window_steps:
            return []
        longest = f"the longest of {self._epochs} epochs over steps() had {self._longest} step{'s' if self._longest != 1 else ''}"
        return [f"{longest}, a window needs {window_steps} without a break: mark them with prof.step(), which goes on from epoch to epoch"]

    # -- step() -------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Mark the end of a step, in loops without steps()."""
        self.notice()
        if self._counting:
            self._files.note("step() inside a loop over steps(): its marks are not counted", None)
            return
        if not self._own():
            return
        if not self._manual:
            self._manual = True
            self.rows.begin(*self._entered_at)
        self.rows.wait_ns, self.rows.samples = self._seen.take_waits()
        self._mark()

    def pause(self) -> None:
        """What follows belongs to no step: the next step() begins one and ends none."""
        self.notice()
        if self._counting:
            self._files.note("pause() inside a loop over steps(): leave that loop instead", None)
        elif self._own():
            self._manual = True
            alone = self.rows.running and self._files.world_size > 1
            self.end_epoch()
            if alone:  # the other ranks may not pause: theirs is a step like others, and all keep the same numbers and windows
                self.rows.drop()
                self._windows.passed_over()

    # -- marks --------------------------------------------------------------------------------------------------------

    def _own(self) -> bool:
        """Return whether this thread owns the marks; it takes them over where nobody does."""
        here, events = threading.get_ident(), self._files.events
        if events.thread == here:
            return True
        if self._counting or self._manual:
            if _alive(events.thread):
                self._files.note("a second thread marks steps: those are not counted, the profiler sees one thread only", None)
                return False
            self._moved()
        events.thread = self._seen.thread = here
        return True

    def _moved(self) -> None:
        """The thread of the loop has ended in the middle of a step."""
        if self.rows.running:
            self._parts.call("interrupted")
        self.rows.running = False
        self._windows.abandon()

    def _mark(self) -> None:
        rows, windows, triggers = self.rows, self._windows, self._triggers
        running = rows.running
        written = self._written_since()
        if running:
            windows.step_done()
        windows.advance()
        at, unix = now()
        if running:
            row = rows.end(at, None if rows.label == "export" else written)
            self._parts.call("step_ended", row, at)
            triggers.ended(row)
        rows.begin(at, unix)
        self._files.marks.step = rows.number
        self._parts.call("step_began", rows.number, at, unix)
        if triggers.used:
            for reason in triggers.due(rows.number, windows.covers):
                windows.request(reason)
        rows.label = windows.begin(rows.number)
        if triggers.used:
            for message in triggers.late(windows.beginning, rows.number):
                self._files.remember(message)
        self.after_mark(at)

    def _written_since(self) -> int | None:
        """Return what the process wrote since the last mark, without our own files; None while those are being written."""
        background = self._files.background
        busy = background.busy
        own, count = background.take_written(), self._written.read()
        unknown = busy or self._spanning or count is None or self._count is None
        written = None if unknown else max(0, (count or 0) - (self._count or 0) - own)
        self._spanning, self._count = busy, count
        return written
