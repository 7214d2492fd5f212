"""The manifest of a bundle: what was recorded, with which settings, on which machine."""

from __future__ import annotations

from typing import Literal

import msgspec

from gpudiag.model.hardware import Device, ObservedDevice
from gpudiag.model.program import Program

BUNDLE_VERSION = 1
"""Major version of the bundle layout; readers refuse newer ones."""

BREAKS_OFF = "the file breaks off or is malformed"
"""How the warning about a trace begins that was read as far as it goes."""
UNFINISHED = "the run is still recording or was killed: this is what it had written until then"
"""Warning about a bundle whose manifest was never finished."""

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
    limits: dict[str, float] = {}
    """What the device allows, by name with unit: power_limit_w, max_sm_clock_mhz, max_pcie_link_gen, ..."""
    device_index: int | None = None
    """CUDA's index in this process of the GPU that was asked, as in the recordings; None: no GPU was asked, or an older recorder."""
    device_key: str | None = None
    """Tells that very GPU from others (model.hardware.device_key)."""
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
