"""The processor cores that this process may use."""

from __future__ import annotations

import os


def find_usable_cores() -> set[int]:
    """Find the numbers of the cores that this process may use: all of the machine where the system does not say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def count_usable_cores() -> int:
    """Count the cores that this process may use."""
    return len(find_usable_cores())
