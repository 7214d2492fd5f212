"""Children that a training program forks after a profiler has run."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

_prepared = False


def let_children_end() -> None:
    """Return None; from now on forked children of this process end without the destructors of C++. Call before a profiler starts.

    Kineto's ConfigLoader starts a thread with the first profiler. A forked child does not have it, but waits for it for ever when its
    destructor runs at exit(); nothing but leaving before that helps, and Python's own handlers have run by then. Children that run
    another program, or leave by os._exit() as those of multiprocessing do, are as they were.
    """
    global _prepared
    if _prepared or not hasattr(os, "register_at_fork"):
        return
    _prepared = True
    with suppress(OSError, AttributeError, TypeError):  # on_exit hands on the status; glibc has it, musl and macOS do not
        libc = ctypes.CDLL(None)
        on_exit, leave = libc.on_exit, ctypes.cast(libc._exit, ctypes.c_void_p)
        also, flush = libc["__cxa_atexit"], ctypes.cast(libc.fflush, ctypes.c_void_p)

        def in_child() -> None:
            on_exit(leave, None)
            also(flush, None, None)  # runs before: what C code has printed is still in its buffers

        os.register_at_fork(after_in_child=in_child)
