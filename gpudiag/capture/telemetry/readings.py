"""Sources of telemetry: one question to a source, when to ask it again, what to make of its answer; and the host, through psutil."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from gpudiag.model import trace
from gpudiag.model.trace import MAX_PLAUSIBLE

Value = float | int

Answer = Mapping[str, Value | Exception]
"""Column -> its value, or why there is none."""

COLUMNS = tuple(trace.build_table_schema("telemetry"))
SECOND = 10**9

RETRY_NS = 5 * SECOND
"""Pause after a failure that may pass (a board that is being reset, a driver that is busy)."""

FAST_SHARE = 0.004
"""Part of one core that all questions of every tick together may take; a dear question is asked less often."""

SLOW_SHARE = 0.0002
"""The same for each question that is asked less often. Twenty of them, the fast ones and the thread itself stay below 1 % of a core."""

COMPUTES_S = 0.5
"""CPU time from which on a child process computes, and does not just start (the system counts in ticks of 10 ms)."""

COMPUTES_SHARE = 0.3
"""Share of the busiest thread's CPU time from which on a thread computes: one that hands on batches takes less (heuristic)."""

_WHOLE = {column.name for column in trace.TABLES["telemetry"] if column.dtype.is_integer()}


class ImplausibleError(ValueError):
    """A source answered with a number that cannot be."""


def check_value(column: str, value: Value) -> Value:
    """Return `value` in the type of its column; raises ImplausibleError for what cannot be (NaN, negative, a field of ones)."""
    try:
        number = int(value) if column in _WHOLE else float(value)
    except (TypeError, ValueError, OverflowError):
        raise ImplausibleError(f"not a number: {type(value).__name__}") from None
    if not (math.isfinite(number) and 0 <= number <= MAX_PLAUSIBLE[column]):
        raise ImplausibleError(f"an implausible value: {number}")
    return number


class Reading:
    """One question to a source: `read` answers for `columns`, is asked every `period_ns` (0: every tick) and may take `share` of a core.

    `read` may raise, or hand back an exception for a column. A failure for which `final` holds is not asked again.
    """

    def __init__(
        self,
        columns: Sequence[str],
        read: Callable[[], Answer],
        period_ns: int,
        *,
        share: float = SLOW_SHARE,
        final: Callable[[Exception], bool] = lambda _: False,
    ) -> None:
        self.columns, self.period_ns, self.share = tuple(columns), period_ns, share
        self.off = False
        self._read, self._final = read, final
        self._due_ns = 0
        self._reasons: dict[str, str] = {}
        self._answered: set[str] = set()

    def sample(self, at_ns: int) -> dict[str, Value]:
        """Return the known columns, empty where the question is not due at `at_ns`."""
        if self.off or at_ns < self._due_ns:
            return {}
        begun = time.thread_time_ns()
        try:
            answer = self._read()
        except Exception as error:  # noqa: BLE001 - one question that fails leaves the others
            answer = dict.fromkeys(self.columns, error)
        known: dict[str, Value] = {}
        failed = []
        for column, value in answer.items():
            try:
                if isinstance(value, Exception):
                    raise value
                known[column] = check_value(column, value)
            except Exception as error:  # noqa: BLE001 - garbage from a driver is a null with a reason
                failed.append(error)
                self._reasons[column] = format_error(error)
        self._answered.update(known)
        cost_ns = time.thread_time_ns() - begun
        self.off = bool(failed) and not known and all(self._final(error) for error in failed)
        pause = RETRY_NS if failed and not known else self.period_ns
        self._due_ns = at_ns + max(pause, round(cost_ns / self.share))
        return known

    def missing(self) -> dict[str, str]:
        """Return column -> why it is null; 'at times' where other answers came."""
        return {column: f"at times: {why}" if column in self._answered else why for column, why in self._reasons.items()}


class ReadingSource:
    """What can be asked for columns of table telemetry (model.trace), by its readings. No method raises but for a bug."""

    name: str
    """'nvml' or 'psutil'."""

    _readings: Sequence[Reading]

    def sample(self, at_ns: int) -> Mapping[str, Value]:
        """Return what is due and known at `at_ns` (time.perf_counter_ns()); a column that is not asked this time is left out."""
        return {column: value for reading in self._readings for column, value in reading.sample(at_ns).items()}

    def missing(self) -> Mapping[str, str]:
        """Return column -> why it is null, always or at times, in the words of the source."""
        return {column: why for reading in self._readings for column, why in reading.missing().items()}

    def notes(self) -> Mapping[str, str]:
        """Return column -> what to know of its figures; nothing where they are plain."""
        return {}

    def close(self) -> None:
        """Give back what the source holds."""


def format_error(error: Exception) -> str:
    """Return what `error` says, in one short line without paths; its kind where it says nothing."""
    text = " ".join(str(error).split())
    return text[:120] if text and "/" not in text else type(error).__name__


def share_budget(readings: Sequence[Reading]) -> None:
    """Give the questions of every tick an equal part of FAST_SHARE."""
    fast = [reading for reading in readings if reading.period_ns == 0]
    for reading in fast:
        reading.share = FAST_SHARE / len(fast)


class AllocatorSource(ReadingSource):
    """What PyTorch's caching allocator holds on one CUDA device; reading its counters waits for no kernel.

    Its peaks are left alone: to reset them would change what the training itself reads with torch.cuda.max_memory_allocated().
    """

    name = "torch"
    columns = ("torch_allocated_bytes", "torch_reserved_bytes")

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        self._readings = [Reading(self.columns, self._read, SECOND // 2)]

    def _read(self) -> Answer:
        import torch

        stats = torch.cuda.memory_stats(self._ordinal)  # no entries until the device is used
        keys = ("allocated_bytes.all.current", "reserved_bytes.all.current")
        missing = LookupError("the allocator keeps no such counter")
        return {column: stats.get(key, missing) for column, key in zip(self.columns, keys, strict=True)}


class CpuSource(ReadingSource):
    """psutil's view of this process and its children."""

    name = "psutil"

    def __init__(self, psutil: Any) -> None:
        self._psutil = psutil
        self._self = psutil.Process()
        self._own = self._busy = (0, 0)
        self._children: dict[tuple[int, float], float] = {}
        self._scanned_ns = 0
        self._children_pct, self._children_rss, self._busiest = 0.0, 0, 0
        self.util = Reading(("cpu_util_pct",), self._read_cpu_util, 0)
        self._readings = [
            Reading((), self._scan_children, 5 * SECOND),
            Reading(("child_threads",), self._count_child_threads, 5 * SECOND),
            self.util,
            Reading(("rss_bytes",), lambda: {"rss_bytes": self._self.memory_info().rss + self._children_rss}, SECOND // 2),
            Reading(("system_cpu_util_pct",), self._read_system_util, SECOND),
            Reading(("cpu_freq_mhz",), self._read_frequency, 2 * SECOND),
        ]
        share_budget(self._readings)

    def _read_cpu_util(self) -> Answer:
        """CLOCK_PROCESS_CPUTIME_ID counts in ns over all threads and costs one system call; /proc counts in ticks of 10 ms."""
        last, self._own = self._own, (time.perf_counter_ns(), time.process_time_ns())
        passed = self._own[0] - last[0]
        return {"cpu_util_pct": 100 * (self._own[1] - last[1]) / passed + self._children_pct} if last[0] and passed else {}

    def _scan_children(self) -> Answer:
        """Find the children: CPU time since the last scan, or since they began, of those that are there; resident memory of all."""
        now, found, rss = time.perf_counter_ns(), {}, 0
        for child in self._self.children(recursive=True):
            try:
                with child.oneshot():
                    times = child.cpu_times()
                    found[child.pid, child.create_time()] = times.user + times.system
                    rss += child.memory_info().rss
            except self._psutil.Error:
                continue  # it has ended, or is another user's
        spent = {pid: max(0.0, seconds - self._children.get((pid, began), 0.0)) for (pid, began), seconds in found.items()}
        passed = (now - self._scanned_ns) / SECOND
        self._children_pct = 100 * sum(spent.values()) / passed if self._scanned_ns and passed > 0 else 0.0
        self._busiest = max(spent, key=spent.__getitem__, default=0) if max(spent.values(), default=0.0) >= COMPUTES_S else 0
        self._children, self._children_rss, self._scanned_ns = found, rss, now
        return {}

    def _count_child_threads(self) -> Answer:
        """Count the threads that compute in the child that computed most of late: a loader's worker, in which a BLAS may have many."""
        if not self._busiest:
            return {}
        times = [thread.user_time + thread.system_time for thread in self._psutil.Process(self._busiest).threads()]
        return {"child_threads": sum(seconds >= COMPUTES_SHARE * max(times) for seconds in times)}

    def _read_system_util(self) -> Answer:
        """Not psutil.cpu_percent(): it remembers its last call for the whole process, the user's own calls included."""
        times = self._psutil.cpu_times()._asdict()
        total = sum(times.values()) - times.get("guest", 0) - times.get("guest_nice", 0)  # both are counted in user and nice too
        idle = times["idle"] + times.get("iowait", 0)
        last, self._busy = self._busy, (total, total - idle)
        passed = total - last[0]
        return {"system_cpu_util_pct": min(100.0, max(0.0, 100 * (self._busy[1] - last[1]) / passed))} if last[0] and passed > 0 else {}

    def _read_frequency(self) -> Answer:
        found = self._psutil.cpu_freq()
        if found is None or not found.current:
            raise LookupError("the system does not tell its frequency")
        return {"cpu_freq_mhz": found.current}

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
