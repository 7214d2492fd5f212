"""What other programs do on the processors before an experiment begins: a recording beside it, or another training (Linux, proc(5))."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

LOOK_S = 0.5
"""Fifty ticks of the kernel's accounting on each processor."""

SHARE = 0.25
"""Of the processors that this process may use: from then on a program with a thread on each of them waits for others again and again."""

_STAT = Path("/proc/stat")
_IDLE = (3, 4)
"""Places of idle and iowait among the columns of a processor."""


def note(sleep: Callable[[float], None] = time.sleep) -> str:
    """Return what to say of other programs, '' where they do little or that is not known. Call it before anything is started."""
    before, began = _busy_ticks(), time.monotonic()
    sleep(LOOK_S)
    after, seconds = _busy_ticks(), time.monotonic() - began
    if before is None or after is None or seconds <= 0:
        return ""
    processors, busy = len(os.sched_getaffinity(0)), (after - before) / os.sysconf("SC_CLK_TCK") / seconds
    if busy < SHARE * processors:
        return ""
    return f"other programs kept {busy:.1f} of {processors} processors busy before it ran: pairs differ more, so that more are needed"


def _busy_ticks() -> int | None:
    """Return how long the processors that this process may use were not idle, in ticks; None where the system does not say."""
    try:
        lines = [line.split() for line in _STAT.read_text().splitlines() if line.startswith("cpu")]
        ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        return sum(sum(map(int, rest[:8])) - sum(int(rest[place]) for place in _IDLE) for name, *rest in lines if name in ours)
    except (OSError, ValueError, IndexError, AttributeError):
        return None
