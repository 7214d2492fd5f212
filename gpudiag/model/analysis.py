"""Everything that the facts may look at: one object per analysed window."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import polars as pl

from gpudiag.model.breakdown import Breakdown, DeviceTime
from gpudiag.model.bundle import Manifest
from gpudiag.model.experiment import ExperimentData
from gpudiag.model.graph import Graph
from gpudiag.model.hardware import Device, DeviceKind
from gpudiag.model.job import Job
from gpudiag.model.memory import MemoryReport
from gpudiag.model.replay import QueueStats, ReplayTrust
from gpudiag.model.telemetry import Energy, Telemetry
from gpudiag.model.trace import Trace


class Coverage(msgspec.Struct, frozen=True):
    """How much of the kernel time is linked and modelled; shares 0..1, None where there is no kernel time.

    modelled + generic + unknown = 1 over the attributable kernel time: no collectives, copies, memsets; launch linked to
    an op with shapes, or a replayed kernel whose captured op is known.
    The shares of all kernel time attributable + collective + copy + without_launch + replay + outside_ops + without_shapes = 1.
    """

    kernels: int
    kernel_ns: int
    """Summed time of all kernels, copies and memsets."""
    attributable_ns: int
    linked_share: float | None
    modelled_share: float | None
    generic_share: float | None
    unknown_share: float | None
    modelled_share_of_all: float | None
    without_launch_share: float | None
    """Launched before the window: no launch record."""
    outside_ops_share: float | None
    """Launched by itself while no op was open."""
    without_shapes_share: float | None
    replay_share: float | None
    """Replayed from graphs whose captured ops are not known."""
    mapped_replay_share: float | None = None
    """Replayed from graphs and mapped to the ops of their capture pass; part of the attributable time where those have shapes."""
    attributable_share: float | None = None
    collective_share: float | None = None
    copy_share: float | None = None
    """Copies and memsets."""


class Analysis(msgspec.Struct, frozen=True):
    """One analysed window: costed tables, steps, gaps, breakdown, device, and what was recorded beside the trace."""

    trace: Trace
    """Tables at stage 'cost'."""
    device_kind: DeviceKind
    device: Device | None
    """None: no roofline."""
    device_index: int | None
    """Index of the device analysed (the busiest); None on a CPU-only run."""
    steps: pl.DataFrame
    steps_source: str
    idle: pl.DataFrame
    breakdown: Breakdown
    device_time: DeviceTime | None
    """None where the trace has no device event."""
    coverage: Coverage
    op_rows: pl.DataFrame
    """Rows of Report.ops before formatting: name, signature, count, kernel_ns, flops, bytes, t_roof_ns, bound, efficiency, provenance."""
    manifest: Manifest | None = None
    step_records: pl.DataFrame | None = None
    samples: pl.DataFrame | None = None
    """Telemetry of the whole run as sampled (table telemetry); None: no bundle, or nothing was sampled."""
    host_marks: pl.DataFrame | None = None
    rank_records: Callable[[], pl.DataFrame] | None = None
    """Reads the step records of all ranks, with a column `rank`; None: one rank, or no bundle."""
    profiler_slowdown: float | None = None
    """Median profiled step / median unprofiled step of the same run; None where only profiled steps exist."""
    warnings: tuple[str, ...] = ()
    gaps: pl.DataFrame | None = None
    """Whole gaps of the device; `idle` holds their pieces by cause, cut to the analysed steps."""
    syncs: pl.DataFrame | None = None
    critical_path: pl.DataFrame | None = None
    """Of the representative steps; None where the recording has no launches or ops."""
    queue: QueueStats | None = None
    graphs: tuple[Graph, ...] = ()
    """Of the representative steps (at most three); empty: no replay, and `warnings` says why."""
    run_graph: Graph | None = None
    """Of all analysed steps in the order in which they ran, or of as many consecutive ones as can be replayed: what-ifs are judged by it.
    None: not even three fit, what-ifs are judged by `graphs`."""
    replay: ReplayTrust | None = None
    telemetry: Telemetry | None = None
    """None: nothing was sampled beside the trace."""
    energy: Energy | None = None
    memory: MemoryReport | None = None
    """None: no allocation was recorded."""
    experiments: tuple[ExperimentData, ...] = ()
    """What `gpudiag ab` has kept in the bundle, the oldest first."""
    gpu_hour_price: float | None = None
    """Of one device for an hour, as given by --gpu-hour-price."""
    job: Job | None = None
    """All ranks compared; None: one rank was analysed alone."""
    planned_steps: int | None = None
    """Of the whole run, as given by --planned-steps."""

    @property
    def wall_ns(self) -> int:
        """Return the wall time of the analysed steps in ns."""
        return self.breakdown.wall_ns
