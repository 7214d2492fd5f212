"""The context manager that records a training loop into a bundle."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from gpudiag.bundle.layout import SEGMENT_FOLDERS
from gpudiag.bundle.writer import write_atomic
from gpudiag.capture import environment, inductor, schedule
from gpudiag.capture.hooks import Hooks
from gpudiag.capture.host_marks import install_run_hooks
from gpudiag.capture.launch import CLAIM_NAME, TRIAL_VARIABLE, Claim, choose_folder, read_launch_id
from gpudiag.capture.loop import Batches, Loop, SizedBatches
from gpudiag.capture.manifest import ManifestEncoder
from gpudiag.capture.recording import Recording
from gpudiag.capture.schedule import Schedule, Triggers
from gpudiag.capture.torch_profiler import silence_kineto
from gpudiag.capture.windows import Windows
from gpudiag.errors import MissingDependencyError, UsageError
from gpudiag.model.bundle import Manifest
from gpudiag.model.hardware import Device
from gpudiag.model.notices import NoticeCode

Batch = TypeVar("Batch")

SEGMENT_NS = 10 * 10**9
"""A segment of step_records is closed at the first mark outside windows after this time: what a killed run can lose."""

JOIN_S = 60.0
"""How long the end of a session waits for files that are still being written."""

_active: Session | None = None
_entering = threading.RLock()


_AROUND = 3
"""Steps of a short loop that are not profiled: the first, one that warms the profiler up, and one after."""


class Session:
    """Records the training loop inside a `with` block into a bundle; `path` is where.

    `given`: when to profile, the fields of schedule.Options (gpudiag.profile says what each does). Mark the steps with `steps(loader)` or
    with `step()`. The run is never altered: a failure of the recording is one warning, and training goes on. Only a wrong call raises:
    UsageError, and MissingDependencyError without torch. `peaks` looks up measured peaks when the bundle is finished; nothing is measured
    here. `gives_way`: another session of this process may begin; this one then ends first. In a process that `gpudiag ab` measures any
    other session records nothing: it would slow some steps of a trial down, and end the recording that a search begins with.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int | None = None,
        peaks: Callable[[Manifest], Device | None] | None = None,
        parts: Sequence[Hooks] = (),
        gives_way: bool = False,
        **given: Any,
    ) -> None:
        self.options = schedule.check_options(given)
        try:
            import torch  # noqa: F401
        except ImportError as error:
            raise MissingDependencyError("recording a training loop needs torch", "pip install 'gpudiag[train]'") from error
        found, world = environment.read_rank_and_world()
        if rank is not None and not schedule.is_whole(rank, 0):
            raise UsageError(f"rank={rank!r} is not the rank of a process", "give a whole number from 0, or leave it out: RANK is read")
        self.rank = found if rank is None else rank
        self.world_size = max(world, self.rank + 1)
        folder = Path(os.fspath(path))
        with suppress(OSError):  # the current directory was deleted: that must not stop a run
            folder = Path(os.path.abspath(folder))
        self._recording = Recording(folder, self.rank, self.world_size)
        self._marks = self._recording.marks
        self._parts, self._triggers = tuple(parts), Triggers(self.options)
        self._windows = Windows(self._recording, Schedule(self.options))
        self._loop = Loop(self._recording, self._windows, self._triggers, self._fail, self._tidy)
        self._peaks, self._gives_way = peaks, gives_way
        self._entered = self._started = False
        self._warned = self._quiet = False
        self._owner_pid = 0

    @property
    def path(self) -> Path:
        """Return the folder of the bundle."""
        return self._recording.path

    @property
    def warnings(self) -> list[str]:
        """Return what was warned of so far."""
        return self._recording.warnings

    def __enter__(self) -> Session:
        global _active
        if TRIAL_VARIABLE in os.environ and not self._gives_way:
            self._entered = True
            return self
        with _entering:  # one session of the process
            other = _active if _active is not None and _active._owner_pid == os.getpid() else None
            if other is not None and not other._gives_way:
                raise UsageError("a gpudiag session is already recording in this process", "leave it before starting another")
            if self._entered:
                raise UsageError("this gpudiag session has been used already", "make a new one")
            if other is not None:
                other._recording.remember("the program began a gpudiag session of its own: this recording ended there")
                other.__exit__(None, None, None)
            self._entered, self._owner_pid = True, os.getpid()
            _active = self
        try:
            self._start()
        except Exception as error:  # noqa: BLE001 - the training run comes first: without a bundle it runs all the same
            self._fail(error)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if os.getpid() != self._owner_pid:
            return  # a child that the training loop forked leaves its copy of the block; the bundle is the parent's
        recording = self.recording
        try:
            self._recording.patches.restore()
            if recording:
                self._finish(kind)
        except Exception as failure:  # noqa: BLE001 - must neither stop training nor hide the loop's own exception
            self._fail(failure)
        finally:
            self._leave()

    def _leave(self) -> None:
        global _active
        try:
            self._release()
            self._triggers.restore()
        finally:
            if _active is self:
                _active = None

    @property
    def recording(self) -> bool:
        """Return whether the session is writing a bundle: entered, not left, and nothing failed."""
        return self._recording.marks.on

    @property
    def has_recorded_all(self) -> bool:
        """Return whether all windows are recorded and written, none is planned, or none can be recorded any more."""
        return not self.recording or (self._windows.finished and not self._recording.background.busy)

    def steps(self, loader: Iterable[Batch], *, accumulation: int = 1) -> Iterator[Batch]:
        """Return an iterator over `loader` in which every `accumulation` batches are one step; it has a length where `loader` has one.

        A step lasts from asking for its first batch to asking for the first of the next. What is left at the end of `loader` and fills no
        step is counted as none, nor is the step in which the loop is left. Call it once an epoch: numbering continues, and the time
        between two calls belongs to no step. Where `loader` raises and the loop goes on, the next batch takes the place of the missing
        one. Raises UsageError outside the `with` block.
        """
        self._check_entered("steps()")
        if not schedule.is_whole(accumulation, 1):
            raise UsageError(f"accumulation={accumulation!r} is not a number of batches", "give the batches of one optimizer step")
        return (SizedBatches if isinstance(loader, Sized) else Batches)(loader, accumulation, self._loop)

    def step(self) -> None:
        """Mark the end of a training step, in loops without steps(). The first step begins when the session is entered.

        Raises UsageError outside the `with` block.
        """
        self._check_entered("step()")
        self._loop.step()

    def pause(self) -> None:
        """Say that what follows (validation, the time between epochs) belongs to no step: the next step() begins one and ends none.

        For loops without steps(). A step that runs is dropped: mark its end with step() first. Raises UsageError outside the `with` block.
        """
        self._check_entered("pause()")
        self._loop.pause()

    def _check_entered(self, name: str) -> None:
        if not self._entered:
            raise UsageError(f"{name} was called outside the session", "write `with Session(path) as prof:` round the loop")

    def _start(self) -> None:
        files, wanted = self._recording, Path(os.path.abspath(self.path))
        launch = read_launch_id() if self.world_size > 1 else ""
        files.move(choose_folder(wanted, Claim(self.rank, self.world_size, launch)))
        for folder in ("trace", *(f"{name}/rank{self.rank}" for name in SEGMENT_FOLDERS.values())):
            (self.path / folder).mkdir(parents=True, exist_ok=True)
        if self.path != wanted:
            files.note(f"{wanted.name} already holds a recording: this one is in {self.path.name}", None)
        self._manifest = ManifestEncoder(files, self._loop, self._windows, launch, self._peaks)
        files.events.thread = threading.get_ident()
        files.events.start(self._loop, files)
        self._started = True
        write_atomic(files.manifest_path(), self._manifest.encode(finished=False))
        # Listen
        patches = files.patches
        atexit.register(self._at_exit)
        patches.on_restore(lambda: atexit.unregister(self._at_exit))
        files.events.install(patches)
        install_run_hooks(patches, self._loop.seen, files.events)
        self._windows.guard.install(patches)
        silence_kineto(patches, errors_too=False)
        files.events.add(self._loop.seen)
        for part in self._parts:
            files.events.start(part, files)
        self._triggers.install(files.note)
        self._marks.install(patches)
        self._marks.attach()
        self._flushed_ns = time.perf_counter_ns()

    def _finish(self, kind: type[BaseException] | None) -> None:
        files = self._recording
        if not self._loop.end():
            return
        self._marks.detach()
        if kind is not None:
            files.remember(f"the training loop ended with {kind.__name__}", NoticeCode.LOOP_ENDED_BY_ERROR)
        files.events.close()
        self._flush(last=True)
        if not files.background.join(JOIN_S):
            files.note(f"files were still being written after {JOIN_S:.0f} s", None)
            return
        if files.background.error is not None:
            raise files.background.error
        for notice in self._loop.list_missing():
            files.remember(str(notice.params["text"]), notice.code)
        inductor.write_generated_code(self.path, self.rank, files.note)
        write_atomic(files.manifest_path(), self._manifest.encode(finished=True))
        if kind is None and self.rank == 0 and not (self._gives_way or self._quiet) and (short := self.describe_short_loop()):
            self._recording.say(f"gpudiag: {short}")
        if self.rank == 0:
            with suppress(OSError):  # the finished manifest now says whose the folder is
                (self.path / CLAIM_NAME).unlink()

    def describe_short_loop(self, made: int | None = None) -> str | None:
        """Describe why nothing was profiled where the loop ended before its profiled steps, and what fits so few; None elsewhere.

        `made`: steps of a script under `gpudiag run`, with those that it took to tell what a step is (0: it marks them itself); None: a
        session of its own.
        """
        asked, steps = self.options, self._loop.rows.number - self._loop.rows.dropped
        if not asked.repeat or self._windows.recorded or steps >= asked.skip + asked.warm + asked.record:
            return None
        untold = max(0, (made or 0) - self._loop.rows.number)
        said = "1 step was" if untold + steps == 1 else f"{untold + steps} steps were"
        if made is None:
            fitting = f"skip=1, warm=1, record={min(steps - _AROUND, asked.record)}, sites=0"
            shorter = f", or gpudiag.profile(..., {fitting}) for so few" if steps > _AROUND else ""
            return f"{said} too few to profile any: let the loop run for about 50{shorter}"
        told = f"{untold} to tell what a step is, " if untold else ""
        needed = f"{told}{asked.skip} that are skipped, {asked.warm} to warm up, {asked.record} to record"
        fitting = f"--skip 0 --warm 1 --record {min(steps - 2, asked.record)} --sites 0"
        shorter = f", or record them with gpudiag run {fitting}" if steps > 2 else ""
        return f"{said} too few to profile any ({needed}): let the script make about 50{shorter}"

    def _at_exit(self) -> None:
        """Finish what a prompt or a generator that was not exhausted left open; the loop of another thread may still run."""
        if threading.get_ident() == self._recording.events.thread and self._recording.remember("the program ended inside the recording"):
            self._quiet = True  # nobody reads what is said while Python ends
            self.__exit__(None, None, None)

    def _tidy(self, at_ns: int) -> None:
        """Do what may wait for a mark outside windows."""
        if at_ns - self._flushed_ns >= SEGMENT_NS:
            self._flush()
        if self._windows.unwritten:  # a window was recorded: torch's settings are read on the training thread only
            self._windows.unwritten = False
            manifest = self._manifest.encode(finished=False)
            self._recording.submit(self._recording.manifest_path(), lambda: manifest)
        if self._recording.background.error is not None:
            raise self._recording.background.error

    def _flush(self, *, last: bool = False) -> None:
        self._flushed_ns = time.perf_counter_ns()
        self._recording.events.flush()
        for table, columns in (("step_records", self._loop.rows.take(unready=last)), ("host_marks", self._marks.take())):
            if columns is not None:
                self._recording.segment(table, columns)

    def _fail(self, error: BaseException) -> None:
        manifest, files = b"", self._recording
        if not self._warned:
            self._warned = True
            files.note("recording was switched off, training goes on", error, NoticeCode.RECORDING_SWITCHED_OFF)
            with suppress(Exception):  # before the parts are ended: then they know nothing more
                manifest = self._manifest.encode(finished=False) if self._started else b""
        self._release()
        if manifest:  # leave the last records and a manifest that says why the bundle ends here, where they can still be written
            with suppress(Exception):
                self._flush(last=True)
            with suppress(Exception):
                write_atomic(files.manifest_path(), manifest)

    def _release(self) -> None:
        """Take everything back that the session has put into the process, but the handler of a signal that might end it."""
        self._marks.detach()
        self._recording.patches.restore()
        self._recording.events.drop()
        self._windows.drop()
