"""What the host-side records of all steps say of a run: part of the report."""

from __future__ import annotations

from typing import Literal

import msgspec


class PhaseTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Mean time of each phase over the typical steps, the middle fifth of the plain ones by wall time; null: not seen.

    With the rest they add up to about the median step.
    """

    clock: Literal["host", "device"]
    loader_wait_ns: int | None = None
    """Waiting for batches, always by the host's clock."""
    h2d_ns: int | None = None
    forward_ns: int | None = None
    backward_ns: int | None = None
    optimizer_ns: int | None = None
    rest_ns: int | None = None
    """What none of these fills."""


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """The last quarter of the plain steps against the first."""

    first_ns: int
    last_ns: int
    """Median step of that quarter."""
    share: float
    """last / first - 1: positive where steps became slower."""
    low_share: float
    high_share: float
    """Interval of share, 99 %."""
    real: bool
    """Whether the interval leaves out 0, the quarters in between are on the way, and the change is large enough to matter."""


class SlowPart(msgspec.Struct, frozen=True):
    """What a slow step had beyond the median step."""

    what: Literal["loader", "gc", "save", "file_write", "h2d", "forward", "backward", "optimizer", "rest"]
    ns: int
    """Time beyond the median; of a mark (gc, save) its whole time; 0 where only the start is known (file_write)."""
    name: str | None = None
    """Of a mark: the file, the generation of the collection."""


class SlowStep(msgspec.Struct, frozen=True):
    """A step that took far longer than the median."""

    step: int
    wall_ns: int
    had: tuple[SlowPart, ...] = ()
    """What explains it, largest first; empty: nothing that was recorded."""


class ProfilerCost(msgspec.Struct, frozen=True):
    """What the profiler did to the steps of one kind of its own."""

    label: Literal["warm", "timing", "sites", "export"]
    steps: int
    median_ns: int
    extra_ns: int
    """Their wall time beyond as many median plain steps; negative: they were faster."""


class StepHistory(msgspec.Struct, frozen=True, kw_only=True):
    """All steps of a run, profiled or not, from the records of its bundle. Plain steps: unprofiled, without the first two."""

    steps: int
    profiled: int
    plain: int
    wall_ns: int
    """All steps together, without the time between them."""
    first_ns: int | None
    """The first step of the run."""
    median_ns: int | None
    p95_ns: int | None
    phases: PhaseTimes | None = None
    padded_share: float | None = None
    """Padding among the positions of the batches."""
    drift: Drift | None = None
    """Null: fewer than 200 plain steps."""
    slow_steps: int = 0
    slow_share: float | None = None
    """Time of the slow steps beyond the median over the wall time of the plain steps."""
    slowest: tuple[SlowStep, ...] = ()
    profiler: tuple[ProfilerCost, ...] = ()
