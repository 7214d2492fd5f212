"""The context manager that records a training loop into a bundle."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec

from gpudiag.capture import environment, folder, inductor
from gpudiag.capture.parts import Part, Parts
from gpudiag.capture.recording import Recording, encode_manifest
from gpudiag.capture.schedule import Schedule
from gpudiag.capture.seen import Seen, install
from gpudiag.capture.steps import StepRows, WrittenBytes, now, samples_of
from gpudiag.capture.windows import Windows
from gpudiag.capture.writer import write_atomic
from gpudiag.errors import MissingDependencyError, UsageError
from gpudiag.model.bundle import LoaderSettings, Manifest
from gpudiag.model.hardware import Device
from gpudiag.model.trace import ObservedDevice

Batch = TypeVar("Batch")

SEGMENT_NS = 10 * 10**9
"""A segment of step_records is closed at the first mark after this time: what a killed run can lose."""

JOIN_S = 60.0
"""How long the end of a session waits for files that are still being written."""

_active: Session | None = None


def _tool_version() -> str:
    try:
        return metadata.version("gpudiag")
    except metadata.PackageNotFoundError:
        return ""


def _require_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("recording a training loop needs torch", "pip install 'gpudiag[train]'") from error


def _check_lengths(**lengths: int) -> None:
    least = {"skip": 0, "warm": 1, "record": 1, "sites": 0}
    for name, value in lengths.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least[name]:
            raise UsageError(f"{name}={value!r} is not a number of steps", f"give a whole number of at least {least[name]}")


class Session:
    """Records the training loop inside a `with` block into a bundle; `path` is where.

    `skip` plain steps come first, then `warm` + `record` profiled steps with shapes (all times come from these), then a short
    window of `sites` steps with Python stacks (0: none). Mark the steps with `steps(loader)` or with `step()`. The run is never
    altered: a failure of the recording is one warning, and training goes on. Only a wrong call raises: UsageError, and
    MissingDependencyError without torch. `peaks` looks up measured peaks when the bundle is finished; nothing is measured here.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        skip: int = 5,
        warm: int = 2,
        record: int = 6,
        sites: int = 2,
        rank: int | None = None,
        peaks: Callable[[Manifest], Device | None] | None = None,
        parts: Sequence[Part] = (),
    ) -> None:
        _check_lengths(skip=skip, warm=warm, record=record, sites=sites)
        _require_torch()
        found, world = environment.rank_and_world()
        self.rank = found if rank is None else rank
        self.world_size = max(world, self.rank + 1)
        self._recording = Recording(Path(os.path.abspath(os.fspath(path))), self.rank, self.world_size)
        self._parts = Parts(parts, self._recording.note)
        self._lengths = (skip, warm, record, sites)
        self._peaks = peaks
        self._entered = self._started = False
        self._warned = False
        self._counting = False
        self._owner_pid = 0

    @property
    def path(self) -> Path:
        """Return the folder of the bundle."""
        return self._recording.path

    @property
    def warnings(self) -> list[str]:
        """Return what was warned of so far."""
        return self._recording.warnings

    # -- entering and leaving -------------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        global _active
        if _active is not None and _active._owner_pid == os.getpid():
            raise UsageError("a gpudiag session is already recording in this process", "leave it before starting another")
        if self._entered:
            raise UsageError("this gpudiag session has been used already", "make a new one")
        self._entered, self._owner_pid = True, os.getpid()
        try:
            self._start()
        except Exception as error:  # noqa: BLE001 - the training run comes first: without a bundle it runs all the same
            self._fail(error)
        except BaseException:
            self._release()
            raise
        _active = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        global _active
        if os.getpid() != self._owner_pid:
            return  # a child that the training loop forked leaves its copy of the block; the bundle is the parent's
        _active = None
        recording = self.recording
        try:
            self._recording.patches.restore()
            if recording:
                self._finish(kind)
        except Exception as failure:  # noqa: BLE001 - must neither stop training nor hide the loop's own exception
            self._fail(failure)
        finally:
            self._release()

    @property
    def recording(self) -> bool:
        """Return whether the session is writing a bundle: entered, not left, and nothing failed."""
        return self._recording.marks.on

    def _start(self) -> None:
        files, wanted = self._recording, self.path
        files.move(folder.choose(wanted, self.rank, self.world_size))
        folder.create(self.path, self.rank)
        self._machine = environment.machine()
        self._marks, self._events = files.marks, files.events
        self._seen = Seen(files.marks)
        self._rows, self._written = StepRows(), WrittenBytes()
        self._loader: LoaderSettings | None = None
        self._device: ObservedDevice | None = None
        self._manifest_due = False
        self._windows = self._make_windows()
        self._started = True
        self._manual = self._spanning = False
        self._count = self._written.read()
        if self.path != wanted:
            files.note(f"{wanted.name} already holds a recording: this one is in {self.path.name}", None)
        write_atomic(files.manifest_path(), self._encode_manifest(finished=False))
        self._begin_listening()

    def _make_windows(self) -> Windows:
        skip, warm, record, sites = self._lengths
        return Windows(
            self.path,
            rank=self.rank,
            schedule=Schedule(skip, warm, record, sites),
            lengths=(warm, record, sites),
            background=self._recording.background,
            warn=self._recording.note,
            on_recorded=self._window_recorded,
            parts=self._parts,
        )

    def _begin_listening(self) -> None:
        patches = self._recording.patches
        self._events.install(patches)
        install(patches, self._seen)
        self._windows.guard.install(patches)
        self._events.listeners.append(self._seen)
        self._parts.start(self._recording)
        self._marks.attach()
        self._entered_at = self._flushed_ns, _ = now()

    def _finish(self, kind: type[BaseException] | None) -> None:
        if not self._guarded(self._end_epoch):
            return
        self._marks.detach()
        if kind is not None:
            self.warnings.append(f"the training loop ended with {kind.__name__}")
        self._parts.call("close")
        self._flush(last=True)
        if not self._recording.background.join(JOIN_S):
            self._recording.note(f"files were still being written after {JOIN_S:.0f} s", None)
            return
        if self._recording.background.error is not None:
            raise self._recording.background.error
        self.warnings.extend(self._windows.missing())
        inductor.write(self.path, self.rank, self._recording.note)
        write_atomic(self._recording.manifest_path(), self._encode_manifest(finished=True))

    # -- the loop ---------------------------------------------------------------------------------------------------

    def steps(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Return a generator over `loader` in which every batch is one step: it lasts from asking for its batch to asking for the next.

        Call it once an epoch: numbering continues, and the time between two calls belongs to no step. Raises UsageError outside
        the `with` block.
        """
        if not self._entered:
            raise UsageError("steps() was called outside the session", "write `with Session(path) as prof:` round the loop")
        return self._generate(loader)

    def _generate(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        iterator = iter(loader)
        counting = self._guarded(self._begin_epoch, loader)
        held: list[Batch] = []  # emptied by each yield: a batch must not live longer than in a plain loop
        try:
            while True:
                asked = counting and self._guarded(self._ask)
                try:
                    held.append(next(iterator))
                except StopIteration:
                    return
                if asked:
                    self._guarded(self._received, held[0], loader)
                yield held.pop()
        finally:
            if counting:
                self._guarded(self._end_epoch)

    def step(self) -> None:
        """Mark the end of a training step, in loops without steps(). The first step begins when the session is entered.

        Raises UsageError outside the `with` block.
        """
        if not self._entered:
            raise UsageError("step() was called outside the session", "write `with Session(path) as prof:` round the loop")
        self._guarded(self._manual_mark)

    def _guarded(self, action: Callable[..., bool | None], *args: object) -> bool:
        """Return whether `action` was done; its failure ends the recording, never the training."""
        if not self.recording:
            return False
        try:
            return action(*args) is not False
        except Exception as error:  # noqa: BLE001 - the training run comes first
            self._fail(error)
            return False

    def _begin_epoch(self, loader: object) -> bool:
        if self._counting or self._manual:
            self._recording.note("steps() inside a loop that already marks its steps: those batches are not counted as steps", None)
            return False
        self._counting = True
        self._loader = self._loader or environment.loader_settings(loader)
        return True

    def _ask(self) -> None:
        self._mark()
        self._events.muted = True
        self._events.emit("batch_asked")
        self._asked_ns = time.perf_counter_ns()

    def _received(self, batch: object, loader: object) -> None:
        self._events.muted = False
        self._rows.wait_ns = time.perf_counter_ns() - self._asked_ns
        self._rows.samples = samples_of(batch)
        self._events.emit("batch_received", self._rows.wait_ns, batch, loader)
        self._marks.waited("steps()", self._rows.wait_ns, sys._getframe(1))

    def _end_epoch(self) -> None:
        """The step that runs has no end: it is not counted, and what follows belongs to no step."""
        if self._rows.running:
            self._parts.call("interrupted")
        self._counting = self._events.muted = self._rows.running = False
        self._windows.interrupt(self._rows.number)
        self._marks.step = None

    def _manual_mark(self) -> None:
        if self._counting:
            self._recording.note("step() inside a loop over steps(): its marks are not counted", None)
            return
        if not self._manual:
            self._manual = True
            self._rows.begin(*self._entered_at)
        self._rows.wait_ns, self._rows.samples = self._seen.take_waits()
        self._mark()

    def _mark(self) -> None:
        rows, windows = self._rows, self._windows
        running = rows.running
        written = self._written_since()
        if running:
            windows.step_done()
        windows.advance()
        at, unix = now()
        if running:
            self._parts.call("step_ended", rows.end(at, None if rows.label == "export" else written), at)
        rows.begin(at, unix)
        self._marks.step = rows.number
        self._parts.call("step_began", rows.number, at, unix)
        rows.label = windows.begin(rows.number)
        self._tidy(at)

    def _tidy(self, at: int) -> None:
        """Do what is due now and then: close segments, write the manifest, find out that writing failed."""
        if at - self._flushed_ns >= SEGMENT_NS:
            self._flush()
        if self._manifest_due:
            self._manifest_due = False
            manifest = self._encode_manifest(finished=False)
            self._recording.submit(self._recording.manifest_path(), lambda: manifest)
        if self._recording.background.error is not None:
            raise self._recording.background.error

    def _written_since(self) -> int | None:
        """Return what the process wrote since the last mark, without our own files; None while those are being written."""
        busy = self._recording.background.busy
        own, count = self._recording.background.take_written(), self._written.read()
        unknown = busy or self._spanning or count is None or self._count is None
        written = None if unknown else max(0, (count or 0) - (self._count or 0) - own)
        self._spanning, self._count = busy, count
        return written

    # -- files ------------------------------------------------------------------------------------------------------

    def _flush(self, *, last: bool = False) -> None:
        """Close the segments of the tables; the files are written in the background."""
        self._flushed_ns, _ = now()
        self._parts.call("flush")
        for table, columns in (("step_records", self._rows.take(unready=last)), ("host_marks", self._marks.take())):
            if columns is not None:
                self._recording.segment(table, columns)

    def _window_recorded(self) -> None:
        """Have the manifest written at the next mark: torch's settings are read on the training thread only."""
        self._manifest_due = True

    def _encode_manifest(self, *, finished: bool) -> bytes:
        manifest = self._manifest(finished)
        if finished and self._peaks is not None:
            manifest = msgspec.structs.replace(manifest, peaks=self._known_peaks(manifest), warnings=tuple(self.warnings))
        return encode_manifest(manifest)

    def _known_peaks(self, manifest: Manifest) -> Device | None:
        try:
            return None if self._peaks is None else self._peaks(manifest)
        except Exception as error:  # noqa: BLE001 - a lookup that fails leaves the peaks unknown
            self._recording.note("the measured peaks could not be looked up", error)
            return None

    def _manifest(self, finished: bool) -> Manifest:
        seen = self._seen
        self._device = environment.observed_device()
        if self._marks.dropped:
            self._recording.remember(f"{self._marks.dropped} host marks were dropped: too many in one segment")
        manifest = Manifest(
            tool_version=_tool_version(),
            created_unix_ns=self._recording.created_ns,
            finished=finished,
            device_kind="gpu" if self._device is not None else "cpu",
            device=self._device,
            machine=self._machine,
            settings=environment.settings(tuple(sorted(seen.autocast)), seen.optimizers, self._loader or seen.loader),
            windows=tuple(self._windows.recorded.values()),
            steps=self._rows.number,
            rank=self.rank,
            world_size=self.world_size,
        )
        return msgspec.structs.replace(manifest, **self._parts.manifest(), warnings=tuple(self.warnings))

    # -- failures ---------------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        """Stop recording for good, after one warning."""
        self._release()
        if not self._warned:
            self._warned = True
            self._recording.note("recording was switched off, training goes on", error)

    def _release(self) -> None:
        """Take everything back that the session has put into the process."""
        self._recording.marks.detach()
        self._counting = False
        self._recording.patches.restore()
        self._parts.drop()
        if self._started:
            self._windows.drop()
            self._written.close()
