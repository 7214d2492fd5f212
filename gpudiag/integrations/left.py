"""Finds out that a training loop has been left, where its framework does not say so."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from gpudiag.capture.parts import Context, Part


class Place:
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

    def over(self, later: Place) -> bool:
        """Return whether this call has ended, now that `later` runs."""
        if self._frame == later._frame:
            return self._training() is not later._training()
        return not self.holds(sys._current_frames().get(self._thread))


class LoopLeft(Part):
    """Calls `left` at the first batch or backward pass outside the call `loop`, once one was seen inside it."""

    def __init__(self, loop: Place, left: Callable[[], None]) -> None:
        self._loop, self._left = loop, left
        self._inside = False
        self._context: Context | None = None

    def start(self, context: Context) -> None:
        """Keep the list of listeners."""
        self._context = context

    def batch_asked(self, at_ns: int) -> None:
        """Look whether the loop still runs."""
        self._look()

    def backward_began(self, at_ns: int, loss: Any) -> None:
        """Look whether the loop still runs."""
        self._look()

    def _look(self) -> None:
        if self._loop.holds(sys._getframe(2)):
            self._inside = True
        elif self._inside and self._context is not None:
            self._context.events.clear()  # the call that is under way emits one more event
            self._left()
