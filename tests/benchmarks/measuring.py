"""One command in a fresh process: what it cost, start included."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

RSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""Unit of ru_maxrss: getrusage(2) of the system."""

_NO_BYTE_CODE = "PYTHONDONTWRITEBYTECODE"
"""Not handed on: all sources would be compiled at every start, of peers as well, as on no machine where they are installed."""

LOOK_S = 0.1
"""Between two looks at the memory of the processes that a command starts."""


class Run(NamedTuple):
    """What a command cost."""

    wall_s: float
    cpu_s: float
    """User and system time, that of the processes that it started included."""
    peak_mb: float
    """Resident memory of 10^6 bytes: the largest of one process as the system counted it, or of all together as seen every LOOK_S."""
    output: str
    load: float
    """Load average of the machine over the minute before."""


def measure(command: Sequence[str], environ: Mapping[str, str] | None = None) -> Run | None:
    """Return what `command` cost in a fresh process; None where it failed (said on stderr). Its byte code is kept, as installed."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        load, began = os.getloadavg()[0], time.perf_counter()
        env = {name: text for name, text in os.environ.items() if name != _NO_BYTE_CODE} | dict(environ or {})
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=env)
        family = _Family(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - began
        family.end()
        process.returncode = os.waitstatus_to_exitcode(status)  # reaped here, so that Popen does not wait for it again
        output.seek(0)
        errors.seek(0)
        if process.returncode:
            tail = errors.read().decode(errors="replace").strip().splitlines()[-1:]
            print(f"failed ({process.returncode}): {' '.join(command)[-100:]}: {tail}", file=sys.stderr)
            return None
        peak = max(usage.ru_maxrss * RSS_BYTES, family.peak_bytes)
        return Run(wall_s, usage.ru_utime + usage.ru_stime, peak / 1e6, output.read().decode(errors="replace").strip(), load)


def best(command: Sequence[str], repeat: int, environ: Mapping[str, str] | None = None) -> Run | None:
    """Return the run of least wall time out of `repeat` (the least disturbed one); None as soon as one fails."""
    runs = []
    for _ in range(repeat):
        run = measure(command, environ)
        if run is None:
            return None
        runs.append(run)
    return min(runs)


class _Family:
    """Watches the memory of a process and of those that it starts, where there are any (Linux)."""

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self._pid, self._over = pid, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            below = _children(self._pid)
            if below:
                self.peak_bytes = max(self.peak_bytes, sum(map(_resident_bytes, [self._pid, *below])))


def _children(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(word) for word in path.read_text().split()]
    return [one for child in found for one in (child, *_children(child))]


def _resident_bytes(pid: int) -> int:
    with suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
