"""The Report JSON, version 1: the contract of every renderer and of outside scripts.

Version 1 grows by adding keys only. Keys carry their unit: `_ns` integer nanoseconds, `_bytes`, `_share` 0..1. Unknown is
null with a reason in `trust.warnings`, never 0 or -1.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gpudiag.model.bundle import Machine, Program, Settings
from gpudiag.model.compilation import CompileReport
from gpudiag.model.experiment import Outcome
from gpudiag.model.finding import Finding, RuleOutcome, Where
from gpudiag.model.hardware import DeviceKind, Energy, PeakProvenance, Telemetry
from gpudiag.model.job import Job, RankRow
from gpudiag.model.memory import MemoryReport
from gpudiag.model.notices import Notice
from gpudiag.model.ops import Bound, Provenance
from gpudiag.model.timeline import Breakdown, DeviceTime, QueueStats, ReplayTrust, StepHistory, WhatIf

REPORT_SCHEMA_VERSION = 1


class Tool(msgspec.Struct, frozen=True):
    """What wrote the report."""

    name: str
    version: str


class Source(msgspec.Struct, frozen=True):
    """What was read. `path` is as the user gave it."""

    path: str
    kind: Literal["trace", "bundle", "folder"]
    ranks: tuple[int, ...] = ()


class ReportDevice(msgspec.Struct, frozen=True):
    """The device that was judged, with the peaks in force (dense FLOP/s by engine)."""

    name: str
    kind: DeviceKind
    provenance: PeakProvenance | None
    peaks: dict[str, float] = {}
    bandwidth_byte_per_s: float | None = None
    cache_bytes: int | None = None
    cache_bandwidth_byte_per_s: float | None = None
    sm_count: int | None = None
    launch_floor_ns: float | None = None
    source: str = ""
    notes: tuple[str, ...] = ()


class Trust(msgspec.Struct, frozen=True, kw_only=True):
    """How far the figures can be trusted: what was read, linked and modelled. Shares are of kernel time."""

    events: int
    kernels: int
    linked_share: float | None
    modelled_share: float | None
    generic_share: float | None
    unknown_share: float | None
    modelled_share_of_all: float | None
    without_launch_share: float | None = None
    outside_ops_share: float | None = None
    without_shapes_share: float | None = None
    replay_share: float | None = None
    mapped_replay_share: float | None = None
    attributable_share: float | None = None
    """attributable + collective + copy + without_launch + replay + outside_ops + without_shapes = 1 (shares of all kernel time)."""
    collective_share: float | None = None
    copy_share: float | None = None
    dropped: dict[str, int] = {}
    profiler_slowdown: float | None = None
    replay_error_share: float | None = None
    site_match_share: float | None = None
    """Share of the timing window's op time whose call site was found in the site window."""
    warnings: tuple[str, ...] = ()
    notices: tuple[Notice, ...] = ()
    """What `warnings` says, one for one, as codes with parameters."""


class StepSummary(msgspec.Struct, frozen=True):
    """The analysed steps. `source` says how they were found."""

    count: int
    source: str
    wall_ns: int
    median_ns: int | None
    p95_ns: int | None
    recorded: int = 0
    """Complete steps in the trace, before edge steps were dropped."""
    longest: str = ""
    """Name of the longest analysed step."""
    longest_ns: int | None = None
    preempted_ns: int | None = None
    """Time of the longest step in which its thread waited for a processor; null: not known."""


class MfuReference(msgspec.Struct, frozen=True):
    """A published utilisation to compare with, and what it was divided by."""

    what: str
    share: float
    denominator: str
    source: str
    another_device: bool = False
    """True: it was reached on another device than that of the report, which `denominator` names."""


class Mfu(msgspec.Struct, frozen=True):
    """Model FLOPs utilisation of the analysed steps."""

    model_flops: float
    """Matrix FLOP of the ops launched in the analysed steps, without repeated forward work.

    Counted op by op: causal attention has half of its pairs, an embedding look-up nothing, the output layer is a product like any other.
    """
    share: float
    """model_flops / (wall time x peak of the type that carries most matrix FLOP)."""
    provenance: Provenance
    dtype: str = ""
    modelled_share: float | None = None
    peak_flop_per_s: float | None = None
    """Denominator: the dense peak of `dtype`."""
    recompute_flops: float | None = None
    """Matrix FLOP that repeat forward work (checkpointing, scores of a flash backward); not in model_flops."""
    hfu_share: float | None = None
    """(model_flops + recompute_flops) / (wall time x peak): hardware FLOPs utilisation."""
    references: tuple[MfuReference, ...] = ()
    known_share: float | None = None
    """Share of the time in kernels that do or may do matrix work whose FLOP are counted; below 0.95 the figures are lower bounds."""


class OpRow(msgspec.Struct, frozen=True, kw_only=True):
    """One (name, phase, module, signature): sums over its `count` calls. Null: not known."""

    name: str
    phase: str | None = None
    module: str | None = None
    signature: str | None = None
    count: int
    kernel_ns: int
    flops: float | None
    bytes: float | None
    t_roof_ns: float | None
    bound: Bound
    bound_ns: dict[str, int] = {}
    efficiency: float | None
    provenance: Provenance
    dtype: str | None = None
    cache_resident: bool = False
    over_roof: float | None = None
    """t_roof / measured where it is above 1.03: the peak or the count is wrong, and `efficiency` is null."""
    over_roof_cause: Literal["cache", "inner_cache", "algorithm", "unexplained"] | None = None
    """Why it can be above: its data lies in a closer cache, or a fast algorithm (Winograd, FFT) multiplies less than counted."""
    engine: str | None = None
    """Key of device.peaks that its matrix work was judged against, by most time; null: no matrix work, or no peak."""
    engine_by: Literal["name", "settings", "rate", "type"] | None = None
    """What told the engine: kernel name, recorded settings, a rate that vector units cannot reach, or only the type."""
    occupancy: float | None = None
    """'est. achieved occupancy', 0..1, mean over the kernel time with a record; null: not recorded."""
    waves: float | None = None
    """Waves of thread blocks, mean over the kernel time with a record; below 1: SMs stay empty."""
    recompute_ns: int = 0
    """Part of kernel_ns that repeats forward work inside the backward pass (activation checkpointing)."""
    where: str | None = None
    """'file.py(line): function' of the call site that costs most."""


class KernelRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel name: sums over its `count` launches."""

    name: str
    kind: str
    count: int
    kernel_ns: int
    bound: Bound
    op: str | None = None
    """The op that launched most of its time."""
    kernel_class: str | None = None
    """Kind of work by kernel name alone; all that is known of graph replays whose capture was not recorded."""


class IdleRow(msgspec.Struct, frozen=True, kw_only=True):
    """Idle time of the device by cause and by the op that ended it."""

    cause: str
    count: int
    idle_ns: int
    op: str | None = None
    file: str | None = None
    line: int | None = None
    evidence: str | None = None
    """The event that shows the cause."""
    notice: Notice | None = None
    """What `evidence` says where gpudiag words it; null: `evidence` is the name of the event, or there is none."""


class SyncRow(msgspec.Struct, frozen=True, kw_only=True):
    """The calls that waited for the device at one place: sums over its `count` calls in the analysed steps."""

    api: str
    op: str | None
    count: int
    wall_ns: int
    """Time inside the calls."""
    waited_ns: int
    """Part of it in which useful work still ran."""
    cost_ns: int
    """Idle time of the device that the calls caused: at most wall_ns."""
    file: str | None = None
    line: int | None = None


class CriticalRow(msgspec.Struct, frozen=True, kw_only=True):
    """Time of the longest path by kind and bound, summed over the representative steps."""

    kind: str
    bound: str
    path_ns: int
    share: float


class CollectiveRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of collective: sums over its `count` calls."""

    name: str
    count: int
    kernel_ns: int
    group: str | None = None
    size: int | None = None
    bytes: int | None = None
    """Message of one call."""
    algbw_byte_per_s: float | None = None
    """Bytes of all calls / kernel_ns; a lower bound, since a kernel also waits for the other ranks."""
    busbw_byte_per_s: float | None = None
    """algbw x the collective's factor: comparable with the one-direction rate of the link."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """What the run was recorded with: the manifest of its bundle, without the UUID of the device."""

    machine: Machine
    settings: Settings
    program: Program | None = None


class CodeLines(msgspec.Struct, frozen=True, kw_only=True):
    """The lines of the program around one that the report names, as they were when it was recorded."""

    file: str
    """As in `findings[].where`: the end of its path."""
    line: int
    first: int = 1
    """Number of the first of `lines`."""
    lines: tuple[str, ...] = ()
    """Empty where they are not known."""
    status: Literal["same", "changed", "missing"] = "same"
    """Of the file where the report was made: the one that was recorded, another one, or not there."""


class ReportData(msgspec.Struct, frozen=True, kw_only=True):
    """One report: the keys of its JSON."""

    schema_version: int = REPORT_SCHEMA_VERSION
    tool: Tool
    source: Source
    device: ReportDevice | None
    trust: Trust
    steps: StepSummary
    device_time: DeviceTime | None
    breakdown: Breakdown
    mfu: Mfu | None
    ops: tuple[OpRow, ...]
    kernels: tuple[KernelRow, ...] = ()
    idle: tuple[IdleRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    memory: MemoryReport | None = None
    energy: Energy | None = None
    telemetry: Telemetry | None = None
    ranks: tuple[RankRow, ...] | None = None
    """Each rank beside the others; null: one rank was analysed alone."""
    job: Job | None = None
    """What only the comparison of ranks tells, with the same `ranks`; null: one rank was analysed alone."""
    lines: tuple[Where, ...] = ()
    """The program's line that most work of the device runs under, its backward pass included, and the one below it with most of that."""
    code: tuple[CodeLines, ...] = ()
    """Around the places of findings and `lines`; empty where the recording does not tell which files its program had."""
    findings: tuple[Finding, ...] = ()
    rules: tuple[RuleOutcome, ...] = ()
    experiments: tuple[Outcome, ...] = ()
    syncs: tuple[SyncRow, ...] = ()
    queue: QueueStats | None = None
    critical_path: tuple[CriticalRow, ...] = ()
    replay: ReplayTrust | None = None
    what_ifs: tuple[WhatIf, ...] = ()
    history: StepHistory | None = None
    """All steps of the run; null: a trace alone was read, or no record of its steps was found."""
    compilation: CompileReport | None = None
    """What torch.compile did; null: nothing was compiled, or the recording does not hold it (a trace alone, an older gpudiag)."""
    recorded: Recorded | None = None
    """None: a trace alone, which does not say."""


def encode_report(report: msgspec.Struct) -> bytes:
    """Return a report, comparison or check as JSON (UTF-8, two-space indent, newline at the end)."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def decode_report(data: bytes) -> ReportData:
    """Return the report; keys that are not known are ignored. Raises msgspec.DecodeError or ValidationError."""
    return msgspec.json.decode(data, type=ReportData)
