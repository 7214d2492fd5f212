"""The marks of a training loop: which step runs, what each mark sets in motion, and what asks for a further window."""

from __future__ import annotations

import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from statistics import median
from types import FrameType
from typing import Any

from gpudiag.capture.environment.torch_settings import read_loader_settings
from gpudiag.capture.host_marks import RunObserver
from gpudiag.capture.parts import Parts
from gpudiag.capture.recording import Recording
from gpudiag.capture.schedule import Options
from gpudiag.capture.steps import PREEMPTED, WRITTEN, ProcCounter, StepRow, StepRows, read_clocks
from gpudiag.capture.windows import Windows
from gpudiag.model.bundle import PREEMPTED_SHARE, LoaderSettings
from gpudiag.model.notices import Notice, NoticeCode, make_notice

SETTLE_STEPS = 10
"""Plain steps at the beginning that are no yardstick: allocators, autotuning and caches are still warming up."""

REFERENCE_STEPS = 50
"""Plain steps after those whose median is the yardstick: enough that a step in 20 that saves or logs does not matter."""

RECENT_STEPS = 20
"""Plain steps compared with it: more than half of them must be slow, so no outlier, and no ten of them, asks for a window."""

COOL_DOWN_STEPS = 200
"""Plain steps after a window was asked for before another may be: a lasting rise is one event, not one every 20 steps."""

PREEMPTED_NS = 1_000_000
"""Time that the thread waits for a processor in a step from which that is marked: a time slice (sched(7)), or PREEMPTED_SHARE."""

PAUSE_NS = 2 * 10**9
"""Longest pause between two epochs over which a window goes on: a validation of minutes would fill the memory with its events."""


class SlowWatch:
    """Tells when the step time has risen by `rise` (0.3: 30 %), from the wall times of plain steps.

    After it has told, the yardstick is the level that it told of, until the step time has come back half of the way: a lasting rise is
    told once, a further or a new one again.
    """

    def __init__(self, rise: float) -> None:
        self._rise = rise
        self._reference: list[int] = []
        self._base = self._level = 0.0
        self._recent: deque[int] = deque(maxlen=RECENT_STEPS)
        self._rest = SETTLE_STEPS

    def add(self, wall_ns: int) -> float | None:
        """Return by what share the step time has risen, where this step makes it a rise worth telling."""
        if not self._base and self._rest:
            self._rest -= 1
        elif not self._base:
            self._reference.append(wall_ns)
            if len(self._reference) == REFERENCE_STEPS:
                self._base = self._level = max(1.0, float(median(self._reference)))
        else:
            self._recent.append(wall_ns)
            self._rest -= self._rest > 0
            if len(self._recent) < RECENT_STEPS:
                return None
            level = float(median(self._recent))
            if level < self._base * (1 + self._rise / 2):
                self._level = self._base
            if self._rest or level <= self._level * (1 + self._rise):
                return None
            self._level, self._rest = level, COOL_DOWN_STEPS
            return level / self._base - 1
        return None


class Triggers:
    """Everything that may ask for a further window in one session: step numbers, a signal, a step time that rose."""

    def __init__(self, options: Options) -> None:
        self._warm = options.warm
        self.steps = deque(options.at_steps)
        """Steps that a window was asked for, and that were not reached yet."""
        self._signal = options.on_signal
        # real-time signals have only a number
        self._signal_name = next((one.name for one in signal.Signals if one == options.on_signal), str(options.on_signal))
        self._came = self._installed = False
        self._previous: Any = None
        self._slow = None if options.on_slow is None else SlowWatch(options.on_slow)
        self._wanted: dict[str, int] = {}
        self.used = bool(self.steps or self._signal or self._slow)
        """Whether there is anything to ask at the marks."""

    def install(self, note: Callable[[str, BaseException | None], None]) -> None:
        """Listen for the signal; `note` is told where that is not possible."""
        if self._signal is None:
            return
        unwatched = f"signal {self._signal_name} is not watched"
        if threading.current_thread() is not threading.main_thread():
            note(f"{unwatched}: handlers can be set in the main thread only, and the session was entered in another", None)
            return
        self._previous = signal.getsignal(self._signal)
        if self._previous is None:
            note(f"{unwatched}: a handler that was not set by Python is there already", None)
            return
        signal.signal(self._signal, self._handle)
        self._installed = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        if callable(self._previous):
            self._previous(number, frame)

    def restore(self) -> None:
        """Put the handler back that was there before, unless someone has set another since, or this is not the main thread.

        To be called when the `with` block is left, not before: the signal might end the process.
        """
        if self._signal is None or not self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._installed = False
        if signal.getsignal(self._signal) == self._handle:
            signal.signal(self._signal, self._previous)

    def due(self, number: int, ended: StepRow | None = None, covered: Callable[[int], bool] = lambda _: False) -> list[str]:
        """Return what asks for a window now that step `number` begins, in words. A window asked for by number warms up before its step.

        `ended`: the step before; a plain one tells of the step time. `covered` says whether a window that runs will record the step so far
        ahead too: no other is asked for then.
        """
        out = []
        while self.steps and self.steps[0] - self._warm <= number:
            step = self.steps.popleft()
            if not covered(step - number):
                self._wanted[f"step {step}"] = step
                out.append(f"step {step}")
        if self._came:
            self._came = False
            out.append(f"signal {self._signal_name}")
        if self._slow and ended is not None and ended.window == "plain" and (rise := self._slow.add(ended.wall_ns)) is not None:
            out.append(f"step time rose {rise:.0%}".replace("%", " %"))
        return out

    def late(self, trigger: str, number: int) -> list[str]:
        """Return what to say about the window of `trigger`, which begins with step `number`: that it does not record the step asked for."""
        step, first = self._wanted.get(trigger), number + self._warm
        if step is None or first <= step:
            return []
        del self._wanted[trigger]  # said once: where epochs cut into it, the window is begun again
        return [f"at_steps: the window for step {step} records from step {first} on: it could not begin earlier"]


class Loop:
    """Counts the steps of one session. Its methods may raise: the session guards them.

    One thread owns the marks, the first that makes one: the profiler sees one thread, and so do the events. Marks of another are noted,
    not counted, until the owner has left its loop over steps(), or has ended.
    """

    def __init__(self, recording: Recording, windows: Windows, parts: Parts, triggers: Triggers, seen: RunObserver) -> None:
        self.rows = StepRows()
        self.loader: LoaderSettings | None = None
        """Of the loader given to steps()."""
        self._files, self._windows, self._parts, self._triggers, self._seen = recording, windows, parts, triggers, seen
        self.written, self.preempted = ProcCounter(*WRITTEN), ProcCounter(*PREEMPTED)
        self._waited = self.preempted.read()
        self._count = self.written.read()
        self._spanning = self._counting = self._manual = False
        self._entered_at = read_clocks()
        self._asked_ns = 0
        self._group, self._asked = 1, 0
        self._retrying = False
        self._batches: weakref.ref[object] | None = None
        self._first = self._left_ns = 0
        self._pause_ns: int | None = None
        self.after_mark: Callable[[int], None] = lambda _: None
        """Called last at every mark, with its time."""

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
        self._batches = weakref.ref(batches)
        self.loader = self.loader or read_loader_settings(loader)
        return True

    def notice(self) -> None:
        """End the epoch where its loop was left by `break` or an exception.

        To be called on the way: in the destructor of the loop's iterator a Ctrl-C that comes while a trace is written would be lost.
        """
        if self._counting and self._batches is not None and self._batches() is None:
            self.end_epoch()
        elif self._left_ns and time.perf_counter_ns() - self._left_ns > PAUSE_NS:
            self.end_window()

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
        """The step that runs has no end: it is not counted, and what follows belongs to no step.

        A window goes on in the next epoch where the pause between the last two was short: what runs meanwhile is recorded as well.
        """
        if self.rows.running:
            self._parts.call("interrupted")
        self._counting = self._files.events.muted = self.rows.running = False
        if not self._left_ns:
            short = self._pause_ns is not None and self._pause_ns <= PAUSE_NS
            if not short or not self._windows.rest(self.rows.number - self._first):
                self._windows.interrupt(self.rows.number)
            self._left_ns = time.perf_counter_ns()
        self._files.marks.step = None

    def end_window(self) -> None:
        """Close the window that goes on in the next epoch, if there is one: none comes, or not soon."""
        self._windows.interrupt(self.rows.number)

    def missing(self) -> list[Notice]:
        """Return what was planned and is not in the bundle."""
        notices = self._windows.missing()
        if steps := self._triggers.steps:
            text = f"at_steps: the run ended before step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
            notices.append(make_notice(NoticeCode.RUN_ENDED_EARLY, text=text))
        return notices

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
                self.rows.number += 1
                self.rows.dropped += 1
                self._windows.advance(ended=True)

    def _own(self) -> bool:
        """Return whether this thread owns the marks; it takes them over where nobody does."""
        here, events = threading.get_ident(), self._files.events
        if events.thread == here:
            return True
        if self._counting or self._manual:
            if any(thread.ident == events.thread for thread in threading.enumerate()):
                self._files.note("a second thread marks steps: those are not counted, the profiler sees one thread only", None)
                return False
            # The thread of the loop has ended in the middle of a step
            if self.rows.running:
                self._parts.call("interrupted")
            self.rows.running = False
            self._windows.interrupt(None)
        events.thread = self._seen.thread = here
        self.preempted.close()
        self.preempted = ProcCounter(*PREEMPTED)
        return True

    def _mark(self) -> None:
        rows, windows, triggers = self.rows, self._windows, self._triggers
        running = rows.running
        if not running:
            self._first = rows.number
            self._pause_ns = time.perf_counter_ns() - self._left_ns if self._left_ns else None
            self._left_ns = 0
        # What the process wrote since the last mark, without our own files; None while those are being written
        background = self._files.background
        busy = background.busy
        own, count = background.take_written(), self.written.read()
        unknown = busy or self._spanning or count is None or self._count is None
        written = None if unknown else max(0, (count or 0) - (self._count or 0) - own)
        self._spanning, self._count = busy, count
        windows.advance(ended=running)
        at, unix = read_clocks()
        row: StepRow | None = None
        before, self._waited = self._waited, self.preempted.read()
        if running:
            row = rows.end(at, None if rows.label == "export" else written)
            waited = (self._waited or 0) - (before or 0)
            if before is not None and waited >= max(PREEMPTED_NS, PREEMPTED_SHARE * row.wall_ns):
                self._files.marks.add("preempted", "", row.start_unix_ns, waited, None)
            self._parts.call("step_ended", row, at)
        rows.begin(at, unix)
        self._files.marks.step = rows.number
        self._parts.call("step_began", rows.number, at, unix)
        if triggers.used:
            for reason in triggers.due(rows.number, row, windows.covers):
                windows.request(reason)
        rows.label = windows.begin(rows.number)
        if triggers.used:
            for message in triggers.late(windows.beginning, rows.number):
                self._files.remember(message)
        self.after_mark(at)
