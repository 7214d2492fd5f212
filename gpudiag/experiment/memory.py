"""Memory of an arm: what its processes hold, what the machine can spare, when an arm has to be ended, and the largest batch that fits."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from gpudiag.units import format_bytes

PERIOD_S = 0.05
"""Between two looks: a leak of 3 GiB/s was stopped at 2.02 of 2.00 GiB allowed."""

MEMBERS_PERIOD_S = 1.0
"""Between two searches for new processes of the arm: that reads the environment of each process of the machine."""

RESERVE_SHARE, RESERVE_BYTES = 0.05, 512 << 20
"""What is left to the rest of the machine: so much of its memory, and at least so much."""

CROWDED_SHARE = 0.85
"""Of the memory of a device, what two arms may take together: the allocator's blocks do not fit without gaps."""

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_RESIDENT = 1  # of /proc/PID/statm: size, resident, shared, ... in pages (proc(5))
_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""cgroup v1 writes a limit near 2**63 where there is none."""


def measure_resident_bytes(pids: set[int]) -> int:
    """Return the resident memory of processes together. Pages that several share (forked loader workers) are counted for each."""
    pages = 0
    for pid in pids:
        with suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/statm", "rb") as file:
            pages += int(file.read().split()[_RESIDENT])
    return pages * _PAGE


def measure_own_bytes(pids: set[int]) -> int:
    """Return the memory of processes together, each page that n share counted as 1/n (Pss of /proc/PID/smaps_rollup, proc(5)).

    Takes milliseconds a process; one that does not tell counts with its resident memory.
    """
    total = 0
    for pid in pids:
        known = _read_kib(f"/proc/{pid}/smaps_rollup", "Pss")
        total += measure_resident_bytes({pid}) if known is None else known
    return total


def measure_spare_bytes() -> int | None:
    """Return the memory that can be had without swapping: MemAvailable, or what the container has left; None where nothing tells."""
    known = [value for value in (_read_kib("/proc/meminfo", "MemAvailable"), _read_cgroup_spare_bytes()) if value is not None]
    return min(known, default=None)


def compute_reserve_bytes() -> int:
    """Return how much of the memory is left to the rest of the machine."""
    total = _read_kib("/proc/meminfo", "MemTotal") or 0
    return max(RESERVE_BYTES, round(RESERVE_SHARE * total)) if total > 8 * RESERVE_BYTES else round(RESERVE_SHARE * total)


def _read_kib(path: str, name: str) -> int | None:
    """Read the line 'name: 123 kB' of a file of the kernel, in bytes."""
    with suppress(OSError, IndexError, ValueError), open(path, encoding="ascii") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def _read_cgroup_spare_bytes(root: Path = _CGROUP) -> int | None:
    """Read the limit of the container less what it uses and cannot drop (cgroup v2, then v1); None where there is no limit."""
    for limit, used, stat, cache in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError):  # 'max' is no number: no limit
            allowed = int((root / limit).read_text(encoding="ascii"))
            if allowed < _UNLIMITED:
                lines = (line.split() for line in (root / stat).read_text(encoding="ascii").splitlines())
                droppable = next((int(value) for name, value in lines if name == cache), 0)
                return allowed - int((root / used).read_text(encoding="ascii")) + droppable
    return None


def fit_together(first: int | None, second: int | None, free: int | None) -> bool:
    """Return whether two arms with these peaks fit into `free` bytes (all that both may have). What is not known is taken to fit."""
    if first is None or second is None or free is None:
        return True
    return first + second <= CROWDED_SHARE * free


class MemoryLimit:
    """Looks at the memory of one arm while it runs. `peak_bytes`: the most that was seen; `members` finds its processes."""

    def __init__(
        self,
        members: Callable[[], set[int]],
        limit_bytes: int | None,
        *,
        spare: Callable[[], int | None] = measure_spare_bytes,
        reserve: int | None = None,
    ) -> None:
        self.peak_bytes = 0
        self.crowded = False
        """Whether it was the machine that had no memory left: alone the arm might fit."""
        self._members, self._limit, self._spare = members, limit_bytes, spare
        self._reserve = compute_reserve_bytes() if reserve is None else reserve
        self._known: set[int] = set()
        self._looked_s = self._searched_s = float("-inf")

    def look(self, now_s: float) -> str | None:
        """Return why the arm has to be ended, None where it need not be; looks only every PERIOD_S. `now_s`: of a monotonic clock."""
        if now_s - self._looked_s < PERIOD_S:
            return None
        self._looked_s = now_s
        if now_s - self._searched_s >= MEMBERS_PERIOD_S:
            self._searched_s = now_s
            self._known = self._members()
        used = measure_resident_bytes(self._known)
        self.peak_bytes = max(self.peak_bytes, used)
        if self._limit is not None and used > self._limit and measure_own_bytes(self._known) > self._limit:
            return f"its processes took {format_bytes(used)} of memory, more than the limit of {format_bytes(self._limit)}"
        spare = self._spare()
        if spare is None or spare >= self._reserve or used < spare:
            return None  # what takes less than is left is not what fills the machine
        self.crowded = True
        return f"its processes took {format_bytes(used)} of memory, and the machine had {format_bytes(max(0, spare))} left"


StopReason = Literal["predicted", "failed", "limit", "first"]
"""`predicted`: the next size would not fit; `failed`: it did not; `limit`: no larger one was to be tried; `first`: not even the
first fits."""

PREDICTED_SHARE = 0.9
"""Of the limit, that a size may be foretold to take: the rest is for the allocator's fragments and for steps that need more than others."""

BATCH_FACTOR = 2
"""Never more than that at once: memory is linear only between neighbours."""

MAX_DOUBLINGS = 6
"""By default, at most: a batch above the size of the data takes no more memory, and would never end the search."""


class TriedBatch(msgspec.Struct, frozen=True):
    """A batch size that was tried, and the most memory that it took."""

    batch: int
    peak_bytes: int


class BatchSearch(msgspec.Struct, frozen=True):
    """The sizes that fit, smallest first."""

    tried: tuple[TriedBatch, ...]
    stopped_by: StopReason


def find_largest_batch(
    try_batch: Callable[[int], int | None],
    start: int,
    *,
    limit_bytes: int | None,
    largest: int | None = None,
    share: float = PREDICTED_SHARE,
) -> BatchSearch:
    """Return which sizes fit from `start` on, each twice the one before.

    `try_batch` runs one size, in a process of its own, and returns the peak of its memory in bytes; None where it failed (out of memory, or
    for any other reason). `limit_bytes` is the memory that there is (None: not known). `largest` is the largest size to try.
    """
    tried: list[TriedBatch] = []
    batch = start
    while batch <= (start * BATCH_FACTOR**MAX_DOUBLINGS if largest is None else largest):
        expected = predict_peak_bytes(tried, batch)
        if limit_bytes is not None and expected is not None and expected > share * limit_bytes:
            return BatchSearch(tuple(tried), "predicted")
        peak = try_batch(batch)
        if peak is None:
            return BatchSearch(tuple(tried), "failed" if tried else "first")
        tried.append(TriedBatch(batch, peak))
        batch *= BATCH_FACTOR
    return BatchSearch(tuple(tried), "limit")


def predict_peak_bytes(tried: list[TriedBatch], batch: int) -> int | None:
    """Predict the peak of memory at `batch` in bytes, by the line through the two largest sizes; None for fewer than two.

    Memory is linear in pieces: at small sizes another phase of the step, the update of the weights, can hold the peak, and hides how fast
    activations grow. A line through two such sizes foretold 20 to 79 % too little for one 16 times as large, one through larger ones was
    within 0.6 %.
    """
    if len(tried) < 2:
        return None
    first, second = sorted(tried, key=lambda size: size.batch)[-2:]
    slope = max(0.0, (second.peak_bytes - first.peak_bytes) / (second.batch - first.batch))
    return round(second.peak_bytes + slope * (batch - second.batch))
