"""Telemetry of the host: CPU time and memory of this process and its children, load and frequency of the machine, through psutil."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from gpudiag.capture.telemetry.readings import SECOND, SLOW_SHARE, Answer, Asked, Reading, share_out


class NotToldError(Exception):
    """The system does not tell."""


class Cpu(Asked):
    """psutil's view of this process and its children."""

    name = "psutil"

    def __init__(self, psutil: Any) -> None:
        self._psutil = psutil
        self._self = psutil.Process()
        self._own = self._busy = (0, 0)
        self._children: dict[tuple[int, float], float] = {}
        self._scanned_ns = 0
        self._children_pct, self._children_rss = 0.0, 0
        self._util = Reading(("cpu_util_pct",), self._cpu_util, 0)
        self._readings = [
            Reading((), self._scan, 5 * SECOND),
            self._util,
            Reading(("rss_bytes",), self._rss, SECOND // 2),
            Reading(("system_cpu_util_pct",), self._system, SECOND),
            Reading(("cpu_freq_mhz",), self._frequency, 2 * SECOND),
        ]
        share_out(self._readings)

    def relax(self) -> None:
        """Ask about once a second from now on: beside a GPU, whose columns matter more."""
        self._util.period_ns, self._util.share = SECOND, SLOW_SHARE

    # -- what is asked ----------------------------------------------------------------------------------------------

    def _cpu_util(self) -> Answer:
        """CLOCK_PROCESS_CPUTIME_ID counts in ns over all threads and costs one system call; /proc counts in ticks of 10 ms."""
        last, self._own = self._own, (time.perf_counter_ns(), time.process_time_ns())
        passed = self._own[0] - last[0]
        return {"cpu_util_pct": 100 * (self._own[1] - last[1]) / passed + self._children_pct} if last[0] and passed else {}

    def _scan(self) -> Answer:
        """Find the children: CPU time since the last scan of those that were there then, resident memory of all."""
        now, found, rss = time.perf_counter_ns(), {}, 0
        for child in self._self.children(recursive=True):
            try:
                with child.oneshot():
                    times = child.cpu_times()
                    found[child.pid, child.create_time()] = times.user + times.system
                    rss += child.memory_info().rss
            except self._psutil.Error:
                continue  # it has ended, or is another user's
        spent = sum(max(0.0, seconds - self._children[key]) for key, seconds in found.items() if key in self._children)
        passed = (now - self._scanned_ns) / SECOND
        self._children_pct = 100 * spent / passed if self._scanned_ns and passed > 0 else 0.0
        self._children, self._children_rss, self._scanned_ns = found, rss, now
        return {}

    def _rss(self) -> Answer:
        return {"rss_bytes": self._self.memory_info().rss + self._children_rss}

    def _system(self) -> Answer:
        """Not psutil.cpu_percent(): it remembers its last call for the whole process, the user's own calls included."""
        times = self._psutil.cpu_times()._asdict()
        total = sum(times.values()) - times.get("guest", 0) - times.get("guest_nice", 0)  # both are counted in user and nice too
        idle = times["idle"] + times.get("iowait", 0)
        last, self._busy = self._busy, (total, total - idle)
        passed = total - last[0]
        return {"system_cpu_util_pct": min(100.0, max(0.0, 100 * (self._busy[1] - last[1]) / passed))} if last[0] and passed > 0 else {}

    def _frequency(self) -> Answer:
        found = self._psutil.cpu_freq()
        if found is None or not found.current:
            raise NotToldError("the system does not tell its frequency")
        return {"cpu_freq_mhz": found.current}

    # -- the source -------------------------------------------------------------------------------------------------

    def notes(self) -> Mapping[str, str]:
        """Return what to know of sums over processes."""
        return {"rss_bytes": "pages that processes share count in each"} if self._children else {}

    def limits(self) -> Mapping[str, float]:
        """Return the machine's CPUs, memory and highest CPU frequency, where they are told."""
        found: dict[str, float] = {}
        with suppress(Exception):  # a limit that is not told is not in the manifest
            found["cpus"] = float(self._psutil.cpu_count() or 0)
            found["host_memory_bytes"] = float(self._psutil.virtual_memory().total)
            if (frequency := self._psutil.cpu_freq()) is not None and frequency.max:
                found["max_cpu_freq_mhz"] = float(frequency.max)
        return found

    def close(self) -> None:
        """Nothing is held."""
