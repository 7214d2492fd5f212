"""Records the trainings of a framework, driven by its own hooks: the session's options, the recorder, and loops that were left."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from gpudiag.capture.hooks import Hooks
from gpudiag.capture.session import Session
from gpudiag.capture.standard_parts import AnyPath, build_session_options, choose_session_path
from gpudiag.errors import warn_user


class LoopPlace:
    """One call of the function that runs a training, on the stack of the thread that makes this. `training`: any object of that call alone.

    It is known by the number and the code of its frame: to keep the frame would keep everything alive that the call holds. The code
    alone would not do, as a framework runs every training by the same function; nor the number, which a later frame may get.
    """

    def __init__(self, frame: FrameType, training: object) -> None:
        self._frame, self._code = id(frame), frame.f_code
        self._thread = threading.get_ident()
        self._training = weakref.ref(training)

    def holds(self, frame: FrameType | None) -> bool:
        """Return whether `frame` is this call or runs inside it."""
        while frame is not None and not (id(frame) == self._frame and frame.f_code is self._code):
            frame = frame.f_back
        return frame is not None

    def over(self, later: LoopPlace) -> bool:
        """Return whether this call has ended, now that `later` runs."""
        if self._frame == later._frame:
            return self._training() is not later._training()
        return not self.holds(sys._current_frames().get(self._thread))


class LoopLeft(Hooks):
    """Calls `left` at the first batch or backward pass outside the call `loop`, once one was seen inside it."""

    def __init__(self, loop: LoopPlace, left: Callable[[], None]) -> None:
        self._loop, self._left = loop, left
        self._inside = False

    def batch_asked(self, *_: Any, **__: Any) -> None:
        """Look where this event comes from."""
        if self._loop.holds(sys._getframe(1)):
            self._inside = True
        elif self._inside:
            self._inside = False
            self._left()

    backward_began = batch_asked


LEFT_EARLY = "the training ended early: it raised or was stopped, its framework did not say which"
"""The manifest's warning where a framework has no hook for a training that raises."""

_recording: weakref.ref[Recorder] | None = None
"""The recorder whose recording began last in this process."""


@contextmanager
def _guard(failure: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the training run comes first
        warn_user(f"gpudiag: {failure} ({error})", 1)


class Recorder:
    """One bundle for each training, from begin() to end(). Steps exist only between enter_epoch() and leave_epoch().

    Raises UsageError when it is made with wrong options; afterwards nothing raises: a failure is one warning, training goes on.
    Can be copied and pickled (frameworks start other processes with their callbacks): a copy has no recording of its own.
    """

    def __init__(self, path: AnyPath, options: Mapping[str, Any]) -> None:
        self._path, self._options = os.fspath(path), dict(options)
        self._session: Session | None = None
        self._loop: LoopPlace | None = None
        self.in_epoch = False
        """Whether the steps of an epoch are being taken."""
        self.path: Path | None = None
        """Folder of the bundle of the present or the last training; None before the first."""
        # a wrong option is told here, where the user wrote it
        Session(choose_session_path(path), **build_session_options(options, "GpudiagCallback"))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_session": None, "_loop": None, "in_epoch": False}

    def begin(self, more: Sequence[Hooks] = (), loop: LoopPlace | None = None) -> None:
        """Start a recording, with the parts in `more`; one that was left open, by another recorder too, is ended first.

        `loop`: where the training runs, of a framework that does not say that one has raised.
        """
        global _recording
        self.end(LEFT_EARLY)
        with _guard("this training is not recorded"):
            other = _recording() if _recording is not None else None
            if other is not None and other._loop is not None and loop is not None and other._loop.over(loop):
                other.end(LEFT_EARLY)
            session = Session(choose_session_path(self._path), **build_session_options(self._options, "GpudiagCallback", more))
            session.__enter__()
            self._session, self._loop, _recording = session, loop, weakref.ref(self)
            self.path = session.path
            atexit.register(self.end, LEFT_EARLY)
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
            with _guard("a step was not marked"):
                self._session.step()

    def pause(self) -> None:
        """What follows belongs to no step."""
        if self._session is not None:
            with _guard("a pause was not marked"):
                self._session.pause()

    def resume(self) -> None:
        """A step begins here; what ran since the last one belongs to none. Does nothing outside an epoch."""
        if self.in_epoch:
            self.pause()
            self.step()  # after a pause it begins a step and ends none

    def end(self, reason: str | BaseException | None = None) -> None:
        """Finish the bundle; `reason`: why the training ended early. Does nothing where no recording is open."""
        session, self._session, self.in_epoch = self._session, None, False
        if session is None:
            return
        with _guard("the recording was not finished"):
            atexit.unregister(self.end)
            if isinstance(reason, str):
                session.warnings.append(reason)
            session.__exit__(type(reason) if isinstance(reason, BaseException) else None, None, None)
