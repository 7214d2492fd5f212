"""The context manager that records a training loop into a bundle."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from gpudiag.capture import bundle_folder, environment, inductor, schedule
from gpudiag.capture.bundle_folder import TRIAL_VARIABLE, read_launch_id
from gpudiag.capture.environment import torch_settings
from gpudiag.capture.host_marks import RunObserver, install_run_hooks
from gpudiag.capture.loop import Loop, Triggers
from gpudiag.capture.parts import Part, Parts
from gpudiag.capture.recording import Recording, encode_manifest, write_atomic
from gpudiag.capture.schedule import Schedule
from gpudiag.capture.steps import Batches, LoopExit, SizedBatches, read_clocks
from gpudiag.capture.torch_profiler import silence_kineto
from gpudiag.capture.windows import Windows
from gpudiag.errors import MissingDependencyError, UsageError
from gpudiag.model.bundle import Manifest, RankState
from gpudiag.model.hardware import Device, ObservedDevice
from gpudiag.model.notices import NoticeCode

Batch = TypeVar("Batch")

SEGMENT_NS = 10 * 10**9
"""A segment of step_records is closed at the first mark outside windows after this time: what a killed run can lose."""

JOIN_S = 60.0
"""How long the end of a session waits for files that are still being written."""

_active: Session | None = None
_entering = threading.RLock()


class Session:
    """Records the training loop inside a `with` block into a bundle; `path` is where.

    `given`: when to profile, the fields of options.Options (gpudiag.profile says what each does). Mark the steps with `steps(loader)` or
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
        parts: Sequence[Part] = (),
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
        self._parts = Parts(parts, self._recording.note)
        self._triggers = Triggers(self.options)
        self._peaks, self._gives_way = peaks, gives_way
        self._entered = self._started = False
        self._warned = False
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

    def _start(self) -> None:
        files, wanted = self._recording, Path(os.path.abspath(self.path))
        self._launch, self._version = read_launch_id() if self.world_size > 1 else "", ""
        with suppress(metadata.PackageNotFoundError):
            self._version = metadata.version("gpudiag")
        files.move(bundle_folder.choose_folder(wanted, bundle_folder.Claim(self.rank, self.world_size, self._launch)))
        for folder in ("trace", *(f"{name}/rank{self.rank}" for name in bundle_folder.SEGMENT_FOLDERS.values())):
            (self.path / folder).mkdir(parents=True, exist_ok=True)
        self._machine, self._host = environment.read_machine(), environment.name_node(self.world_size)
        self._marks, self._events = files.marks, files.events
        self._seen = RunObserver(files.marks)
        self._device: ObservedDevice | None = None
        self._windows = Windows(
            self.path,
            rank=self.rank,
            schedule=Schedule(self.options),
            background=self._recording.background,
            warn=self._recording.note,
            parts=self._parts,
            together=self.world_size > 1,
        )
        self._loop = Loop(files, self._windows, self._parts, self._triggers, self._seen)
        self._loop.after_mark = self._tidy
        self._started = True
        if self.path != wanted:
            files.note(f"{wanted.name} already holds a recording: this one is in {self.path.name}", None)
        write_atomic(files.manifest_path(), self._encode_manifest(finished=False))
        # Listen
        patches = files.patches
        atexit.register(self._at_exit)
        patches.on_restore(lambda: atexit.unregister(self._at_exit))
        self._events.install(patches)
        install_run_hooks(patches, self._seen)
        self._windows.guard.install(patches)
        silence_kineto(patches, errors_too=False)
        self._events.add(LoopExit(lambda: self._mark("notice")))
        self._events.add(self._seen)
        self._parts.start(files)
        self._triggers.install(files.note)
        self._marks.install(patches)
        self._marks.attach()
        self._flushed_ns, _ = read_clocks()

    def _at_exit(self) -> None:
        """Finish what a prompt or a generator that was not exhausted left open; the loop of another thread may still run."""
        if threading.get_ident() == self._events.thread and self._recording.remember("the program ended inside the recording"):
            self.__exit__(None, None, None)

    def _finish(self, kind: type[BaseException] | None) -> None:
        files = self._recording
        if not (self._mark("end_epoch") and self._mark("end_window")):
            return
        self._marks.detach()
        if kind is not None:
            files.remember(f"the training loop ended with {kind.__name__}", NoticeCode.LOOP_ENDED_BY_ERROR)
        self._parts.call("close")
        self._flush(last=True)
        if not files.background.join(JOIN_S):
            files.note(f"files were still being written after {JOIN_S:.0f} s", None)
            return
        if files.background.error is not None:
            raise files.background.error
        for notice in self._loop.missing():
            files.remember(str(notice.params["text"]), notice.code)
        inductor.write_generated_code(self.path, self.rank, files.note)
        write_atomic(files.manifest_path(), self._encode_manifest(finished=True))
        if self.rank == 0:
            with suppress(OSError):  # the finished manifest now says whose the folder is
                (self.path / bundle_folder.CLAIM_NAME).unlink()

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
        kind = SizedBatches if isinstance(loader, Sized) else Batches
        return kind(loader, accumulation, self._mark)

    def _mark(self, name: str, *args: object) -> bool:
        """Call the method `name` of the loop; return whether it was done. Its failure ends the recording, never the training."""
        if not self.recording:
            return False
        try:
            return getattr(self._loop, name)(*args) is not False
        except Exception as error:  # noqa: BLE001 - the training run comes first
            self._fail(error)
            return False

    def step(self) -> None:
        """Mark the end of a training step, in loops without steps(). The first step begins when the session is entered.

        Raises UsageError outside the `with` block.
        """
        self._check_entered("step()")
        self._mark("step")

    def pause(self) -> None:
        """Say that what follows (validation, the time between epochs) belongs to no step: the next step() begins one and ends none.

        For loops without steps(). A step that runs is dropped: mark its end with step() first. Raises UsageError outside the `with` block.
        """
        self._check_entered("pause()")
        self._mark("pause")

    def _check_entered(self, name: str) -> None:
        if not self._entered:
            raise UsageError(f"{name} was called outside the session", "write `with Session(path) as prof:` round the loop")

    def _tidy(self, at: int) -> None:
        """Do what is due now and then: close segments, write the manifest, find out that writing failed."""
        outside = self._loop.rows.label in ("plain", "export")  # what can wait does not run inside a window
        if outside and at - self._flushed_ns >= SEGMENT_NS:
            self._flush()
        if outside and self._windows.unwritten:  # a window was recorded: torch's settings are read on the training thread only
            self._windows.unwritten = False
            manifest = self._encode_manifest(finished=False)
            self._recording.submit(self._recording.manifest_path(), lambda: manifest)
        if self._recording.background.error is not None:
            raise self._recording.background.error

    def _flush(self, *, last: bool = False) -> None:
        """Close the segments of the tables; the files are written in the background."""
        self._flushed_ns, _ = read_clocks()
        self._parts.call("flush")
        for table, columns in (("step_records", self._loop.rows.take(unready=last)), ("host_marks", self._marks.take())):
            if columns is not None:
                self._recording.segment(table, columns)

    def _encode_manifest(self, *, finished: bool) -> bytes:
        manifest = self._manifest(finished)
        if not finished:
            return encode_manifest(manifest)
        peaks: Device | None = None
        try:
            peaks = None if self._peaks is None else self._peaks(manifest)
        except Exception as error:  # noqa: BLE001 - a lookup that fails leaves the peaks unknown
            self._recording.note("the measured peaks could not be looked up", error)
        ranks: tuple[RankState, ...] = ()
        if self.rank == 0 and self.world_size > 1:
            # How long rank 0 waits for the other ranks, which leave the loop at about the same time, to name those that finished
            deadline = time.monotonic() + 1.0
            while True:
                ranks = bundle_folder.list_other_ranks(self.path, self.rank)
                if all(state.finished for state in ranks) or time.monotonic() > deadline:
                    break
                time.sleep(0.02)
        noted = {"warnings": tuple(self.warnings), "notices": self._recording.notices()}  # that of the peaks too
        return encode_manifest(msgspec.structs.replace(manifest, peaks=peaks, ranks=ranks, **noted))

    def _manifest(self, finished: bool) -> Manifest:
        seen = self._seen
        self._device = environment.read_observed_device()
        if self._marks.dropped:
            self._recording.remember(f"{self._marks.dropped} host marks were dropped: too many in one segment")
        manifest = Manifest(
            tool_version=self._version,
            created_unix_ns=self._recording.created_ns,
            finished=finished,
            device_kind="gpu" if self._device is not None else "cpu",
            device=self._device,
            machine=self._machine,
            settings=torch_settings.read_settings(tuple(sorted(seen.autocast)), seen.optimizers, self._loop.loader or seen.loader),
            windows=tuple(self._windows.recorded.values()),
            steps=self._loop.rows.number - self._loop.rows.dropped,
            rank=self.rank,
            world_size=self.world_size,
            host=self._host,
            launch=self._launch,
        )
        known = self._parts.manifest()
        if "settings" in known:  # as they stood in a window: what the program switches later is not what was recorded
            known["settings"] = torch_settings.combine_settings(known["settings"], manifest.settings)
        return msgspec.structs.replace(manifest, **known, warnings=tuple(self.warnings), notices=self._recording.notices())

    def _fail(self, error: BaseException) -> None:
        parts = self._parts.manifest() if self._started and not self._warned else {}  # those that are ended know nothing more
        self._release()
        if not self._warned:
            self._warned = True
            self._recording.note("recording was switched off, training goes on", error, NoticeCode.RECORDING_SWITCHED_OFF)
            # Leave the last records and a manifest that says why the bundle ends here, where they can still be written
            if self._started:
                with suppress(Exception):
                    self._flush(last=True)
                with suppress(Exception):
                    manifest = msgspec.structs.replace(self._manifest(finished=False), **parts)
                    write_atomic(self._recording.manifest_path(), encode_manifest(manifest))

    def _release(self) -> None:
        """Take everything back that the session has put into the process, but the handler of a signal that might end it."""
        self._recording.marks.detach()
        self._recording.patches.restore()
        self._parts.drop()
        if self._started:
            self._windows.drop()
            self._loop.written.close()
            self._loop.preempted.close()
