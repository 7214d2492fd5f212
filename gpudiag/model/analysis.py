"""Everything that the facts may look at, one object per analysed window; and what a rank tells of itself to its job.

Times are absolute, in the rank's own clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
import polars as pl

from gpudiag.model.bundle import Manifest
from gpudiag.model.compilation import CompileLog
from gpudiag.model.experiment import ExperimentData
from gpudiag.model.graph import Graph
from gpudiag.model.hardware import Device, DeviceKind, Energy, Telemetry
from gpudiag.model.job import Job
from gpudiag.model.memory import MemoryReport
from gpudiag.model.notices import Notice
from gpudiag.model.timeline import BUCKETS, Breakdown, BucketsNs, DeviceTime, QueueStats, ReplayTrust
from gpudiag.model.trace import Column, Trace


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
    """As long as the device takes for their work where the host runs ahead more and more (attribution.device.follow_device)."""
    host_steps: pl.DataFrame
    """The same from mark to mark of the host: what the host did in a step lies in these."""
    steps_source: str
    idle: pl.DataFrame
    breakdown: Breakdown
    device_time: DeviceTime | None
    """None where the trace has no device event."""
    coverage: Coverage
    op_rows: pl.DataFrame
    """Rows of Report.ops before formatting: name, signature, count, kernel_ns, flops, bytes, t_roof_ns, bound, efficiency, provenance."""
    sites: pl.Series
    """The call site of each op row ('file.py(line): function', null where not known)."""
    site_match_share: float | None
    """Share of the time of top-level ops in steps whose site was found; None without frames."""
    ask_frames: Callable[[Callable[[Trace], pl.Series]], pl.Series] | None = None
    """Returns for each op row what a function tells of a trace with Python frames (attribution.call_sites.find_own_paths); None: it is not
    asked."""
    manifest: Manifest | None = None
    step_records: pl.DataFrame | None = None
    samples: pl.DataFrame | None = None
    """Telemetry of the whole run as sampled (table telemetry); None: no bundle, or nothing was sampled."""
    host_marks: pl.DataFrame | None = None
    rank_records: Callable[[], pl.DataFrame] | None = None
    """Reads the step records of all ranks, with a column `rank`; None: one rank, or no bundle."""
    profiler_slowdown: float | None = None
    """Median profiled step / median unprofiled step of the same run; None where only profiled steps exist."""
    notices: tuple[Notice, ...] = ()
    gaps: pl.DataFrame | None = None
    """Whole gaps of the device; `idle` holds their pieces by cause, cut to the analysed steps."""
    syncs: pl.DataFrame | None = None
    critical_path: pl.DataFrame | None = None
    """Of the representative steps; None where the recording has no launches or ops."""
    queue: QueueStats | None = None
    graphs: tuple[Graph, ...] = ()
    """Of the representative steps (at most three); empty: no replay, and `notices` says why."""
    run_graph: Graph | None = None
    """Of all analysed steps in the order in which they ran, or of as many consecutive ones as can be replayed: what-ifs are judged by it.
    None: not even three fit, what-ifs are judged by `graphs`."""
    replay: ReplayTrust | None = None
    telemetry: Telemetry | None = None
    """None: nothing was sampled beside the trace."""
    energy: Energy | None = None
    memory: MemoryReport | None = None
    """None: no allocation was recorded."""
    compile_log: CompileLog | None = None
    """What torch.compile did; None: nothing was compiled, or it was not recorded."""
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


_I64, _F64, _TEXT, _NAME = pl.Int64(), pl.Float64(), pl.String(), pl.Categorical()

RANK_MESSAGES: tuple[Column, ...] = (
    Column("step", _I64, "", "row of `steps`; null: outside the analysed steps"),
    Column(
        "kind",
        _NAME,
        "",
        "all_reduce | reduce_scatter | all_gather | all_to_all | broadcast | reduce | point_to_point ...; null: not told",
    ),
    Column("name", _NAME, "", "name of the kernel, or of the back end's work on a CPU"),
    Column("group", _NAME, "", "process group as this rank names it; null: not recorded"),
    Column("members", _NAME, "", "ranks of the group, '0,1,2,3'; null: not recorded"),
    Column("size", _I64, "ranks", "group size; null: not recorded"),
    Column("seq", _I64, "", "sequence number in the group; null: not recorded"),
    Column("bytes", _I64, "B", "message: the whole tensor (trace.collectives); null: not recorded"),
    Column("sent", _I64, "elements", "of this rank"),
    Column("received", _I64, "elements", "by this rank"),
    Column("dtype", _NAME, "", "element type as recorded"),
    Column("source", _I64, "", "sending rank of a point-to-point message or root; null: not recorded"),
    Column("target", _I64, "", "receiving rank of a point-to-point message; null: not recorded"),
    Column("in_splits", _TEXT, "rows", "what each member gets of an uneven all-to-all, '3,4,5'; null: even, or not recorded"),
    Column("out_splits", _TEXT, "rows", "what comes from each member; null: even, or not recorded"),
    Column("phase", _NAME, "", "forward | backward | optimizer | ...; null: not told"),
    Column("called_ns", _I64, "ns", "call on the host, absolute; null: not recorded"),
    Column("start_ns", _I64, "ns", "absolute"),
    Column("end_ns", _I64, "ns", "absolute"),
    Column("exposed_ns", _I64, "ns", "the part of start..end in which no other work of the device ran"),
    Column(
        "exposed_by",
        pl.List(pl.UInt8()),
        "",
        "how exposed_ns comes about: its share, 0..255, that 1/16, 2/16 .. 15/16 of start..end hold; null: none, all, or not told",
    ),
)
"""The messages of one rank in the order of their start, inside the analysed steps or not."""

RANK_STEPS: tuple[Column, ...] = (
    Column("name", _TEXT, "", "as in table steps"),
    Column("number", _I64, "", "of the step in the whole training; null: not known"),
    Column("start_ns", _I64, "ns", "absolute"),
    Column("end_ns", _I64, "ns", "absolute"),
    Column("matrix_flops", _F64, "FLOP", "of the products launched in the step; null: not modelled"),
    *(Column(bucket, _I64, "ns", "of the step's breakdown; all buckets of a step sum to end - start") for bucket in BUCKETS),
)
"""The analysed steps of one rank."""

RANK_OPS: tuple[Column, ...] = (
    Column("name", _TEXT, "", "operator, or the kernel where no op is known"),
    Column("phase", _TEXT, "", "as in ops"),
    Column("count", _I64, "", "calls in the analysed steps"),
    Column("kernel_ns", _I64, "ns", "summed over the calls in the analysed steps"),
)
"""What the rank's device did, summed by operator: the MOST_OPS largest without collectives, the rest as one row 'others'."""

MOST_OPS = 100


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank tells of itself. Everything that a Job is made of; small."""

    rank: int
    path: str
    device: str = ""
    """Name of the device; '' where it is not known."""
    device_kind: Literal["gpu", "cpu"] = "gpu"
    device_index: int | None = None
    host: str = ""
    """Name of the machine; '' where it is not recorded."""
    world_size: int | None = None
    clock: Literal["unix", "file"] = "file"
    """Whether absolute times are Unix time, or a clock of the file alone."""
    link_byte_per_s: float | None = None
    """Rate of the links between GPUs of one machine, one direction (device table); None: not known."""
    wall_ns: int = 0
    buckets_ns: BucketsNs = BucketsNs()
    """Of all analysed steps."""
    linked_share: float | None = None
    modelled_share: float | None = None
    truncated: bool = False
    sm_clock_mhz: float | None = None
    """Median while the steps were recorded; None: no telemetry."""
    power_w: float | None = None
    temperature_c: float | None = None
    throttled: tuple[str, ...] = ()
    """Reasons for which the clocks were held down while the steps were recorded."""
    messages: pl.DataFrame
    """Schema RANK_MESSAGES."""
    steps: pl.DataFrame
    """Schema STEPS."""
    ops: pl.DataFrame
    """Schema OPS."""
    records: pl.DataFrame | None = None
    """Step records of the whole run (table step_records, all its columns), where a bundle holds them."""
