"""What the training program brought along: packages, wrappers, compilation, its commit. Part of the manifest of a bundle.

Names no host, user, path, branch or remote; environment variables only from a short list (gpudiag.capture.environment.variables).
"""

from __future__ import annotations

from typing import Literal

import msgspec


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
