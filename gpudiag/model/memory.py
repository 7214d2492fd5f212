"""Device memory: who owned it and what it was used for at its peak; the estimate of what training a model would take."""

from __future__ import annotations

from typing import Literal

import msgspec

MEMORY_VERSION = 1
"""Major version of memory/rank<N>-owners.json; readers refuse newer ones."""

OwnerKind = Literal["parameters", "gradients", "optimizer_state", "buffers"]

MEMORY_CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer_state",
    "buffers",
    "activations",
    "forward_held",
    "inputs",
    "temporary",
    "before_recording",
    "unknown",
)
"""What memory is used for, in the order of reports. activations: made by the forward pass and freed in or after the backward pass;
forward_held: made by the forward pass and still held, where no backward pass was recorded that could need it; temporary: freed by the op
or the pass that made it; before_recording: there before the recording began, and no owner is known."""


class Owner(msgspec.Struct, frozen=True):
    """A tensor's storage that the training holds on to: where it lay when the window ended."""

    kind: OwnerKind
    name: str
    """As named_parameters() gives it, with what it is of the parameter for optimizer state; '' where the module is not known."""
    device: str
    """'cpu' or 'cuda:0'."""
    address: int
    bytes: int
    """Of the whole storage, without the allocator's rounding."""


class AllocatorStats(msgspec.Struct, frozen=True):
    """Counters of the caching allocator since the process began (torch.cuda.memory_stats); None: this version of torch has no such key."""

    allocated_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    reserved_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    active_peak_bytes: int | None = None
    inactive_split_bytes: int | None = None
    alloc_retries: int | None = None
    ooms: int | None = None


class Owners(msgspec.Struct, frozen=True, kw_only=True):
    """`memory/rank<N>-owners.json` of a bundle."""

    version: int = MEMORY_VERSION
    window: int
    """Index of the window at whose end the owners were looked up."""
    device: str
    """'cuda:<index>' of the training thread, else 'cpu'."""
    owners: tuple[Owner, ...] = ()
    stats: AllocatorStats | None = None
    """None: the run used no CUDA device."""
    snapshot: bool = False
    """Whether memory/rank<N>.pickle was written beside it."""
    notes: tuple[str, ...] = ()


class MemoryRow(msgspec.Struct, frozen=True):
    """Bytes in use at the peak under one name; `blocks`: allocations."""

    name: str
    bytes: int
    blocks: int
    category: str


class PoolRow(msgspec.Struct, frozen=True):
    """The segments of one size class and stream, when the snapshot was taken."""

    size_class: str
    """'small' (allocations up to 1 MiB) or 'large'."""
    stream: int
    segments: int
    reserved_bytes: int
    allocated_bytes: int
    largest_free_bytes: int


class MemoryTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """Memory in use over the recording by what it was for. A point stands for a short time: its event with most in use."""

    t_ns: tuple[int, ...]
    """When, from the trace's base: the beginning of the recording, as all times of events."""
    by_category: dict[str, tuple[int, ...]]
    """Category -> bytes in use at each point, in the order of MEMORY_CATEGORIES; those without bytes are left out."""
    peak: int
    """Place of the point at the peak."""
    places: tuple[str, ...] = ()
    """Call sites, else the outermost ops, that `largest` names."""
    largest: dict[str, tuple[int, ...]] = {}
    """Category -> place in `places` of the one that holds most of it at each point; -1: not known."""
    reserved_bytes: tuple[int, ...] = ()
    """What the allocator had reserved at each point; () where it does not say."""
    step_starts_ns: tuple[int, ...] = ()
    """Beginnings of the steps, from the same moment."""


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one device at the moment of its peak within the recording. `by_category` sums to `peak_bytes` exactly."""

    device: str
    peak_bytes: int
    lower_bound: bool = False
    """Whether what was in use before the recording may be missing in `peak_bytes`: nothing counted it."""
    peak_step: str | None = None
    peak_phase: str | None = None
    peak_op: str | None = None
    """The op that made the last allocation before the peak."""
    by_category: dict[str, int] = {}
    """Category -> bytes, in the order of CATEGORIES; those without bytes are left out."""
    by_module: tuple[MemoryRow, ...] = ()
    """What was allocated in the recording by the profiler's path of the module ('Net_0.Linear_1'), what was there before by the names of
    named_parameters()."""
    by_site: tuple[MemoryRow, ...] = ()
    by_op: tuple[MemoryRow, ...] = ()
    blocks: int = 0
    """Allocations alive at the peak whose allocation was recorded."""
    reserved_peak_bytes: int | None = None
    fragmentation_share: float | None = None
    """(reserved - allocated) / reserved: held by the allocator, used by no tensor. At the peak; of a snapshot alone when it was taken."""
    largest_free_bytes: int | None = None
    """Largest free block of the snapshot: what can be allocated without asking the driver."""
    inactive_split_share: float | None = None
    """Share of the reserved memory in free parts of segments that are partly in use, at the snapshot: it cannot be given back."""
    retries: int | None = None
    """Times that the allocator freed its cached segments and tried again (since the process began)."""
    ooms: int | None = None
    run_peak_bytes: int | None = None
    """Peak of allocated memory since the process began; above peak_bytes where the recorded window did not hold it."""
    capacity_bytes: int | None = None
    pools: tuple[PoolRow, ...] = ()
    timeline: MemoryTimeline | None = None
    """null: of a snapshot alone, and in reports of older versions."""
    provenance: Literal["owners", "lifetimes", "snapshot"] = "lifetimes"
    """owners: parameters, gradients and optimizer state by their addresses; lifetimes: by what allocated and freed; snapshot: by Python
    frames."""
    notes: tuple[str, ...] = ()


EstimatePhase = Literal["forward", "backward", "optimizer"]

ESTIMATE_CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer_state",
    "buffers",
    "activations",
    "weight_casts",
    "inputs",
    "temporary",
)
"""What memory is held for, in the order of reports. activations: made by the forward pass and not freed by it; weight_casts: copies of
parameters in the type that autocast computes in; temporary: freed by the pass that made it (gradients of activations, recomputed
activations, results that nothing keeps)."""


class PhasePeak(msgspec.Struct, frozen=True):
    """The most memory that is in use in one pass of a training step."""

    phase: EstimatePhase
    bytes: int


class HeldRow(msgspec.Struct, frozen=True):
    """Activations at the end of the forward pass of the modules of one name ('*': the numbers of layers) and class."""

    module: str
    bytes: int
    tensors: int


class ModelEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of training one model on one device in bytes. What no tensor holds is not in it: context, libraries, fragmentation."""

    device: str
    """'cuda' or 'cpu': whose kernels and defaults were assumed."""
    parameter_count: int
    """Elements of all parameters; a tied one counts once."""
    parameters_bytes: int
    buffers_bytes: int
    gradients_bytes: int
    """Of all parameters that got one, when the backward pass has ended."""
    optimizer_bytes: int
    """States of the optimizer after its step, on the device."""
    inputs_bytes: int
    activations_bytes: int
    """Made by the forward pass and held at its end: what the backward pass needs, and the output."""
    weight_casts_bytes: int
    """Copies of parameters for autocast, held at the end of the forward pass."""
    peak_bytes: int
    """The most that tensors hold at any time of a step, in blocks of `block_bytes`."""
    peak_phase: EstimatePhase
    peak_op: str
    """The op whose result reached it."""
    at_peak: dict[str, int]
    """What for -> bytes, in the order of HELD; they sum to `peak_bytes`."""
    phases: tuple[PhasePeak, ...]
    modules: tuple[HeldRow, ...]
    """Largest first; they sum to `activations_bytes`."""
    block_bytes: int
    """Each storage is rounded up to a multiple of this in the peaks (512: the CUDA caching allocator; 1: not rounded)."""
    optimizer: str
    autocast: str
    """'none', or the type: 'bfloat16'."""
    notes: tuple[str, ...] = ()
