"""Finds out that a training loop has been left, where its framework does not say so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from gpudiag.capture.parts import Context, Part


class LoopLeft(Part):
    """Calls `left` at the first batch or backward pass outside the function `loop`, once one was seen inside it.

    The function is known by its code alone: to keep its frame would keep everything alive that the loop holds.
    """

    def __init__(self, loop: CodeType, left: Callable[[], None]) -> None:
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
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not self._loop:
            frame = frame.f_back
        if frame is not None:
            self._inside = True
        elif self._inside and self._context is not None:
            self._context.events.clear()  # the call that is under way emits one more event
            self._left()
