"""Memory of this machine: what processes hold, what can be had without swapping, what is left to others."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

RESERVE_SHARE, RESERVE_BYTES = 0.05, 512 << 20
"""What is left to the rest of the machine: so much of its memory, and at least so much."""

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
