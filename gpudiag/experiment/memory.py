"""Memory of an arm: whether two fit beside each other, and when one has to be ended."""

from __future__ import annotations

from collections.abc import Callable

from gpudiag.host_memory import compute_reserve_bytes, measure_own_bytes, measure_resident_bytes, measure_spare_bytes
from gpudiag.units import format_bytes

PERIOD_S = 0.05
"""Between two looks: a leak of 3 GiB/s was stopped at 2.02 of 2.00 GiB allowed."""

MEMBERS_PERIOD_S = 1.0
"""Between two searches for new processes of the arm: that reads the environment of each process of the machine."""

CROWDED_SHARE = 0.85
"""Of the memory of a device, what two arms may take together: the allocator's blocks do not fit without gaps."""


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
