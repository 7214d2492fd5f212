"""Where the time of the steps goes: the breakdown, the replay with its what-ifs, the history of all steps."""

from __future__ import annotations

from typing import Literal

import msgspec


class BucketsNs(msgspec.Struct, frozen=True):
    """Nanoseconds per bucket of the step breakdown (what the device did at each nanosecond).

    outside_recording: the device worked, on what was not recorded (see timeline.idle.explain_device_part).
    """

    compute: int = 0
    memory: int = 0
    overhead: int = 0
    unknown: int = 0
    exposed_communication: int = 0
    exposed_copy: int = 0
    outside_recording: int = 0
    idle_data: int = 0
    idle_launch: int = 0
    idle_sync: int = 0
    idle_dependency: int = 0
    idle_allocation: int = 0
    idle_compile: int = 0
    idle_init: int = 0
    idle_gc: int = 0
    idle_io: int = 0
    idle_profiler: int = 0
    idle_unexplained: int = 0


BUCKETS = BucketsNs.__struct_fields__
IDLE_BUCKETS = tuple(name for name in BUCKETS if name.startswith("idle_"))
BUSY_BUCKETS = tuple(name for name in BUCKETS if name not in IDLE_BUCKETS)


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


class ReplayedStep(msgspec.Struct, frozen=True):
    """One representative step, replayed with nothing changed."""

    name: str
    role: str
    """fastest | median | slowest (joined with ', ' where one step is several); run: consecutive steps, all times are theirs together."""
    measured_ns: int
    replayed_ns: int
    free_ns: int
    """Part of the replayed step's longest path that lies in free delay parameters: measured waits that no dependency explains."""
    marks_ns: int | None = None
    """Time between the step's marks, as recorded."""
    steady_ns: int | None = None
    """Time of the step with nothing changed in a run that repeats it: what what-ifs are measured against."""
    backlog_begin_ns: int | None = None
    """How long the device still worked on earlier steps after the first mark."""
    backlog_end_ns: int | None = None
    """How long the device still worked on this step, or on earlier ones, after the last mark."""


class ReplayTrust(msgspec.Struct, frozen=True):
    """How far the replay can be trusted. Shares 0..1."""

    steps: tuple[ReplayedStep, ...]
    error_share: float
    """How far what-ifs may be off: the largest |replayed - measured| / measured over `steps` and `run`, or steady_error_share if larger."""
    free_share: float
    """Largest free_ns / measured_ns over `steps`."""
    steady_error_share: float | None = None
    """Error of steady_ns, which what-ifs are measured against, to the nearer of two measured times: marks_ns, the pace of the host, and
    marks_ns + backlog_end_ns - backlog_begin_ns, the pace of the device. Of `run`; where it is None the largest over `steps`."""
    drift_share: float | None = None
    """|steady_ns - marks_ns| / marks_ns of the same: how far the steps of a run that goes on are from the recorded ones."""
    note: str = ""
    """Why they differ, in words; '' where they do not by more than 5 %."""
    run: ReplayedStep | None = None
    """The steps in the order in which they ran that what-ifs are measured by; None: `steps`, each repeated."""


class WhatIf(msgspec.Struct, frozen=True):
    """The step with one cost changed, replayed."""

    name: str
    """Name and value as `gpudiag whatif --set NAME=VALUE` takes them."""
    words: str
    """What was assumed, in words."""
    step_ns: float
    """Time of a step with nothing changed, in a run that repeats the analysed steps in their order. Where these are too many: mean over the
    representative steps, each in a run that repeats it; each counts for the analysed steps whose length is nearest to its own."""
    changed_ns: float
    """The same with the change."""
    share: float
    """1 - changed / unchanged, 0..1 (below 0: slower). Of the time per sample where the batch was changed."""
    per_step_ns: tuple[tuple[str, float, float], ...] = ()
    """(step, unchanged, changed) of each representative step, in a run that repeats it; () in a list of standard what-ifs."""
    notes: tuple[str, ...] = ()
    short: str = ""
    """What a table calls it, '' where it is none of the standard ones."""


ProjectedKind = Literal["products", "memory", "short", "unmodelled", "communication", "copies"]
PROJECTED_KINDS: tuple[ProjectedKind, ...] = ("products", "memory", "short", "unmodelled", "communication", "copies")
"""Kinds of work that projections to another device tell apart. products: matrix products, convolutions, attention; memory: all else with a
cost; short: kernels that are mostly latency; unmodelled: no cost or no peak is known."""


class ProjectionError(msgspec.Struct, frozen=True):
    """How far projections of one kind of work were from what was measured on real pairs of devices."""

    ops: int
    median_share: float
    """|projected - measured| / measured, the median."""
    low: float
    """Measured over projected time: 80 % of the ops lie between low and high."""
    high: float


class ProjectedWork(msgspec.Struct, frozen=True):
    """Work of one kind in a step, in ns: as recorded, as projected, and between which times by the measured error."""

    kind: ProjectedKind
    now_ns: float
    then_ns: float
    low_ns: float
    high_ns: float
    error: ProjectionError | None = None
    """None: not measured. The time then lies between the recorded one and those that each ratio of the two devices gives."""


class DeviceProjection(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of a recording on another device: a prediction, no bound. Host time, launches and waits are kept as recorded."""

    source: str
    """Device that recorded, by its name in the device table."""
    target: str
    target_id: str
    """Row of the device table."""
    step_ns: float
    then_ns: float
    low_ns: float
    high_ns: float
    """The step with all work at its low, and at its high time, and the error of the replay on top."""
    works: tuple[ProjectedWork, ...]
    measured_on: str
    """The devices and ops that the errors were measured on, in words: pairs of one maker, or of two, as source and target are."""
    unmeasured: tuple[str, ...] = ()
    """Which of the two are of a compute capability that was not among the measured ones."""
    no_link: bool = False
    """Whether the GPUs of the other device have no link of their own: collectives go over PCIe."""
    without_profiler: bool = False
    """Whether the host is taken at its pace without the profiler."""
    settings: tuple[str, ...] = ()
    """What-ifs that are applied too, on the other device."""
    samples: float = 1.0
    """Samples of its step over those of the recorded one."""
    engines: dict[str, str | None] = {}
    """Engine of the recorded matrix work -> the engine that does it on the other device, where it is another one; None: there is none."""
    kept: tuple[ProjectedKind, ...] = ()
    """Work that keeps its time, for a link of one of the two is not known."""
    peak_bytes: int | None = None
    """Of allocated memory in the recording; None: not recorded."""
    peak_lower_bound: bool = False
    """Whether what was in use before the recording may be missing in it."""
    memory_bytes: int | None = None
    """Of the other device."""
    verified: bool = True
    """Whether the peaks of the other device are those of a data sheet."""
    gains_tf32: bool = False
    """Whether its fp32 products may run in TF32 there, which the recorded device does not have: faster, and not projected."""
    other_boards: tuple[str, ...] = ()
    """Ids of other boards that the name may have meant."""
    remarks: tuple[str, ...] = ()
    """What the device table remarks on the other device, such as the power that holds its clocks down."""


class QueueStats(msgspec.Struct, frozen=True):
    """How far the host runs ahead of the device in the analysed steps. Null where launches were not recorded."""

    launches_per_step: float
    kernels_per_step: float
    delay_median_ns: int
    """Start of the work minus end of the call that started it (0 at least)."""
    delay_p10_ns: int
    delay_p90_ns: int
    depth_median: float
    """Kernels issued and not yet over, by time."""
    depth_max: int
    empty_share: float
    """Share of the analysed time with nothing issued and unfinished."""
    host_bound_share: float
    """Share of the kernels (by count) that started within the normal launch latency: the device was waiting for them."""
    t_ns: tuple[int, ...] = ()
    """Moments of the depth curve (at most 512, from the start of the analysed steps)."""
    depth: tuple[float, ...] = ()
    """Mean depth from that moment to the next."""


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

    what: Literal["loader", "gc", "save", "file_write", "preempted", "h2d", "forward", "backward", "optimizer", "rest"]
    ns: int
    """Time beyond the median; of a mark (gc, save, preempted) its whole time; 0 where only the start is known (file_write)."""
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
