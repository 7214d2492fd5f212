"""Puts Ctrl-C off while torch's profiler changes its state.

An exception that comes between two lines of torch's own start(), step() or stop() can leave the annotation of a step open when its
recording is gone: whatever closes it later writes to memory that belongs to others (seen as crashes of torch 2.13 at the next stop).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Those whose handlers usually raise, where Python handles them. Put back in this order: SIGINT, the usual one, last."""


@contextmanager
def put_off() -> Iterator[None]:
    """Have handlers of SIGINT and SIGTERM wait for the end of the block; a second signal does not wait: the block may hang."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python runs handlers on the main thread only
        return
    handlers = {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))}
    came: list[tuple[int, FrameType | None]] = []

    def later(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))
        if len(came) > 1:
            handlers[signal.Signals(number)](number, frame)

    try:
        for number in handlers:
            signal.signal(number, later)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if len(came) == 1:
            handlers[signal.Signals(came[0][0])](*came[0])
