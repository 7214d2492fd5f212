"""The profiled windows of a run: opens, advances, closes and exports them at the marks. No failure here leaves this module."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gpudiag.bundle.layout import SITES_INDEX, trace_name
from gpudiag.bundle.writer import CHUNK_BYTES, compress_trace, export_trace
from gpudiag.capture.call_lines import Call, add_call_lines
from gpudiag.capture.recording import Recording
from gpudiag.capture.schedule import PLAIN_SLOT, Schedule, StepLabel
from gpudiag.capture.torch_profiler import ProfilerGuard, ProfilerWindow
from gpudiag.model.bundle import Window
from gpudiag.model.notices import Notice, NoticeCode


class Windows:
    """Follows the schedule; `recorded` holds the windows whose traces are in the bundle."""

    def __init__(self, recording: Recording, schedule: Schedule) -> None:
        self.recorded: dict[int, Window] = {}
        self.unwritten = False
        """Whether `recorded` has grown since the manifest was written; set in the background."""
        self.beginning = ""
        """What asked for the window whose first step is the present one; empty where none begins."""
        self.guard = ProfilerGuard(self._step_aside)
        self._recording, self._schedule = recording, schedule
        self._together = recording.world_size > 1
        """Other ranks record the same steps, so that no window waits for what may take each rank another time."""
        self._live: ProfilerWindow | None = None
        self._packing = self._exports = self._largest = 0
        self._lost: Exception | None = None
        self._exported: dict[int, int] = {}
        self._off = False

    @property
    def finished(self) -> bool:
        """Return whether no window runs, is planned or waits to be compressed."""
        return self._live is None and not self._packing and self._schedule.finished

    def request(self, trigger: str) -> None:
        """Ask for a further timing window; `trigger` says why."""
        if not self._schedule.request(trigger):
            most = self._schedule.options.max_windows
            text = f"{most} timing windows are recorded or planned: no further ones, whatever asks for them (max_windows={most})"
            self._recording.note(text, None)

    def covers(self, ahead: int) -> bool:
        """Return whether the timing window that runs will record the step that is `ahead` of the present one too."""
        return self._live is not None and self._schedule.covers(ahead)

    def advance(self, *, ended: bool) -> None:
        """Move the schedule on where a step has `ended` (or was dropped), and begin the annotation of the next, if it is inside the window.

        Call this just before taking the mark.
        """
        slot = self._schedule.slot
        if ended and (slot.window is None or slot.label == "export" or self._live is not None):
            self._schedule.complete()  # else the window waits for another profiler to stop
            slot = self._schedule.slot
        if self._live is not None and slot.window == self._live.index and slot.label != "export":
            self._protected(self._live.step if ended else self._live.resume)

    def begin(self, step: int) -> StepLabel:
        """Return the label of the step that begins; opens or closes a window. Call this just after taking the mark."""
        self._heed()
        self.beginning = ""
        slot, window = self._schedule.slot, self._live
        if window is not None and slot.label == "export":
            if self._protected(window.step) and self._stop(window):
                self._protected(lambda: self._export(window, window.planned.record, incomplete=None))
            return "export"
        if window is None and slot.window is not None and slot.label != "export":
            if not slot.first:
                self._schedule.interrupt()  # another profiler made ours step aside
            self._protected(lambda: self._open(step))
            slot = PLAIN_SLOT if self._live is None else self._schedule.slot
        return "export" if slot.label == "plain" and self._packing else slot.label

    def rest(self, steps: int) -> bool:
        """Return whether the window goes on in the next epoch: it is longer than an epoch, of which this one had `steps` steps.

        Not beside other ranks, whose windows may end.
        """
        window, slot = self._live, self._schedule.slot
        if window is None or self._together or slot.label == "export" or steps >= window.planned.warm + window.planned.record:
            return False
        return self._protected(window.rest)

    def interrupt(self, step: int | None) -> None:
        """Close the window at the end of an epoch or of the run, keeping what is complete; `step` has begun and will not end.

        None: the thread that began the window is no more, and the profiler sees one thread only. Nothing of it is kept.
        """
        window = self._live
        if window is not None:
            done = 0 if step is None else self._schedule.recorded
            if self._stop(window) and done:
                self._protected(lambda: self._export(window, done, incomplete=step))
        self._schedule.interrupt()

    def drop(self) -> None:
        """Stop a window that is being recorded and forget it."""
        window, self._live = self._live, None
        self._schedule.off()
        # Stop after a failure that is reported already
        if window is not None:
            with suppress(Exception):
                window.stop()

    def missing(self) -> list[Notice]:
        """Return what was planned and is not in the bundle."""
        self._heed()
        return [] if self._off else self._schedule.missing({index: window.steps for index, window in self.recorded.items()})

    def _open(self, step: int) -> None:
        slot = self._schedule.slot
        if not slot.first or slot.window is None:
            return
        planned = self._schedule.begun[slot.window]
        if self._packing and not self._together and planned.index > SITES_INDEX and planned.index not in self._exported:
            return  # compressing an earlier trace takes processor time from the steps: a further window waits for its end
        if self.guard.foreign:
            self._recording.note("another torch profiler is running: recording waits until it has stopped", None, NoticeCode.OTHER_PROFILER)
            return
        profile_memory = any(part.profile_memory for part in self._recording.events.parts)
        self._live = ProfilerWindow(planned, step, guard=self.guard, profile_memory=profile_memory)
        self._live.start()  # after it is known: a Ctrl-C in here must not leave a profiler that nobody stops
        self.beginning = planned.trigger
        self._recording.events.window_began(planned.index, planned.kind)

    def _stop(self, window: ProfilerWindow) -> bool:
        stopped = self._protected(window.stop)
        self._live = None
        self._recording.events.window_ended(window.index, window.kind)
        return stopped

    def _step_aside(self) -> None:
        if self._live is not None:
            self._stop(self._live)
            message = "another torch profiler was started inside a window: the window was given up"
            self._recording.note(message, None, NoticeCode.OTHER_PROFILER)

    def _export(self, window: ProfilerWindow, steps: int, *, incomplete: int | None) -> None:
        if self._exported.get(window.index, 0) >= steps:
            return  # an earlier attempt got as far
        name = trace_name(self._recording.rank, window.index)
        target = self._recording.path / name
        self._exports += 1  # an earlier attempt may still be in the writer's hands
        plain = target.with_name(f".{target.name.removesuffix('.json.gz')}-{self._exports}.json")
        self._largest = max(self._largest, export_trace(window.export, plain, self._largest))
        self._exported[window.index] = steps
        found = Window(
            rank=self._recording.rank,
            index=window.index,
            kind=window.kind,
            file=name,
            first_step=window.first_recorded,
            steps=steps,
            record_shapes=True,
            with_stack=window.with_stack,
            trigger=window.planned.trigger,
            planned=window.planned.record,
        )
        self._packing += 1
        calls, thread = window.calls, threading.get_native_id()
        self._recording.background.submit(lambda: self._pack(found, plain, target, incomplete, calls, thread))

    def _pack(self, window: Window, plain: Path, target: Path, incomplete: int | None, calls: list[Call], thread: int) -> int:
        """Compress in the background, with the lines of calls; the annotation of a step that did not end must not read as a step."""
        label = target.name.removesuffix(".json.gz")
        replacements = [(os.fsencode(plain), label.encode()), (json.dumps(str(plain))[1:-1].encode(), label.encode())]
        if incomplete is not None:
            replacements.append((f'"ProfilerStep#{incomplete}"'.encode(), f'"incomplete step {incomplete}"'.encode()))
        try:
            with open(plain, "rb") as file:
                replacements.append(add_call_lines(file.read(CHUNK_BYTES), calls, os.getpid(), thread))
            written = compress_trace(plain, target, replacements)
            self.recorded = self.recorded | {window.index: window}
            self.unwritten = True
            return written
        except Exception as error:  # noqa: BLE001 - it costs the traces, not the records of the steps; the training thread says so
            self._lost = error
            return 0
        finally:
            self._packing -= 1

    def _protected(self, action: Callable[[], object]) -> bool:
        """Return whether `action` succeeded; a failure switches profiling off for the rest of the run."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a failing profiler must not stop the training run
            self._give_up(error)
            return False
        return True

    def _heed(self) -> None:
        """Switch profiling off where a trace could not be compressed in the background."""
        error, self._lost = self._lost, None
        if error is not None:
            if self._live is not None:
                self._stop(self._live)
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._off = True
        self.drop()
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)  # the disk, or the share of it that one may use
        self._recording.note(f"{'the disk is full: ' if full else ''}profiling was switched off", error, NoticeCode.PART_SWITCHED_OFF)
