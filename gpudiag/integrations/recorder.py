"""Records the trainings of a framework, driven by the framework's own hooks."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpudiag.capture.parts import Part
from gpudiag.capture.session import Session
from gpudiag.integrations.defaults import AnyPath, new_session
from gpudiag.integrations.left import Place
from gpudiag.warned import warn

LEFT = "the training ended early: it raised or was stopped, its framework did not say which"
"""The manifest's warning where a framework has no hook for a training that raises."""

_recording: weakref.ref[Recorder] | None = None
"""The recorder whose recording began last in this process."""


class Recorder:
    """One bundle for each training, from begin() to end(). Steps exist only between enter_epoch() and leave_epoch().

    Raises UsageError when it is made with wrong options; afterwards nothing raises: a failure is one warning, training goes on.
    Can be copied and pickled (frameworks start other processes with their callbacks): a copy has no recording of its own.
    """

    def __init__(self, path: AnyPath, options: Mapping[str, Any]) -> None:
        self._path, self._options = os.fspath(path), dict(options)
        self._session: Session | None = None
        self._loop: Place | None = None
        self.in_epoch = False
        """Whether the steps of an epoch are being taken."""
        self.path: Path | None = None
        """Folder of the bundle of the present or the last training; None before the first."""
        new_session(self._path, self._options, "GpudiagCallback")  # a wrong option is told here, where the user wrote it

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_session": None, "_loop": None, "in_epoch": False}

    def begin(self, more: Sequence[Part] = (), loop: Place | None = None) -> None:
        """Start a recording, with the parts in `more`; one that was left open, by another recorder too, is ended first.

        `loop`: where the training runs, of a framework that does not say that one has raised.
        """
        self.end(LEFT)
        self._guarded("this training is not recorded", lambda: self._begin(more, loop))

    def _begin(self, more: Sequence[Part], loop: Place | None) -> None:
        global _recording
        other = _recording() if _recording is not None else None
        if other is not None and other._loop is not None and loop is not None and other._loop.over(loop):
            other.end(LEFT)
        session = new_session(self._path, self._options, "GpudiagCallback", more)
        session.__enter__()
        self._session, self._loop, _recording = session, loop, weakref.ref(self)
        self.path = session.path
        atexit.register(self.end, LEFT)
        session.pause()

    def enter_epoch(self) -> None:
        """An epoch begins, and with it a step."""
        self.in_epoch = True
        self.resume()

    def leave_epoch(self) -> None:
        """The epoch is over; a step that runs has no end."""
        self.in_epoch = False
        self.pause()

    def step(self) -> None:
        """A step ends, and the next one begins."""
        if self._session is not None:
            self._guarded("a step was not marked", self._session.step)

    def pause(self) -> None:
        """What follows belongs to no step."""
        if self._session is not None:
            self._guarded("a pause was not marked", self._session.pause)

    def resume(self) -> None:
        """A step begins here; what ran since the last one belongs to none. Does nothing outside an epoch."""
        if self.in_epoch:
            self.pause()
            self.step()  # after a pause it begins a step and ends none

    def end(self, reason: str | BaseException | None = None) -> None:
        """Finish the bundle; `reason`: why the training ended early. Does nothing where no recording is open."""
        session, self._session, self.in_epoch = self._session, None, False
        if session is not None:
            self._guarded("the recording was not finished", lambda: self._end(session, reason))

    def _end(self, session: Session, reason: str | BaseException | None) -> None:
        atexit.unregister(self.end)
        if isinstance(reason, str):
            session.warnings.append(reason)
        kind = type(reason) if isinstance(reason, BaseException) else None
        session.__exit__(kind, None, None)

    def _guarded(self, failure: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the training run comes first
            warn(f"gpudiag: {failure} ({error})", 1)
