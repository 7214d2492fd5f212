"""Facts about how the run was set up, as the bundle says: cuDNN, allocator, optimizer, wrappers, compilation.

For rules CMP-07, MEM-05, CAP-03, CAP-09, INP-01, DST-02, DST-04, DST-05, OVH-04, OVH-05 and SYN-02.
"""

from __future__ import annotations

from gpudiag.facts.link_rate import ONE_MACHINE
from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window
from gpudiag.model.bundle import LoaderSettings, Settings
from gpudiag.model.program import Compiled, DistributedData, Program, ShardedData, Wrappers

RECORD = "record with gpudiag.profile or gpudiag run"


def _settings(window: Window) -> Settings:
    manifest = window.analysis.manifest
    if manifest is None:
        raise NotKnownError(f"a trace does not hold the settings of the run: {RECORD}")
    return manifest.settings


def _program(window: Window) -> Program:
    _settings(window)
    program = window.analysis.manifest.program if window.analysis.manifest else None
    if program is None:
        raise NotKnownError(f"the bundle does not say what the program brought along: {RECORD} of this version")
    return program


def _known(value: bool | None, what: str) -> bool:
    if value is None:
        raise NotKnownError(f"{what} could not be read in this run")
    return value


# -- switches of torch ------------------------------------------------------------------------------------------------


@fact("cudnn_benchmark", unit="bool")
def cudnn_benchmark(window: Window) -> bool:
    """Whether cuDNN tried its algorithms out and took the fastest (torch.backends.cudnn.benchmark)."""
    window.require_accelerator()
    return _known(_settings(window).cudnn_benchmark, "torch.backends.cudnn.benchmark")


@fact("deterministic_algorithms", unit="bool")
def deterministic_algorithms(window: Window) -> bool:
    """Whether slower algorithms were asked for whose results repeat: of torch, or of cuDNN."""
    settings = _settings(window)
    return _known(settings.deterministic, "torch.are_deterministic_algorithms_enabled()") or bool(settings.cudnn_deterministic)


@fact("anomaly_detection", unit="bool")
def anomaly_detection(window: Window) -> bool:
    """Whether autograd checked every backward node for NaN (torch.autograd.set_detect_anomaly), which waits for the device."""
    return _known(_settings(window).anomaly_detection, "torch.is_anomaly_enabled()")


@fact("launch_blocking", unit="bool")
def launch_blocking(window: Window) -> bool:
    """Whether CUDA_LAUNCH_BLOCKING was set: every launch waits for its kernel."""
    window.require_accelerator()
    value = _program(window).variables.get("CUDA_LAUNCH_BLOCKING", "0")
    return _known(None if value is None else value not in ("0", "false", "no", "off"), "CUDA_LAUNCH_BLOCKING")


@fact("fused_attention_allowed", unit="bool")
def fused_attention_allowed(window: Window) -> bool:
    """Whether scaled_dot_product_attention may choose a fused kernel (flash, memory-efficient or cuDNN)."""
    allowed = _settings(window).sdp_backends
    if allowed is None:
        raise NotKnownError("the switches of scaled_dot_product_attention could not be read in this run")
    return any(name != "math" for name in allowed)


@fact("autocast_used", unit="bool")
def autocast_used(window: Window) -> bool:
    """Whether an autocast region was entered while recording."""
    return bool(_settings(window).autocast)


@fact("expandable_segments", unit="bool")
def expandable_segments(window: Window) -> bool:
    """Whether the caching allocator grows its segments (PYTORCH_ALLOC_CONF=expandable_segments:True) instead of making new ones."""
    window.require_accelerator()
    return _settings(window).allocator.get("expandable_segments") == "True"


# -- optimizer and loader ---------------------------------------------------------------------------------------------


@fact("optimizer_implementation", unit="text")
def optimizer_implementation(window: Window) -> str:
    """How torch was set to run the optimizer step: fused, foreach, for-loop or mixed; torch's own defaults are resolved."""
    optimizers = _settings(window).optimizers
    require(bool(optimizers), "no optimizer of torch stepped while recording")
    ways = {optimizer.implementation for optimizer in optimizers}
    if None in ways:
        raise NotKnownError("an optimizer is not one of torch's, or has one way to run only")
    return str(ways.pop()) if len(ways) == 1 else "mixed"


@fact("weights_channels_last", unit="bool")
def weights_channels_last(window: Window) -> bool:
    """Whether the weights of the model's convolutions lie in channels_last."""
    layouts = {optimizer.channels_last for optimizer in _settings(window).optimizers} - {None}
    require(bool(layouts), "no optimizer updates weights of convolutions whose layout tells")
    return layouts == {True}


@fact("grad_scaler_used", unit="bool")
def grad_scaler_used(window: Window) -> bool:
    """Whether gradients were scaled (torch.amp.GradScaler, enabled): it reads a flag from the device in every step."""
    return _wrappers(window).grad_scaler


def _loader(window: Window) -> LoaderSettings:
    loader = _settings(window).loader
    if loader is None:
        raise NotKnownError("no torch DataLoader was seen while recording")
    return loader


@fact("loader_in_order", unit="bool")
def loader_in_order(window: Window) -> bool:
    """Whether batches come in the order of the sampler, so that one slow batch holds up the next (DataLoader(in_order=...))."""
    return _loader(window).in_order is not False


@fact("loader_drops_last", unit="bool")
def loader_drops_last(window: Window) -> bool:
    """Whether the smaller last batch of an epoch is left out (drop_last=True): a further shape makes torch.compile compile again."""
    return _known(_loader(window).drop_last, "DataLoader.drop_last")


# -- wrappers ---------------------------------------------------------------------------------------------------------


def _wrappers(window: Window) -> Wrappers:
    found = _program(window).wrappers
    if found is None:
        raise NotKnownError("how the model is wrapped is looked up when a recording ends: this one did not end, or gc.freeze() hid it")
    return found


def _ddp(window: Window) -> DistributedData:
    """Return the wrapper with the most to find fault with; raises NotKnownError where there is none."""
    found = _wrappers(window).ddp
    require(bool(found), "no DistributedDataParallel model was alive when the recording ended")
    return max(found, key=lambda item: (bool(item.find_unused_parameters), -(item.bucket_cap_bytes or 0)))


@fact("ddp_used", unit="bool")
def ddp_used(window: Window) -> bool:
    """Whether a model was wrapped in DistributedDataParallel."""
    return bool(_wrappers(window).ddp)


@fact("ddp_bucket_cap_bytes", unit="B")
def ddp_bucket_cap_bytes(window: Window) -> int:
    """Size at which DistributedDataParallel reduces gradients together (bucket_cap_mb; 25 MiB unless given)."""
    found = _ddp(window).bucket_cap_bytes
    if found is None:
        raise NotKnownError("this version of torch does not tell its bucket size")
    return found


@fact("ddp_finds_unused_parameters", unit="bool")
def ddp_finds_unused_parameters(window: Window) -> bool:
    """Whether DistributedDataParallel walks the graph of every step for parameters without gradients (find_unused_parameters=True)."""
    return _known(_ddp(window).find_unused_parameters, "find_unused_parameters")


@fact("ddp_static_graph", unit="bool")
def ddp_static_graph(window: Window) -> bool:
    """Whether DistributedDataParallel was told that the graph never changes (static_graph=True)."""
    return _known(_ddp(window).static_graph, "static_graph")


@fact("ddp_gradient_as_bucket_view", unit="bool")
def ddp_gradient_as_bucket_view(window: Window) -> bool:
    """Whether gradients live in DistributedDataParallel's buckets instead of being copied in and out (gradient_as_bucket_view=True)."""
    return _known(_ddp(window).gradient_as_bucket_view, "gradient_as_bucket_view")


@fact("ddp_broadcasts_buffers", unit="bool")
def ddp_broadcasts_buffers(window: Window) -> bool:
    """Whether DistributedDataParallel sends the buffers of rank 0 to all ranks before each forward pass (broadcast_buffers=True)."""
    return _known(_ddp(window).broadcast_buffers, "broadcast_buffers")


@fact("data_parallel_devices", unit="count")
def data_parallel_devices(window: Window) -> int:
    """Devices that one process drives through torch.nn.DataParallel; 0 where that is not used."""
    return _wrappers(window).data_parallel_devices or 0


def _fsdp(window: Window) -> ShardedData:
    found = _wrappers(window).fsdp
    require(bool(found), "no model under FSDP was alive when the recording ended")
    return found[0]


@fact("fsdp_units", unit="count")
def fsdp_units(window: Window) -> int:
    """Groups of parameters that FSDP gathers and frees together; 0 where it is not used."""
    return sum(item.units for item in _wrappers(window).fsdp)


@fact("fsdp_sharding", unit="text")
def fsdp_sharding(window: Window) -> str:
    """How most FSDP units are sharded: name of the ShardingStrategy, or 'reshard after forward' / 'no reshard after forward'."""
    found = _fsdp(window).sharding
    if found is None:
        raise NotKnownError("this version of torch does not tell how FSDP shards")
    return found


@fact("fsdp_offloads", unit="bool")
def fsdp_offloads(window: Window) -> bool:
    """Whether FSDP keeps parameters in host memory (CPUOffload, CPUOffloadPolicy)."""
    return _known(_fsdp(window).cpu_offload, "FSDP's CPU offload")


@fact("nccl_ways_disabled", unit="count")
def nccl_ways_disabled(window: Window) -> int:
    """Ways between GPUs that NCCL was told not to use: NCCL_P2P_DISABLE, NCCL_SHM_DISABLE, and from 9 ranks on NCCL_IB_DISABLE.

    Fewer ranks are taken to be on one machine, where InfiniBand has no part.
    """
    window.require_accelerator()
    values, manifest = _program(window).variables, window.analysis.manifest
    network = ("IB",) if manifest is not None and manifest.world_size > ONE_MACHINE else ()
    return sum(values.get(f"NCCL_{way}_DISABLE") == "1" for way in ("P2P", "SHM", *network))


# -- compilation ------------------------------------------------------------------------------------------------------


def _compiled(window: Window) -> Compiled:
    return _program(window).compiled or Compiled()


@fact("compile_mode", unit="text")
def compile_mode(window: Window) -> str:
    """Mode of most torch.compile calls ('default', 'reduce-overhead', 'options', ...), or the name of another backend than Inductor."""
    calls = _compiled(window).calls
    require(bool(calls), "torch.compile was not used, or nothing that it returned was alive when the recording ended")
    return calls[0].mode or calls[0].backend


@fact("compiled_graphs", unit="count")
def compiled_graphs(window: Window) -> int:
    """Graphs that torch.compile captured in this process; 0 where it was not used."""
    return _compiled(window).graphs


@fact("graph_breaks", unit="count")
def graph_breaks(window: Window) -> int:
    """Places where torch.compile had to end a graph, counted in each compilation of their frame."""
    return _compiled(window).graph_breaks


@fact("recompiles", unit="count")
def recompiles(window: Window) -> int:
    """Compilations of a frame beyond its first, since the process began."""
    return _compiled(window).recompiles


@fact("activation_checkpointing", unit="bool")
def activation_checkpointing(window: Window) -> bool:
    """Whether activations were computed again in the backward pass (torch.utils.checkpoint), or a module was set up for it."""
    return _known(_program(window).activation_checkpointing, "activation checkpointing")
