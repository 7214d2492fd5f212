"""The marks of a training loop: the batches of a loader, which step runs, and what each mark sets in motion."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter_ns, time_ns
from typing import Any, Concatenate, ParamSpec, TypeVar

from gpudiag.capture.environment.torch_settings import read_loader_settings
from gpudiag.capture.hooks import Hooks
from gpudiag.capture.host_marks import RunObserver
from gpudiag.capture.recording import Recording
from gpudiag.capture.schedule import Triggers
from gpudiag.capture.steps import PREEMPTED, WRITTEN, ProcCounter, StepRow, StepRows
from gpudiag.capture.windows import Windows
from gpudiag.model.bundle import PREEMPTED_SHARE, LoaderSettings
from gpudiag.model.notices import Notice, NoticeCode, make_notice

BatchOut = TypeVar("BatchOut", covariant=True)
P = ParamSpec("P")

PREEMPTED_NS = 1_000_000
"""Time that the thread waits for a processor in a step from which that is marked: a time slice (sched(7)), or PREEMPTED_SHARE."""

ASK_INTERVAL_STEPS = 16
"""What the process wrote is asked at each of so many first marks, then at one in so many while it writes nothing."""

PAUSE_NS = 2 * 10**9
"""Longest pause between two epochs over which a window goes on: a validation of minutes would fill the memory with its events."""


class Batches(Iterator[BatchOut]):
    """The batches of `loader`, once.

    A class and not a generator: a generator is over once its loader has raised, so that a loop that leaves out a bad batch would end
    early; and what it does when it is dropped is done in a destructor, where a Ctrl-C is lost. Nothing is done here on dropping:
    who keeps the marks sees at the next of them that this object is no more.
    """

    __slots__ = ("__weakref__", "_counted", "_group", "_iterator", "_loader", "_loop", "_over")

    def __init__(self, loader: Iterable[BatchOut], group: int, loop: Loop) -> None:
        self._loader, self._group, self._loop = loader, group, loop
        self._iterator: Iterator[BatchOut] | None = None
        self._counted = self._over = False

    def __iter__(self) -> Batches[BatchOut]:
        if self._over:
            self._loop.begin_again()
        return self

    def __next__(self) -> BatchOut:
        if self._over:
            raise StopIteration
        iterator = self._iterator
        if iterator is None:
            iterator = self._iterator = iter(self._loader)
            self._counted = self._loop.begin_epoch(self, self._loader, self._group)
        asked = self._counted and self._loop.ask()
        try:
            batch = next(iterator)
        except StopIteration:
            self._over, self._iterator = True, None
            if self._counted:
                self._loop.exhaust()
            raise
        except BaseException:
            if asked:
                self._loop.fail_batch()
            raise
        if asked:
            self._loop.receive(batch, self._loader)
        return batch


class SizedBatches(Batches[BatchOut]):
    """The batches of a loader that has a length: len() is the loader's."""

    __slots__ = ()

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # Session.steps() looks


def _guard(mark: Callable[Concatenate[Loop, P], bool | None]) -> Callable[Concatenate[Loop, P], bool]:
    """Have a method do nothing unless the session records, and end the recording where it fails: it returns whether it was done."""

    @functools.wraps(mark)
    def guarded(loop: Loop, /, *args: P.args, **kwargs: P.kwargs) -> bool:
        if not loop.recording.marks.on:
            return False
        try:
            return mark(loop, *args, **kwargs) is not False
        except Exception as error:  # noqa: BLE001 - the training run comes first
            loop.fail(error)
            return False

    return guarded


class Loop(Hooks):
    """Counts the steps of one session.

    One thread owns the marks, the first that makes one: the profiler sees one thread, and so do the events. Marks of another are noted,
    not counted, until the owner has left its loop over steps(), or has ended.

    `fail` is called with what a mark raised, `tidy` last at every mark outside windows, with its time.
    """

    def __init__(
        self, recording: Recording, windows: Windows, triggers: Triggers, fail: Callable[[Exception], object], tidy: Callable[[int], object]
    ) -> None:
        self.recording, self.fail = recording, fail
        self.rows = StepRows()
        self.seen = RunObserver(recording.marks)
        self.loader: LoaderSettings | None = None
        """Of the loader given to steps()."""
        self._windows, self._triggers, self._tidy = windows, triggers, tidy
        self._spanning = self._counting = self._manual = False
        self._asked_ns = 0
        self._group, self._asked = 1, 0
        self._retrying = False
        self._batches: weakref.ref[object] | None = None
        self._first = self._left_ns = 0
        self._pause_ns: int | None = None

    def start(self, context: object) -> None:
        """The session was entered, on this thread."""
        self._written, self._preempted = ProcCounter(*WRITTEN), ProcCounter(*PREEMPTED)
        self._waited, self._count = self._preempted.read(), self._written.read()
        self._own, self._wrote = 0, True
        self._entered_at = perf_counter_ns(), time_ns()

    def drop(self) -> None:
        """Release the counters."""
        self._written.close()
        self._preempted.close()

    @_guard
    def begin_epoch(self, batches: object, loader: object, group: int) -> bool:
        """Return whether the batches of `loader` are counted, `group` of them as one step: a loop inside a loop is not.

        `batches` is what the training loop iterates over; that it is no more says that the loop was left.
        """
        self._look()
        if self._counting or self._manual:
            self.recording.note("steps() inside a loop that already marks its steps: those batches are not counted as steps", None)
            return False
        self._take_over()
        self._counting, self._group, self._asked, self._retrying = True, group, 0, False
        self._batches = weakref.ref(batches)
        self.loader = self.loader or read_loader_settings(loader)
        return True

    @_guard
    def begin_again(self) -> None:
        """A loop was begun over batches that had come to their end."""
        self.recording.note("a loop over batches that had come to their end got none: call steps() once an epoch", None)

    @_guard
    def ask(self) -> bool:
        """A batch is asked for: mark, where it is the first of its step. Return whether it is counted."""
        if not self._take_over():
            return False
        if self._asked % self._group == 0 and not self._retrying:
            self._mark()
        self._retrying = False
        self._asked += 1
        events = self.recording.events
        events.muted = True
        events.batch_asked(perf_counter_ns())
        self._asked_ns = perf_counter_ns()
        return True

    @_guard
    def fail_batch(self) -> None:
        """The loader raised: where the loop goes on, the next batch takes the place of this one, in the same step."""
        self.recording.events.muted = False
        self.rows.wait_ns = (self.rows.wait_ns or 0) + perf_counter_ns() - self._asked_ns
        self._asked -= 1
        self._retrying = True

    @_guard
    def receive(self, batch: object, loader: object) -> None:
        """The batch that was asked for is here."""
        at = perf_counter_ns()
        wait, rows, events, seen = at - self._asked_ns, self.rows, self.recording.events, self.seen
        events.muted = False
        rows.wait_ns = (rows.wait_ns or 0) + wait
        seen.take_waits()  # of other loaders, meanwhile
        events.batch_received(at, wait, batch, loader)
        _, samples = seen.take_waits()
        if samples is not None:
            rows.samples = (rows.samples or 0) + samples
        self.recording.marks.waited("steps()", wait)

    @_guard
    def exhaust(self) -> None:
        """The epoch ends. A last group that is not full is no step: with fewer batches, and often without an update."""
        left = max(0, self._asked - 1) % self._group
        if left:
            text = f"accumulation={self._group}: an epoch ended with a group of {left}, which is not counted as a step"
            self.recording.remember(text)
        self._end_epoch()

    @_guard
    def step(self) -> None:
        """Mark the end of a step, in loops without steps()."""
        self._look()
        if self._counting:
            self.recording.note("step() inside a loop over steps(): its marks are not counted", None)
        elif self._take_over():
            if not self._manual:
                self._manual = True
                self.rows.begin(*self._entered_at)
            self.rows.wait_ns, self.rows.samples = self.seen.take_waits()
            self._mark()

    @_guard
    def pause(self) -> None:
        """What follows belongs to no step: the next step() begins one and ends none."""
        self._look()
        if self._counting:
            self.recording.note("pause() inside a loop over steps(): leave that loop instead", None)
        elif self._take_over():
            self._manual = True
            alone = self.rows.running and self.recording.world_size > 1
            self._end_epoch()
            if alone:  # the other ranks may not pause: theirs is a step like others, and all keep the same numbers and windows
                self.rows.number += 1
                self.rows.dropped += 1
                self._windows.advance(ended=True)

    @_guard
    def end(self) -> None:
        """The run is over: the step that runs has no end, and no window goes on."""
        self._end_epoch()
        self._windows.interrupt(self.rows.number)

    @_guard
    def look(self) -> None:
        """End the epoch where its loop was left."""
        self._look()

    def batch_asked(self, *_: Any, **__: Any) -> None:
        """Look whether the loop was left: this may be a batch of another one (a validation), and the next mark far away."""
        if self._left_ns or (self._batches is not None and self._batches() is None):
            self.look()

    backward_began = optimizer_began = batch_asked

    def list_missing(self) -> list[Notice]:
        """Return what was planned and is not in the bundle."""
        notices = self._windows.missing()
        if steps := self._triggers.steps:
            text = f"at_steps: the run ended before step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
            notices.append(make_notice(NoticeCode.RUN_ENDED_EARLY, text=text))
        return notices

    def _look(self) -> None:
        """End the epoch where its loop was left by `break` or an exception.

        To be called on the way: in the destructor of the loop's iterator a Ctrl-C that comes while a trace is written would be lost.
        """
        if self._counting and self._batches is not None and self._batches() is None:
            self._end_epoch()
        elif self._left_ns and perf_counter_ns() - self._left_ns > PAUSE_NS:
            self._windows.interrupt(self.rows.number)

    def _end_epoch(self) -> None:
        """The step that runs has no end: it is not counted, and what follows belongs to no step.

        A window goes on in the next epoch where the pause between the last two was short: what runs meanwhile is recorded as well.
        """
        if self.rows.running:
            self.recording.events.interrupted()
        self._counting = self.recording.events.muted = self.rows.running = False
        self._batches = None
        if not self._left_ns:
            short = self._pause_ns is not None and self._pause_ns <= PAUSE_NS
            if not short or not self._windows.rest(self.rows.number - self._first):
                self._windows.interrupt(self.rows.number)
            self._left_ns = perf_counter_ns()
        self.recording.marks.begin_step(None, perf_counter_ns())

    def _take_over(self) -> bool:
        """Return whether this thread owns the marks; it takes them over where nobody does."""
        here, events = threading.get_ident(), self.recording.events
        if events.thread == here:
            return True
        if self._counting or self._manual:
            if any(thread.ident == events.thread for thread in threading.enumerate()):
                self.recording.note("a second thread marks steps: those are not counted, the profiler sees one thread only", None)
                return False
            # The thread of the loop has ended in the middle of a step
            if self.rows.running:
                events.interrupted()
            self.rows.running = False
            self._windows.interrupt(None)
        events.thread = here
        self._preempted.close()
        self._preempted = ProcCounter(*PREEMPTED)
        return True

    def _mark(self) -> None:
        """End the step that runs, and begin the next."""
        rows, windows, triggers, marks, events = self.rows, self._windows, self._triggers, self.recording.marks, self.recording.events
        running = rows.running
        if not running:
            self._first = rows.number
            self._pause_ns = perf_counter_ns() - self._left_ns if self._left_ns else None
            self._left_ns = 0
        written = self._count_written()
        windows.advance(ended=running)
        at, unix = perf_counter_ns(), time_ns()
        before, self._waited = self._waited, self._preempted.read()
        row: StepRow | None = None
        padding = self.seen.take_padding()
        if running:
            row = rows.end(at, None if rows.label == "export" else written)
            if padding is not None:
                row.batch_elements, row.padded_elements = padding
            waited = (self._waited or 0) - (before or 0)
            if before is not None and waited >= PREEMPTED_NS and waited >= PREEMPTED_SHARE * row.wall_ns:
                marks.add("preempted", "", row.start_unix_ns, waited, None)
            events.step_ended(row, at)
        rows.begin(at, unix)
        marks.begin_step(rows.number, at)
        events.step_began(rows.number, at)
        if triggers.used:
            for reason in triggers.due(rows.number, row, windows.covers):
                windows.request(reason)
        rows.label = windows.begin(rows.number)
        if triggers.used:
            for message in triggers.late(windows.beginning, rows.number):
                self.recording.remember(message)
        if rows.label in ("plain", "export"):  # what can wait does not run inside a window
            self._tidy(at)

    def _count_written(self) -> int | None:
        """Return what the process wrote since the last mark, without our own files; None while those are being written.

        The system is asked only now and then where no file was opened and nothing written of late: no other line of a mark costs as much.
        """
        background, marks, number = self.recording.background, self.recording.marks, self.rows.number
        if not (marks.wrote or self._wrote or self._spanning or number < ASK_INTERVAL_STEPS or number % ASK_INTERVAL_STEPS == 0):
            return 0
        busy, own, count = background.busy, background.written, self._written.read()
        known = not (busy or self._spanning) and count is not None and self._count is not None
        written = max(0, (count or 0) - (self._count or 0) - (own - self._own)) if known else None
        self._spanning, self._count, self._own = busy, count, own
        self._wrote, marks.wrote = written != 0, False
        return written
