"""The manifest of a bundle: what was recorded, with which settings, on which machine."""

from __future__ import annotations

from typing import Literal

import msgspec

from gpudiag.model.hardware import Device
from gpudiag.model.trace import ObservedDevice

BUNDLE_VERSION = 1
"""Major version of the bundle layout; readers refuse newer ones."""

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
    """Why it was recorded, in words: 'schedule', 'step 1000', 'signal SIGUSR1', 'step time rose 31 %'."""


class OptimizerSettings(msgspec.Struct, frozen=True):
    """An optimizer that stepped during the run."""

    name: str
    parameters: int
    """Number of scalar parameters that it updates."""
    tensors: int
    fused: bool | None = None
    foreach: bool | None = None
    capturable: bool | None = None


class LoaderSettings(msgspec.Struct, frozen=True):
    """The DataLoader that the steps were drawn from."""

    num_workers: int
    pin_memory: bool
    persistent_workers: bool
    prefetch_factor: int | None = None
    batch_size: int | None = None


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


class TelemetryInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How the table telemetry was sampled."""

    source: str
    """'nvml' or 'psutil'."""
    interval_ns: int
    samples: int
    missing: dict[str, str] = {}
    """Column of table telemetry -> why it is null, in NVML's words."""
    limits: dict[str, float] = {}
    """What the device allows, by name with unit: power_limit_w, max_sm_clock_mhz, max_pcie_link_gen, ..."""


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
    telemetry: TelemetryInfo | None = None
    """None: not sampled."""
    command: tuple[str, ...] | None = None
    """The arguments of `gpudiag run`, as given; None where the run was recorded by `gpudiag.profile`."""
    warnings: tuple[str, ...] = ()
