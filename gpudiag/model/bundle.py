"""What a bundle says: its manifest (settings, machine, program, windows), generated code, and the state of a run that is being recorded.

Names no host, user, path, branch or remote; environment variables only from a short list (gpudiag.capture.environment.process).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gpudiag.model.hardware import Device, ObservedDevice
from gpudiag.model.notices import Notice
from gpudiag.model.ops import Shape

UNREADABLE = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""Another form, text that is no UTF-8 or holds half a surrogate pair, and nesting that msgspec follows too deeply."""


class Code(msgspec.Struct, frozen=True):
    """The git state of the folder of the script."""

    commit: str
    """Hash of the commit that was checked out."""
    dirty: bool | None = None
    """Whether tracked files differed from it; None: git did not answer in time, or only a filter (Git LFS) could have told."""
    script_tracked: bool | None = None
    """Whether the script itself is in the repository; None: not known."""


class DistributedData(msgspec.Struct, frozen=True, kw_only=True):
    """A model wrapped in torch.nn.parallel.DistributedDataParallel. None: this version of torch does not tell."""

    world_size: int | None = None
    bucket_cap_bytes: int | None = None
    """Size at which gradients are reduced together (bucket_cap_mb, in bytes)."""
    find_unused_parameters: bool | None = None
    static_graph: bool | None = None
    gradient_as_bucket_view: bool | None = None
    broadcast_buffers: bool | None = None
    """Whether the buffers of rank 0 are sent to all ranks before each forward pass."""
    param_dtype: str | None = None
    """Type of its mixed_precision; None: not used."""
    comm_hooks: tuple[str, ...] = ()
    """Names of the functions registered with register_comm_hook."""


class ShardedData(msgspec.Struct, frozen=True, kw_only=True):
    """Modules wrapped alike by FullyShardedDataParallel (version 1) or fully_shard (version 2). None: this version does not tell."""

    version: Literal[1, 2]
    units: int
    """Modules that are gathered and freed together: one group of parameters each."""
    sharding: str | None = None
    """Version 1: name of its ShardingStrategy. Version 2: 'reshard after forward' or 'no reshard after forward'."""
    world_size: int | None = None
    """Ranks that share one copy of the parameters."""
    mesh: tuple[int, ...] = ()
    """Sizes of the device mesh: (replicas, shards) or (shards,)."""
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    cpu_offload: bool | None = None


class Wrappers(msgspec.Struct, frozen=True, kw_only=True):
    """Wrapped models that were alive when the recording ended."""

    ddp: tuple[DistributedData, ...] = ()
    fsdp: tuple[ShardedData, ...] = ()
    data_parallel_devices: int | None = None
    """Devices of a torch.nn.DataParallel model (one process drives them all); None: there is none."""
    deepspeed_zero_stage: int | None = None
    """ZeRO stage of a DeepSpeed engine; None: there is none, or it does not tell."""
    grad_scaler: bool = False
    """Whether an enabled GradScaler is alive."""


class CompileCall(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of torch.compile with the same arguments."""

    backend: str
    mode: str | None = None
    """'default', 'reduce-overhead', ...; 'options': others than those of a mode; None: another backend than Inductor."""
    dynamic: bool | None = None
    """None: torch decides."""
    fullgraph: bool | None = None
    count: int = 1


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """What torch.compile did in this process, from the counters of torch._dynamo."""

    calls: tuple[CompileCall, ...] = ()
    """Those whose result was alive when the recording ended."""
    graphs: int = 0
    graph_breaks: int = 0
    """Places at which a graph had to end, counted each time that a frame was compiled."""
    recompiles: int = 0
    """Compilations of a frame beyond its first."""
    generated_graphs: int | None = None
    """Graphs whose Inductor code was alive when the recording ended; None: not looked for (the run was killed)."""
    generated_kernels: int | None = None
    """Kernels in that code."""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """What the training program brought along; None: not known (the run was killed before it could be looked for)."""

    packages: dict[str, str] = {}
    """Version of each known package that the process had imported."""
    variables: dict[str, str | None] = {}
    """Environment variables that change speed or numerics; None: set to something that is not kept."""
    code: Code | None = None
    """None: the folder is in no git repository, there is no git, or it took too long."""
    compiled: Compiled | None = None
    """None: torch.compile was not used."""
    wrappers: Wrappers | None = None
    activation_checkpointing: bool | None = None
    """Whether torch.utils.checkpoint ran in the loop, or a module was set up for it."""
    sources: dict[str, str] | None = None
    """Digest of each file of the program when it was recorded, by its path below the folder that Python imports it from.

    None: not wanted, or an older gpudiag.
    """


BUNDLE_VERSION = 2
"""Major version of the bundle layout; readers refuse newer ones. 2: tables are JSON by columns, where 1 had Parquet."""

MANIFEST_NAME = "manifest.json"


class Window(msgspec.Struct, frozen=True):
    """One profiled window: its trace file (relative to the bundle), what it recorded, which steps."""

    rank: int
    index: int
    kind: Literal["timing", "sites"]
    file: str
    first_step: int
    steps: int
    record_shapes: bool
    with_stack: bool
    trigger: str = "schedule"
    """Why it was recorded, in words: 'schedule', 'repeat 2 of 3', 'step 1000', 'signal SIGUSR1', 'step time rose 31 %'."""
    planned: int = 0
    """Steps that it was meant to record; 0: not known."""


class OptimizerSettings(msgspec.Struct, frozen=True):
    """An optimizer that stepped during the run."""

    name: str
    parameters: int
    """Number of scalar parameters that it updates."""
    tensors: int
    fused: bool | None = None
    foreach: bool | None = None
    capturable: bool | None = None
    implementation: Literal["fused", "foreach", "for-loop", "mixed"] | None = None
    """How torch runs the step with these arguments, its own defaults resolved; None: not an optimizer of torch, or it has one way only."""
    channels_last: bool | None = None
    """Whether the weights of its convolutions lie in channels_last; None: it has none that tell."""


class LoaderSettings(msgspec.Struct, frozen=True):
    """The DataLoader that the steps were drawn from."""

    num_workers: int
    pin_memory: bool
    persistent_workers: bool
    prefetch_factor: int | None = None
    batch_size: int | None = None
    drop_last: bool | None = None
    in_order: bool | None = None
    """Whether batches come in the order of the sampler; None: this version of torch has no choice."""
    sampler: str | None = None
    """Class of the sampler; None: an iterable dataset."""
    dataset: Literal["map", "iterable"] | None = None
    start_method: str | None = None
    """How its workers start ('fork', 'spawn', 'forkserver'); None: no workers, or not known yet."""
    pin_memory_device: str | None = None
    """None: the current accelerator."""


class Settings(msgspec.Struct, frozen=True):
    """Numerics and threads as found when the run was recorded; None: could not be read."""

    float32_matmul_precision: str | None = None
    """'highest' (IEEE fp32), 'high' (TF32) or 'medium' (bf16), as torch.get_float32_matmul_precision()."""
    cuda_matmul_allow_tf32: bool | None = None
    cudnn_allow_tf32: bool | None = None
    cudnn_benchmark: bool | None = None
    deterministic: bool | None = None
    autocast: tuple[str, ...] = ()
    """Autocast regions that were entered while recording, such as 'cuda:bf16'."""
    threads: int | None = None
    interop_threads: int | None = None
    optimizers: tuple[OptimizerSettings, ...] = ()
    loader: LoaderSettings | None = None
    compiled: bool | None = None
    """Whether torch.compile produced code in this process."""
    fp32_precision: dict[str, str] = {}
    """'cuda.matmul', 'cudnn.conv', ... -> 'ieee', 'tf32', 'bf16' or 'none' (nothing asked for), as torch.backends says.

    Empty: torch before 2.9.
    """
    cudnn_deterministic: bool | None = None
    cudnn_enabled: bool | None = None
    reduced_precision_reduction: dict[str, bool] = {}
    """'bf16', 'fp16' -> whether cuBLAS may add up partial products in that type."""
    sdp_backends: tuple[str, ...] | None = None
    """Kernels that scaled_dot_product_attention may choose from: 'flash', 'mem_efficient', 'cudnn', 'math'."""
    anomaly_detection: bool | None = None
    """Whether torch.autograd.set_detect_anomaly is on: every backward node is checked, which waits for the device."""
    tracers: tuple[str, ...] | None = None
    """Modules that were told of every call or line of Python while the steps ran (sys.settrace, sys.setprofile, sys.monitoring)."""
    allocator: dict[str, str] = {}
    """Settings of the caching allocator that differ from its defaults, such as expandable_segments -> 'True'."""


class Machine(msgspec.Struct, frozen=True):
    """Where it ran. Holds no host name, user name, path or environment variable."""

    python: str = ""
    torch: str = ""
    cuda: str | None = None
    system: str = ""
    cpu: str = ""
    cpu_cores: int | None = None
    isa: str | None = None
    """Widest vector instruction set that torch uses (torch.backends.cpu.get_cpu_capability())."""
    cpu_quota: float | None = None
    """Cores' worth of time that the control group grants; None: no limit, or not known."""
    numa_nodes: int | None = None
    driver: str | None = None
    """Version of the NVIDIA driver; None: no such device was used, or NVML did not answer."""
    gpu_uuid: str | None = None
    """Of the device used. Reports leave it out."""


PREEMPTED_SHARE = 0.05
"""Share of a step from which on a wait of the training thread for a processor has a host mark."""

WORKERS_STARTED = ".__iter__"
"""End of the name of a host mark of kind loader that is the start of an iterator, with its workers; else a batch was asked for."""

IN_ANOTHER_THREAD = "in another thread"
"""End of the name of a host mark that is of no thread of the training's."""

NO_CUDA_USED = "this process used no CUDA device"
"""Reason for which columns of a GPU are missing (TelemetryInfo.missing)."""


class TelemetryInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How the table telemetry was sampled."""

    source: str
    """'nvml' or 'psutil'."""
    interval_ns: int
    """Between samples in the first ten minutes and around profiled windows; elsewhere a second. Slow columns are sampled less often."""
    samples: int
    missing: dict[str, str] = {}
    """Column of table telemetry -> why it is null, in NVML's words; 'at times: ...' where other samples have it."""
    notes: dict[str, str] = {}
    """Column -> what to know of how it was read: power instantaneous or averaged, figures of a whole board, latest Xid errors."""
    notices: tuple[Notice, ...] = ()
    """What of `notes` figures depend on: xid_errors, board_shared, power_averaged."""
    limits: dict[str, float] = {}
    """What the device allows, by name with unit: power_limit_w, max_sm_clock_mhz, max_pcie_link_gen, ..."""
    device_index: int | None = None
    """CUDA's index in this process of the GPU that was asked, as in the recordings; None: no GPU was asked, or an older recorder."""
    device_key: str | None = None
    """Tells that very GPU from others (model.hardware.build_device_key)."""
    device_since_unix_ns: int = 0
    """Columns of a GPU in samples before this moment are of another one: the optimizer turned out to step elsewhere."""


class RankState(msgspec.Struct, frozen=True):
    """What rank 0 found of another rank when it finished."""

    rank: int
    finished: bool


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`manifest.json` of a bundle."""

    bundle_version: int = BUNDLE_VERSION
    tool_version: str = ""
    created_unix_ns: int = 0
    finished: bool = False
    """False: the run is still recording or was killed; what is there can be read."""
    device_kind: Literal["gpu", "cpu"] = "cpu"
    device: ObservedDevice | None = None
    peaks: Device | None = None
    """Measured peaks of this device, where they were known when the bundle was finished."""
    machine: Machine = Machine()
    settings: Settings = Settings()
    windows: tuple[Window, ...] = ()
    steps: int = 0
    rank: int = 0
    world_size: int = 1
    host: str = ""
    """What tells the machines of a run of several ranks apart: 'node 3' as the launcher counts, else a digest; never the host's name."""
    launch: str = ""
    """The same for the ranks of one launch, different for another launch; a digest, empty where the launcher does not say."""
    ranks: tuple[RankState, ...] = ()
    """The ranks that recorded beside this one, as found by rank 0 when it finished."""
    telemetry: TelemetryInfo | None = None
    """None: not sampled."""
    command: tuple[str, ...] | None = None
    """The arguments of `gpudiag run`, as given; None where the run was recorded by `gpudiag.profile`."""
    program: Program | None = None
    """None: recorded without it (an older gpudiag)."""
    warnings: tuple[str, ...] = ()
    notices: tuple[Notice, ...] = ()
    """The code of each warning, whose text is the parameter `text`; empty in bundles of the first edition."""


INDUCTOR_VERSION = 1

Access = Literal["read", "write", "both"]


class KernelBuffer(msgspec.Struct, frozen=True):
    """A buffer that one call of a generated kernel is given."""

    name: str
    """Inductor's name of the argument, such as 'in_ptr0'."""
    dtype: str
    """Short dtype name ('fp32'); '' where it is not known."""
    access: Access
    shape: Shape | None = None
    """Shape of what is passed (a view where a view is passed); None: sizes that only the run decides."""
    touched: int | None = None
    """At most this many elements are accessed: places in the code times the points of the loops around them. None: not known."""


class GeneratedKernel(msgspec.Struct, frozen=True):
    """A kernel and its calls with the same buffers in one compiled graph."""

    name: str
    category: str
    """poi, red, per, tem, for, ... (codegen/triton.py of Inductor), 'cpp', or 'extern' for a call of a library."""
    calls: int = 1
    """Calls in one call of the graph."""
    ops: tuple[str, ...] | None = None
    """Original operators as Inductor's comment names them, such as 'add'; None: no comment, the kernel's name says them."""
    nodes: tuple[str, ...] = ()
    """Source nodes of the traced graph."""
    buffers: tuple[KernelBuffer, ...] = ()
    points: int | None = None
    """Points of the loops, reduced dimensions included; None: sizes that only the run decides."""
    reduction: int | None = None
    """Length of the reduced dimensions; None: no reduction, or not known."""


class CompiledGraph(msgspec.Struct, frozen=True):
    """A graph that torch.compile compiled: its key in the trace ('## Call CompiledFxGraph <key> ##') and its kernels."""

    key: str
    kernels: tuple[GeneratedKernel, ...]


class InductorCode(msgspec.Struct, frozen=True):
    """`inductor/rank<N>.json` of a bundle."""

    version: int = INDUCTOR_VERSION
    graphs: tuple[CompiledGraph, ...] = ()


WatchStatus = Literal["waiting", "recording", "silent", "gone", "stopped", "finished"]
"""waiting: not begun; recording: it writes; silent: for longer than a run that records; gone: so long that it was killed;
stopped: it trains on, unrecorded."""


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is being recorded, as its bundle tells it. None: not known."""

    version: int
    """Another number wherever the bundle has changed."""
    status: WatchStatus
    reason: str = ""
    """Why it is not recorded any longer, '' where it is or has finished."""
    silent_s: float = 0.0
    """Seconds since the newest file of the recording was written."""
    steps: int = 0
    step_ns: float | None = None
    """Median wall time of the latest unprofiled steps."""
    over: int = 0
    """How many steps that median is over."""
    loader_share: float | None = None
    """Part of these steps that was spent waiting for batches."""
    samples_per_s: float | None = None
    sampled: dict[str, float] = {}
    """The latest value of each telemetry column that is known."""
    windows: tuple[str, ...] = ()
    """The recorded windows in words: 'steps 7 to 12', of stacks 'steps 13 to 14 with stacks'."""
    warnings: tuple[str, ...] = ()
