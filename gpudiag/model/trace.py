"""A trace: the tables of one profiled window of one rank, the schema (column, dtype, unit) of every table, what is known of the recording.

Times are Int64 nanoseconds since the trace's base; ids are row numbers. `stage` names who fills a column:
`read` (trace reader), `link` (attribution), `cost` (roofline). A table has the columns of its stage and of those before.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import polars as pl

from gpudiag.model.hardware import ObservedDevice
from gpudiag.model.notices import NSYS_COMMAND, Notice

Stage = Literal["read", "link", "cost"]
STAGES: tuple[Stage, ...] = ("read", "link", "cost")


class Column(msgspec.Struct, frozen=True):
    """One column of a table: its name, polars dtype, unit ('' where it has none), meaning and stage."""

    name: str
    dtype: pl.DataType
    unit: str
    doc: str
    stage: Stage = "read"


_I64, _F64, _TEXT, _NAME, _BOOL = pl.Int64(), pl.Float64(), pl.String(), pl.Categorical(), pl.Boolean()

_ID = Column("id", _I64, "", "row number")
_THREAD = Column("thread", _I64, "", "index into TraceMeta.threads")
_START = Column("start_ns", _I64, "ns", "start, from the trace's base")
_END = Column("end_ns", _I64, "ns", "end, from the trace's base")

TABLES: dict[str, tuple[Column, ...]] = {
    "ops": (
        _ID,
        _THREAD,
        Column("name", _NAME, "", "operator or autograd node, as the profiler names it"),
        _START,
        _END,
        Column("sequence", _I64, "", "autograd sequence number"),
        Column("fwd_thread", _I64, "", "autograd's own number of the forward thread (0: this op is forward itself)"),
        Column("signature", _I64, "", "row of signatures; null: no shapes were recorded"),
        Column("parent", _I64, "", "enclosing op on the same thread", "link"),
        Column("step", _I64, "", "row of steps", "link"),
        Column("phase", _TEXT, "", "data | forward | backward | optimizer | other", "link"),
        Column("module", _TEXT, "", "nn.Module path", "link"),
        Column("recompute", _BOOL, "", "forward work repeated inside the backward pass (activation checkpointing)", "link"),
    ),
    "signatures": (
        _ID,
        Column("shapes", _TEXT, "", "'Input Dims' as JSON text"),
        Column("dtypes", _TEXT, "", "'Input type' as JSON text"),
        Column("strides", _TEXT, "", "'Input Strides' as JSON text; null where not recorded"),
        Column("args", _TEXT, "", "'Concrete Inputs' as JSON text; null where not recorded"),
    ),
    "launches": (
        _ID,
        _THREAD,
        Column("api", _NAME, "", "runtime or driver call, such as cudaLaunchKernel or hipStreamSynchronize"),
        _START,
        _END,
        Column("correlation", _I64, "", "joins a call with the device work that it started"),
        Column("kernel", _NAME, "", "kernel that the call names (ROCm); null: not recorded"),
        Column("op", _I64, "", "innermost op that was open on the calling thread", "link"),
    ),
    "kernels": (
        _ID,
        Column("name", _NAME, "", "kernel, copy or memset; for kind cpu the op"),
        Column("kind", _TEXT, "", "kernel | memcpy | memset | cpu"),
        Column("device", _I64, "", "device index in the process; null for kind cpu"),
        Column("stream", _I64, "", "stream; null for kind cpu"),
        _START,
        _END,
        Column("correlation", _I64, "", "joins with launches.correlation"),
        Column("grid", _I64, "blocks", "thread blocks launched (product of the three dimensions)"),
        Column("block", _I64, "threads", "threads per block (product of the three dimensions)"),
        Column("bytes", _I64, "B", "bytes copied or set, as recorded"),
        Column("graph_node", _I64, "", "CUDA graph node id"),
        Column("occupancy", _F64, "share", "'est. achieved occupancy %' as 0..1; null: not recorded"),
        Column("busy_ns", _I64, "ns", "time worked: end - start on a device, self time on a CPU", "link"),
        Column("launch", _I64, "", "row of launches; null: no launch record", "link"),
        Column("op", _I64, "", "innermost op around the launch", "link"),
        Column("step", _I64, "", "row of steps in which it was launched; null: outside every step or unlinked", "link"),
        Column("collective", _BOOL, "", "a collective, by kernel name or record_param_comms", "link"),
        Column("replay", _BOOL, "", "launched by a graph launch", "link"),
        Column("mapped", _BOOL, "", "a replayed kernel whose `op` was found in the capture pass of its graph", "link"),
        Column("kernel_class", _TEXT, "", "kind of work by kernel name alone; null for copies, memsets, kind cpu", "link"),
        Column("owner", _I64, "", "op whose cost it carries (innermost with a formula, else with shapes)", "cost"),
        Column("flops", _F64, "FLOP", "its part of the owner's matrix and vector FLOPs", "cost"),
        Column("matrix_flops", _F64, "FLOP", "the part of flops on matrix engines", "cost"),
        Column(
            "recompute_flops", _F64, "FLOP", "the part of matrix_flops that repeats forward work within the op (flash backward)", "cost"
        ),
        Column("bytes_moved", _F64, "B", "its part of the owner's compulsory bytes", "cost"),
        Column("t_roof_ns", _F64, "ns", "roofline time; null where no cost or no peak is known", "cost"),
        Column("bound", _TEXT, "", "compute | memory | overhead | communication | copy | unknown", "cost"),
        Column("efficiency", _F64, "share", "t_roof_ns / busy_ns", "cost"),
        Column("provenance", _TEXT, "", "exact | derived | generic | none", "cost"),
        Column("cache_resident", _BOOL, "", "judged against the last-level cache", "cost"),
        Column("over_roof", _BOOL, "", "faster than 103 % of its roof: the peak or the count is wrong", "cost"),
        Column("over_cause", _TEXT, "", "cache | inner_cache | algorithm | unexplained: why it is over its roof; null: it is not", "cost"),
        Column("engine", _TEXT, "", "key of Device.peaks that its matrix work is judged against; null: none, or no peak", "cost"),
        Column("engine_by", _TEXT, "", "name | settings | rate | type: what told the engine", "cost"),
        Column("waves", _F64, "", "grid / (SMs x resident blocks an SM); null: occupancy or grid not recorded", "cost"),
    ),
    "frames": (
        _ID,
        _THREAD,
        Column("name", _NAME, "", "'file.py(line): function'; the line of the def, of a call or operator in it, or ? (see docs/terms.md)"),
        _START,
        _END,
    ),
    "marks": (
        _ID,
        _THREAD,
        Column("name", _NAME, "", "ProfilerStep#N, NVTX or record_function text, profiler overhead, gc, file write"),
        Column(
            "category",
            _TEXT,
            "",
            "annotation | overhead | sync | gc | save | file_write | os (call of the operating system) | loader (wait for a batch)",
        ),
        _START,
        _END,
    ),
    "allocations": (
        _ID,
        _THREAD,
        Column("t_ns", _I64, "ns", "moment, from the trace's base"),
        Column("bytes", _I64, "B", "allocated (positive) or freed (negative)"),
        Column("device_kind", _TEXT, "", "cpu | gpu"),
        Column("device", _I64, "", "device index"),
        Column("total_allocated", _I64, "B", "as the allocator counts"),
        Column("total_reserved", _I64, "B", "as the allocator counts"),
        Column("address", _I64, "", "of the block; null: not recorded (torch before 1.13)"),
    ),
    "collectives": (
        _ID,
        Column("kernel", _I64, "", "row of kernels; null where the fields stand on an op"),
        Column("op", _I64, "", "row of ops; null where the fields stand on a kernel"),
        Column("name", _TEXT, "", "'Collective name', such as allreduce"),
        Column("group", _TEXT, "", "process group name"),
        Column("size", _I64, "ranks", "group size"),
        Column("in_elements", _I64, "elements", "'In msg nelems'"),
        Column("out_elements", _I64, "elements", "'Out msg nelems'"),
        Column("dtype", _TEXT, "", "element type as recorded"),
        Column("seq", _I64, "", "sequence number in the group"),
        Column("members", _TEXT, "", "ranks of the group, '0,1,2,3'; null: not recorded, or cut off and not evenly spaced"),
        Column("source", _I64, "", "sending rank of a point-to-point message ('Src Rank') or root; null: not recorded"),
        Column("target", _I64, "", "receiving rank of a point-to-point message ('Dst Rank'); null: not recorded"),
        Column("in_splits", _TEXT, "rows", "'In split size', '3,4,5': what each member gets; null: even, cut off, or not recorded"),
        Column("out_splits", _TEXT, "rows", "'Out split size': what comes from each member; null likewise"),
    ),
    "steps": (
        _ID,
        Column("name", _TEXT, "", "ProfilerStep#N or 'whole trace'"),
        Column("start_ns", _I64, "ns", "mark k (inclusive)"),
        Column("end_ns", _I64, "ns", "mark k+1 (exclusive)"),
        Column("analysed", _BOOL, "", "counts in the breakdown (edge steps may be dropped)"),
    ),
    # time in which no stream of the analysed device has work (attribution.device)
    "gaps": (
        _ID,
        _START,
        _END,
        Column("kind", _TEXT, "", "host_wait | queued | edge | unlinked: see attribution.device"),
        Column("kernel", _I64, "", "row of kernels that ends the gap"),
        Column("op", _I64, "", "op that launched the kernel which ends the gap"),
        Column("launch", _I64, "", "row of launches that started the kernel; null: not recorded"),
    ),
    # the gaps cut to the analysed steps and into pieces of one cause each (timeline.idle); the pieces of a gap touch and fill it
    "idle": (
        _ID,
        Column("gap", _I64, "", "row of gaps"),
        _START,
        _END,
        Column("kind", _TEXT, "", "that of the gap"),
        Column("cause", _TEXT, "", "idle bucket of the breakdown"),
        Column("evidence", _TEXT, "", "the event that shows the cause, in words; null for unexplained"),
        Column("evidence_code", _TEXT, "", "code of a notice that says it; null: evidence is the event's own name, or needs none"),
        Column("evidence_name", _TEXT, "", "kernel or frame that the code is about"),
        Column("evidence_detail", _TEXT, "", "call that waited, or time that a call took, as the code needs it"),
        Column("kernel", _I64, "", "row of kernels that ends the gap"),
        Column("op", _I64, "", "op that was open on the responsible thread, else the one that launched the kernel"),
        Column("thread", _I64, "", "host thread that was responsible; null: not known"),
        Column("sync", _I64, "", "row of syncs that is charged; null: none"),
        Column("site", _TEXT, "", "'file.py(line): function' of the user's line; null: not known"),
    ),
    # host calls that wait for the device (timeline.launch_queue)
    "syncs": (
        _ID,
        Column("launch", _I64, "", "row of launches: the call that blocked"),
        _THREAD,
        Column("api", _TEXT, "", "such as cudaStreamSynchronize; for a blocking copy cudaMemcpyAsync"),
        _START,
        _END,
        Column("op", _I64, "", "outermost op around the call that the user wrote (aten::item rather than _local_scalar_dense)"),
        Column("kernel", _I64, "", "row of kernels whose end it waited for; null: nothing was running"),
        Column("waited_ns", _I64, "ns", "part of the call in which that work was still running"),
        Column("cost_ns", _I64, "ns", "idle time of the device that it is charged with (sum of its idle pieces), at most end - start"),
        Column("step", _I64, "", "row of steps"),
        Column("site", _TEXT, "", "'file.py(line): function'; null: not known"),
    ),
    # the longest path through each representative step (timeline.breakdown); its pieces touch and fill the step
    "critical_path": (
        _ID,
        Column("step", _I64, "", "row of steps"),
        _START,
        _END,
        Column("kind", _TEXT, "", "model.graph.NODE_KINDS, or 'delay': time on an edge that no node explains"),
        Column("bound", _TEXT, "", "bound of the kernel, or idle cause of the host's time, or dependency for a delay"),
        Column("kernel", _I64, "", "row of kernels"),
        Column("op", _I64, "", "row of ops"),
        Column("thread", _I64, "", "host thread; null for device work"),
        Column("stream", _I64, "", "stream; null for host work"),
    ),
    # every step of a bundle, profiled or not (steps/rank<N>/<seq>.json); t = Unix time, not the trace's base
    "step_records": (
        Column("step", _I64, "", "number of the step, from 0"),
        Column("start_unix_ns", _I64, "ns", "Unix time of mark k"),
        Column("wall_ns", _I64, "ns", "mark k to mark k+1, monotonic clock"),
        Column("loader_wait_ns", _I64, "ns", "time inside the loader's __next__; null: not seen"),
        Column("samples", _I64, "samples", "first dimension of the batch's first tensor; null: not seen"),
        Column("window", _TEXT, "", "plain | warm | timing | sites | export: what the profiler did in this step"),
        Column("written_bytes", _I64, "B", "bytes that the process wrote (to open files: as asked in every 16th step); null: not known"),
        # phases of the step, by the host's clock on CPU runs and by CUDA events (the device's progress) where the run uses a GPU
        Column("h2d_ns", _I64, "ns", "copies host to device that the training thread asked for; null: no device, or not seen"),
        Column("forward_ns", _I64, "ns", "batch in hand to the start of backward, without those copies; summed over micro-batches"),
        Column("backward_ns", _I64, "ns", "inside Tensor.backward"),
        Column("optimizer_ns", _I64, "ns", "inside optimizer steps"),
        Column("phase_clock", _TEXT, "", "host | device: which clock measured the phases; null: no phase was seen"),
        Column("backwards", _I64, "", "calls of Tensor.backward (micro-batches of gradient accumulation)"),
        Column("optimizer_steps", _I64, "", "optimizer steps"),
        Column("batch_elements", _I64, "elements", "positions in the batch's mask or ids, or batch size times longest length; null: none"),
        Column("padded_elements", _I64, "elements", "of these, positions that are padding"),
    ),
    # samples during the run (telemetry/rank<N>/*.json), of NVML or of psutil; any but the time may be null (Manifest.telemetry says why)
    "telemetry": (
        Column("t_ns", _I64, "ns", "Unix time of the sample"),
        Column("sm_clock_mhz", _F64, "MHz", "SM clock"),
        Column("mem_clock_mhz", _F64, "MHz", "memory clock"),
        Column("gpu_util_pct", _F64, "%", "share of the driver's last sample period in which a kernel ran (not how full the SMs were)"),
        Column("mem_util_pct", _F64, "%", "share of that period in which device memory was read or written"),
        Column("mem_used_bytes", _I64, "B", "device memory in use, all processes"),
        Column("torch_allocated_bytes", _I64, "B", "device memory in tensors of this process, at the moment of the sample"),
        Column("torch_reserved_bytes", _I64, "B", "device memory that PyTorch's allocator holds for this process, free blocks included"),
        Column("power_w", _F64, "W", "power draw"),
        Column("energy_mj", _I64, "mJ", "energy counter since the driver was loaded"),
        Column("temperature_c", _F64, "C", "GPU temperature"),
        Column("pcie_rx_bytes_per_s", _F64, "B/s", "PCIe receive throughput"),
        Column("pcie_tx_bytes_per_s", _F64, "B/s", "PCIe transmit throughput"),
        Column("pcie_link_gen", _I64, "", "present PCIe generation (falls when idle)"),
        Column("pcie_link_width", _I64, "", "present PCIe lanes"),
        Column("nvlink_rx_bytes", _I64, "B", "NVLink data received since the counters began, all links"),
        Column("nvlink_tx_bytes", _I64, "B", "NVLink data sent, all links"),
        Column("clock_event_reasons", _I64, "", "bit mask nvmlClocksEventReasons* (throttle reasons)"),
        Column("ecc_uncorrected", _I64, "", "uncorrected ECC errors since the driver was loaded"),
        Column("xid_events", _I64, "", "Xid critical errors since the recording began"),
        Column("cpu_util_pct", _F64, "%", "CPU time of this process and its children per second, 100 = one core"),
        Column("system_cpu_util_pct", _F64, "%", "busy share of all cores of the machine, 0..100"),
        Column("cpu_freq_mhz", _F64, "MHz", "mean CPU frequency"),
        Column("rss_bytes", _I64, "B", "resident memory of this process and its children"),
        Column("child_threads", _I64, "", "threads that compute in the child process that computed most"),
    ),
    "host_marks": (
        Column(
            "kind",
            _TEXT,
            "",
            "gc | save | file_write | loader | preempted | slow (where the training thread was) | inside (what that ran) | kept (tensors)",
        ),
        Column("name", _TEXT, "", "what: 'gen 2', 'torch.save', 'os.fsync', the file's base name, the function"),
        Column("start_unix_ns", _I64, "ns", "Unix time"),
        Column("duration_ns", _I64, "ns", "0 where only the start is known"),
        Column("site", _TEXT, "", "file:line of the caller where known"),
        Column("step", _I64, "", "number of the step"),
    ),
}

GPU_COLUMNS = tuple(
    column.name
    for column in TABLES["telemetry"]
    if column.name not in ("t_ns", "cpu_util_pct", "system_cpu_util_pct", "cpu_freq_mhz", "rss_bytes", "child_threads")
)
"""Columns of telemetry that are of a GPU."""

# Drivers fill a field that they do not know with ones (0xFFFFFFFF); the largest values that mean something, by column.
MAX_PLAUSIBLE: dict[str, float] = {
    "sm_clock_mhz": 10_000, "mem_clock_mhz": 50_000, "gpu_util_pct": 100, "mem_util_pct": 100, "mem_used_bytes": 1 << 50,
    "torch_allocated_bytes": 1 << 50, "torch_reserved_bytes": 1 << 50,
    "power_w": 20_000, "energy_mj": 1 << 60, "temperature_c": 250, "pcie_rx_bytes_per_s": 1e12, "pcie_tx_bytes_per_s": 1e12,
    "pcie_link_gen": 15, "pcie_link_width": 64, "nvlink_rx_bytes": 1 << 62, "nvlink_tx_bytes": 1 << 62,
    "clock_event_reasons": (1 << 32) - 1, "ecc_uncorrected": 1 << 40, "xid_events": 1 << 40,
    "cpu_util_pct": 1e6, "system_cpu_util_pct": 100.5, "cpu_freq_mhz": 20_000, "rss_bytes": 1 << 50, "child_threads": 1 << 20,
}  # fmt: skip


def list_columns(table: str, stage: Stage = "cost") -> tuple[Column, ...]:
    """Return the columns that `table` has after `stage`."""
    reached = STAGES[: STAGES.index(stage) + 1]
    return tuple(column for column in TABLES[table] if column.stage in reached)


def build_table_schema(table: str, stage: Stage = "read") -> dict[str, pl.DataType]:
    """Return the polars schema of `table` after `stage`."""
    return {column.name: column.dtype for column in list_columns(table, stage)}


def build_empty_table(table: str, stage: Stage = "read") -> pl.DataFrame:
    """Return `table` with no rows."""
    return pl.DataFrame(schema=build_table_schema(table, stage))


Recorder = Literal["torch", "nsys"]
"""What wrote a recording: PyTorch's profiler or Nsight Systems."""


class Thread(msgspec.Struct, frozen=True):
    """A host thread of the recording; `pid` and `tid` as text because some schemas write words there."""

    pid: str
    tid: str
    name: str = ""


class TraceMeta(msgspec.Struct, frozen=True):
    """What is known about a recording besides its events. Nothing else of a file's header is kept."""

    source: str
    events: int
    base_ns: int
    """Absolute time of the trace's zero, in the file's own clock."""
    unix_base_ns: int | None = None
    """Unix time of the trace's zero, where the file's clock is known to be Unix time."""
    devices: tuple[ObservedDevice, ...] = ()
    threads: tuple[Thread, ...] = ()
    rank: int | None = None
    world_size: int | None = None
    record_shapes: bool = False
    with_stack: bool = False
    profile_memory: bool = False
    dropped: dict[str, int] = {}
    """Events that were not used, by reason in plain words."""
    truncated: bool = False
    uncompressed_bytes: int = 0
    notices: tuple[Notice, ...] = ()
    recorder: Recorder = "torch"
    """Advice on what to record differs."""


class Trace(msgspec.Struct, frozen=True):
    """The tables of one window (schemas: TABLES). Later stages return a Trace with more columns."""

    meta: TraceMeta
    ops: pl.DataFrame
    signatures: pl.DataFrame
    launches: pl.DataFrame
    kernels: pl.DataFrame
    frames: pl.DataFrame
    marks: pl.DataFrame
    allocations: pl.DataFrame
    collectives: pl.DataFrame


TRACE_TABLES = ("ops", "signatures", "launches", "kernels", "frames", "marks", "allocations", "collectives")


_OF_NSYS = {
    "iterate a torch DataLoader inside the profiled window, or record with gpudiag.profile": (
        f"put NVTX ranges around the loading and the training of each batch and record with `{NSYS_COMMAND}`, "
        "or record with gpudiag.profile"
    ),
    "record with activities=[CPU, CUDA]": "record with `nsys profile --trace=cuda,nvtx` and torch.autograd.profiler.emit_nvtx()",
    "record with record_shapes=True": "record with torch.profiler or gpudiag.profile, which note shapes and types (record_shapes=True)",
    "record with with_stack=True": "record with torch.profiler, which notes Python stacks (with_stack=True), or with gpudiag.profile",
}
"""PyTorch's profiler's options, which nsys has not -> what does the same there."""


def adapt_advice(text: str, recorder: Recorder) -> str:
    """Return `text`, which says what to record in terms of torch.profiler, as it applies to a recording of `recorder`."""
    if recorder == "nsys":
        for of_torch, of_nsys in _OF_NSYS.items():
            text = text.replace(of_torch, of_nsys)
    return text
