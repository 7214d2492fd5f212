"""Where the time of the analysed steps goes: integer nanoseconds whose parts sum to the whole exactly."""

from __future__ import annotations

import msgspec

BUSY_BUCKETS = ("compute", "memory", "overhead", "unknown", "exposed_communication", "exposed_copy")
IDLE_BUCKETS = (
    "idle_data", "idle_launch", "idle_sync", "idle_dependency", "idle_allocation",
    "idle_compile", "idle_gc", "idle_io", "idle_profiler", "idle_unexplained",
)  # fmt: skip
BUCKETS = BUSY_BUCKETS + IDLE_BUCKETS


class BucketsNs(msgspec.Struct, frozen=True):
    """Nanoseconds per bucket of the step breakdown (what the device did at each nanosecond)."""

    compute: int = 0
    memory: int = 0
    overhead: int = 0
    unknown: int = 0
    exposed_communication: int = 0
    exposed_copy: int = 0
    idle_data: int = 0
    idle_launch: int = 0
    idle_sync: int = 0
    idle_dependency: int = 0
    idle_allocation: int = 0
    idle_compile: int = 0
    idle_gc: int = 0
    idle_io: int = 0
    idle_profiler: int = 0
    idle_unexplained: int = 0


class Breakdown(msgspec.Struct, frozen=True):
    """The union of the analysed steps, partitioned."""

    wall_ns: int
    buckets_ns: BucketsNs

    def validate(self) -> None:
        """Raise AssertionError unless the buckets are non-negative and sum to the wall time to the nanosecond."""
        parts = msgspec.structs.astuple(self.buckets_ns)
        assert all(part >= 0 for part in parts), f"negative bucket in {self.buckets_ns}"
        assert sum(parts) == self.wall_ns, f"buckets sum to {sum(parts)} ns, steps last {self.wall_ns} ns"

    @property
    def idle_ns(self) -> int:
        """Return the idle time over all causes in ns."""
        return sum(getattr(self.buckets_ns, name) for name in IDLE_BUCKETS)


class DeviceTime(msgspec.Struct, frozen=True):
    """Unions over all streams of one device, over every device event of the trace.

    compute = kernels that are no collectives, and memsets; copy = every memcpy; exposed = the part that no compute
    (for copies: nor communication) covers.
    """

    span_ns: int
    busy_ns: int
    idle_ns: int
    compute_ns: int
    communication_ns: int
    exposed_communication_ns: int
    copy_ns: int
    exposed_copy_ns: int
