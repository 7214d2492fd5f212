"""Facts about how the run was set up, as the bundle says, and about debug features that cost time in each step.

For rules CMP-07, MEM-05, CAP-03, CAP-09, INP-01, DST-02, DST-04, DST-05, OVH-04, OVH-05 and SYN-02.
"""

from __future__ import annotations

import polars as pl

from gpudiag.attribution.names import match_column
from gpudiag.facts.communication import ONE_MACHINE
from gpudiag.facts.host_time import measure_share_of_plain
from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window
from gpudiag.model.bundle import Compiled, DistributedData, LoaderSettings, Program, Settings, ShardedData, Wrappers

HOW_TO_RECORD = "record with gpudiag.profile or gpudiag run"


def _read_settings(window: Window) -> Settings:
    manifest = window.analysis.manifest
    if manifest is None:
        raise NotKnownError(f"a trace does not hold the settings of the run: {HOW_TO_RECORD}")
    return manifest.settings


def _read_program(window: Window) -> Program:
    _read_settings(window)
    program = window.analysis.manifest.program if window.analysis.manifest else None
    if program is None:
        raise NotKnownError(f"the bundle does not say what the program brought along: {HOW_TO_RECORD} of this version")
    return program


def _require_known(value: bool | None, what: str) -> bool:
    if value is None:
        raise NotKnownError(f"{what} could not be read in this run")
    return value


# -- switches of torch ------------------------------------------------------------------------------------------------


@fact("cudnn_benchmark", unit="bool")
def cudnn_benchmark(window: Window) -> bool:
    """Whether cuDNN tried its algorithms out and took the fastest (torch.backends.cudnn.benchmark)."""
    window.require_accelerator()
    return _require_known(_read_settings(window).cudnn_benchmark, "torch.backends.cudnn.benchmark")


@fact("deterministic_algorithms", unit="bool")
def deterministic_algorithms(window: Window) -> bool:
    """Whether slower algorithms were asked for whose results repeat: of torch, or of cuDNN."""
    settings = _read_settings(window)
    return _require_known(settings.deterministic, "torch.are_deterministic_algorithms_enabled()") or bool(settings.cudnn_deterministic)


@fact("anomaly_detection", unit="bool")
def anomaly_detection(window: Window) -> bool:
    """Whether autograd checked every backward node for NaN (torch.autograd.set_detect_anomaly), which waits for the device."""
    return _require_known(_read_settings(window).anomaly_detection, "torch.is_anomaly_enabled()")


@fact("launch_blocking", unit="bool")
def launch_blocking(window: Window) -> bool:
    """Whether CUDA_LAUNCH_BLOCKING was set: every launch waits for its kernel."""
    window.require_accelerator()
    value = _read_program(window).variables.get("CUDA_LAUNCH_BLOCKING", "0")
    return _require_known(None if value is None else value not in ("0", "false", "no", "off"), "CUDA_LAUNCH_BLOCKING")


@fact("fused_attention_allowed", unit="bool")
def fused_attention_allowed(window: Window) -> bool:
    """Whether scaled_dot_product_attention may choose a fused kernel (flash, memory-efficient or cuDNN)."""
    allowed = _read_settings(window).sdp_backends
    if allowed is None:
        raise NotKnownError("the switches of scaled_dot_product_attention could not be read in this run")
    return any(name != "math" for name in allowed)


@fact("autocast_used", unit="bool")
def autocast_used(window: Window) -> bool:
    """Whether an autocast region was entered while recording."""
    return bool(_read_settings(window).autocast)


@fact("expandable_segments", unit="bool")
def expandable_segments(window: Window) -> bool:
    """Whether the caching allocator grows its segments (PYTORCH_ALLOC_CONF=expandable_segments:True) instead of making new ones."""
    window.require_accelerator()
    return _read_settings(window).allocator.get("expandable_segments") == "True"


# -- optimizer and loader ---------------------------------------------------------------------------------------------


@fact("optimizer_implementation", unit="text")
def optimizer_implementation(window: Window) -> str:
    """How torch was set to run the optimizer step: fused, foreach, for-loop or mixed; torch's own defaults are resolved."""
    optimizers = _read_settings(window).optimizers
    require(bool(optimizers), "no optimizer of torch stepped while recording")
    ways = {optimizer.implementation for optimizer in optimizers}
    if None in ways:
        raise NotKnownError("an optimizer is not one of torch's, or has one way to run only")
    return str(ways.pop()) if len(ways) == 1 else "mixed"


@fact("weights_channels_last", unit="bool")
def weights_channels_last(window: Window) -> bool:
    """Whether the weights of the model's convolutions lie in channels_last."""
    layouts = {optimizer.channels_last for optimizer in _read_settings(window).optimizers} - {None}
    require(bool(layouts), "no optimizer updates weights of convolutions whose layout tells")
    return layouts == {True}


@fact("grad_scaler_used", unit="bool")
def grad_scaler_used(window: Window) -> bool:
    """Whether gradients were scaled (torch.amp.GradScaler, enabled): it reads a flag from the device in every step."""
    return _read_wrappers(window).grad_scaler


def _read_loader(window: Window) -> LoaderSettings:
    loader = _read_settings(window).loader
    if loader is None:
        raise NotKnownError("no torch DataLoader was seen while recording")
    return loader


@fact("loader_in_order", unit="bool")
def loader_in_order(window: Window) -> bool:
    """Whether batches come in the order of the sampler, so that one slow batch holds up the next (DataLoader(in_order=...))."""
    return _read_loader(window).in_order is not False


@fact("loader_drops_last", unit="bool")
def loader_drops_last(window: Window) -> bool:
    """Whether the smaller last batch of an epoch is left out (drop_last=True): a further shape makes torch.compile compile again."""
    return _require_known(_read_loader(window).drop_last, "DataLoader.drop_last")


# -- wrappers ---------------------------------------------------------------------------------------------------------


def _read_wrappers(window: Window) -> Wrappers:
    found = _read_program(window).wrappers
    if found is None:
        raise NotKnownError("how the model is wrapped is looked up when a recording ends: this one did not end, or gc.freeze() hid it")
    return found


def _read_ddp(window: Window) -> DistributedData:
    """Return the wrapper with the most to find fault with; raises NotKnownError where there is none."""
    found = _read_wrappers(window).ddp
    require(bool(found), "no DistributedDataParallel model was alive when the recording ended")
    return max(found, key=lambda item: (bool(item.find_unused_parameters), -(item.bucket_cap_bytes or 0)))


@fact("ddp_used", unit="bool")
def ddp_used(window: Window) -> bool:
    """Whether a model was wrapped in DistributedDataParallel."""
    return bool(_read_wrappers(window).ddp)


@fact("ddp_bucket_cap_bytes", unit="B")
def ddp_bucket_cap_bytes(window: Window) -> int:
    """Size at which DistributedDataParallel reduces gradients together (bucket_cap_mb; 25 MiB unless given)."""
    found = _read_ddp(window).bucket_cap_bytes
    if found is None:
        raise NotKnownError("this version of torch does not tell its bucket size")
    return found


@fact("ddp_finds_unused_parameters", unit="bool")
def ddp_finds_unused_parameters(window: Window) -> bool:
    """Whether DistributedDataParallel walks the graph of every step for parameters without gradients (find_unused_parameters=True)."""
    return _require_known(_read_ddp(window).find_unused_parameters, "find_unused_parameters")


@fact("ddp_static_graph", unit="bool")
def ddp_static_graph(window: Window) -> bool:
    """Whether DistributedDataParallel was told that the graph never changes (static_graph=True)."""
    return _require_known(_read_ddp(window).static_graph, "static_graph")


@fact("ddp_gradient_as_bucket_view", unit="bool")
def ddp_gradient_as_bucket_view(window: Window) -> bool:
    """Whether gradients live in DistributedDataParallel's buckets instead of being copied in and out (gradient_as_bucket_view=True)."""
    return _require_known(_read_ddp(window).gradient_as_bucket_view, "gradient_as_bucket_view")


@fact("ddp_broadcasts_buffers", unit="bool")
def ddp_broadcasts_buffers(window: Window) -> bool:
    """Whether DistributedDataParallel sends the buffers of rank 0 to all ranks before each forward pass (broadcast_buffers=True)."""
    return _require_known(_read_ddp(window).broadcast_buffers, "broadcast_buffers")


@fact("data_parallel_devices", unit="count")
def data_parallel_devices(window: Window) -> int:
    """Devices that one process drives through torch.nn.DataParallel; 0 where that is not used."""
    return _read_wrappers(window).data_parallel_devices or 0


def _read_fsdp(window: Window) -> ShardedData:
    found = _read_wrappers(window).fsdp
    require(bool(found), "no model under FSDP was alive when the recording ended")
    return found[0]


@fact("fsdp_units", unit="count")
def fsdp_units(window: Window) -> int:
    """Groups of parameters that FSDP gathers and frees together; 0 where it is not used."""
    return sum(item.units for item in _read_wrappers(window).fsdp)


@fact("fsdp_sharding", unit="text")
def fsdp_sharding(window: Window) -> str:
    """How most FSDP units are sharded: name of the ShardingStrategy, or 'reshard after forward' / 'no reshard after forward'."""
    found = _read_fsdp(window).sharding
    if found is None:
        raise NotKnownError("this version of torch does not tell how FSDP shards")
    return found


@fact("fsdp_offloads", unit="bool")
def fsdp_offloads(window: Window) -> bool:
    """Whether FSDP keeps parameters in host memory (CPUOffload, CPUOffloadPolicy)."""
    return _require_known(_read_fsdp(window).cpu_offload, "FSDP's CPU offload")


@fact("nccl_ways_disabled", unit="count")
def nccl_ways_disabled(window: Window) -> int:
    """Ways between GPUs that NCCL was told not to use: NCCL_P2P_DISABLE, NCCL_SHM_DISABLE, and from 9 ranks on NCCL_IB_DISABLE.

    Fewer ranks are taken to be on one machine, where InfiniBand has no part.
    """
    window.require_accelerator()
    values, manifest = _read_program(window).variables, window.analysis.manifest
    network = ("IB",) if manifest is not None and manifest.world_size > ONE_MACHINE else ()
    return sum(values.get(f"NCCL_{way}_DISABLE") == "1" for way in ("P2P", "SHM", *network))


# -- compilation ------------------------------------------------------------------------------------------------------


def _read_compiled(window: Window) -> Compiled:
    return _read_program(window).compiled or Compiled()


@fact("compile_mode", unit="text")
def compile_mode(window: Window) -> str:
    """Mode of most torch.compile calls ('default', 'reduce-overhead', 'options', ...), or the name of another backend than Inductor."""
    calls = _read_compiled(window).calls
    require(bool(calls), "torch.compile was not used, or nothing that it returned was alive when the recording ended")
    return calls[0].mode or calls[0].backend


@fact("compiled_graphs", unit="count")
def compiled_graphs(window: Window) -> int:
    """Graphs that torch.compile captured in this process; 0 where it was not used."""
    return _read_compiled(window).graphs


@fact("graph_breaks", unit="count")
def graph_breaks(window: Window) -> int:
    """Times torch.compile had to end a graph, counted in each compilation of their frame."""
    return _read_compiled(window).graph_breaks


@fact("recompiles", unit="count")
def recompiles(window: Window) -> int:
    """Compilations of a frame beyond its first, since the process began."""
    return _read_compiled(window).recompiles


@fact("activation_checkpointing", unit="bool")
def activation_checkpointing(window: Window) -> bool:
    """Whether activations were computed again in the backward pass (torch.utils.checkpoint), or a module was set up for it."""
    return _require_known(_read_program(window).activation_checkpointing, "activation checkpointing")


NAN_CHECKS = r"^aten::(isnan|any|_is_any_true|is_nonzero|item)$"
"""Ops by which autograd looks for NaN after each backward node (torch/csrc/autograd/engine.cpp: isnan().any().item())."""

BACKWARD_NODE = r"^autograd::engine::evaluate_function"

COSTLY_VARIABLES = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("0", "false", "no", "off"),
    "TORCH_NCCL_BLOCKING_WAIT": ("0", "false", "no", "off"),
    "TORCH_DISTRIBUTED_DEBUG": ("OFF",),
    "NCCL_DEBUG": ("VERSION", "WARN", "ABORT"),
    "TORCH_LOGS": ("",),
}
"""Variables that slow every step down -> the values with which they do not."""


def _find_nan_checks(window: Window) -> pl.DataFrame:
    """Return the outermost NaN checks of the backward nodes in the analysed steps."""
    ops = window.analysis.trace.ops
    nodes = ops.filter(match_column("name", BACKWARD_NODE))["id"]
    found = ops.filter(match_column("name", NAN_CHECKS) & pl.col("parent").is_in(nodes.implode()))
    return found.filter(pl.col("step").is_in(window.steps["id"].implode()))


@fact("nan_checks_per_step", unit="count")
def nan_checks_per_step(window: Window) -> float:
    """Checks for NaN after backward nodes (aten::isnan under a node of autograd) per analysed step: anomaly detection was on."""
    ops = window.analysis.trace.ops
    if not ops.height or not window.steps.height:
        raise NotKnownError("no ops were recorded: record with activities=[CPU, CUDA]")
    return _find_nan_checks(window).filter(pl.col("name") == "aten::isnan").height / window.steps.height


@fact("anomaly_mode", unit="bool")
def anomaly_mode(window: Window) -> bool:
    """Whether autograd's anomaly detection was on in the analysed steps: by its checks for NaN, else by the setting."""
    try:
        return float(nan_checks_per_step(window)) > 0 or bool(anomaly_detection(window))
    except NotKnownError:
        if float(nan_checks_per_step(window)) > 0:
            return True
        if window.analysis.trace.ops.filter(match_column("name", BACKWARD_NODE)).height:
            return False  # backward nodes without a check
        raise


def _estimate_stacks_ns(window: Window) -> float:
    """Return what keeping a Python stack for each forward node costs on a CPU: the excess of forward ops, at most twice that of a view.

    A view does nothing by itself, so its own time is that of the stack.
    """
    # Time_ns and t_roof_ns of the forward ops of a CPU-only run that autograd numbers
    work = window.kernels.filter(pl.col("phase") == "forward")
    numbered = window.analysis.trace.ops["id"].filter(window.analysis.trace.ops["sequence"].is_not_null())
    forward = work.filter(pl.col("op").is_in(numbered.implode())).select("op_name", "time_ns", "t_roof_ns")
    views = forward.filter(pl.col("t_roof_ns").fill_null(0) == 0)["time_ns"]
    usual = views.quantile(0.75)
    if usual is None:
        return 0.0
    excess = (pl.col("time_ns") - pl.col("t_roof_ns").fill_null(0)).clip(0, 2 * usual)
    return float(forward.select(excess.sum()).item() or 0)


@fact("anomaly_ns", unit="ns")
def anomaly_ns(window: Window) -> float:
    """At most this time goes into anomaly detection: its checks for NaN and the Python stack that each forward op keeps.

    On a GPU: the checks' kernels, and all idle time that the host is to blame for, as each check waits for the device.
    """
    checks = _find_nan_checks(window)
    if window.on_cpu:
        return float((checks["end_ns"] - checks["start_ns"]).sum()) + _estimate_stacks_ns(window)
    ids = set(checks["id"].to_list())
    children = window.analysis.trace.ops.filter(pl.col("parent").is_in(list(ids)))["id"].to_list()
    grand = window.analysis.trace.ops.filter(pl.col("parent").is_in(children))["id"].to_list()
    own = window.kernels.filter(pl.col("op").is_in([*ids, *children, *grand]))
    buckets = window.analysis.breakdown.buckets_ns
    return float(window.exposed_ns(own) + buckets.idle_launch + buckets.idle_sync)


@fact("blocking_ns", unit="ns")
def blocking_ns(window: Window) -> float:
    """Idle time of the device that blocking launches can be to blame for: that by launches and by synchronisation."""
    window.require_accelerator()
    buckets = window.analysis.breakdown.buckets_ns
    return float(buckets.idle_launch + buckets.idle_sync)


@fact("blocking_launches", unit="bool")
def blocking_launches(window: Window) -> bool:
    """Whether every launch waited for its kernel (CUDA_LAUNCH_BLOCKING); false on a CPU-only run."""
    return False if window.on_cpu else bool(launch_blocking(window))


@fact("debug_variables", unit="text")
def debug_variables(window: Window) -> str:
    """Environment variables that are set and slow the steps down, by name: distributed checks, NCCL and torch logs; '' where none is."""
    manifest = window.analysis.manifest
    if manifest is None or manifest.program is None:
        raise NotKnownError("a trace does not hold the environment of the run: record with gpudiag.profile or gpudiag run")
    values = manifest.program.variables
    return ", ".join(name for name, harmless in COSTLY_VARIABLES.items() if name in values and values[name] not in harmless)


@fact("debug_features_ns", unit="ns")
def debug_features_ns(window: Window) -> float:
    """At most this time is given back without them: anomaly_ns with anomaly detection, blocking_ns with blocking launches; else unknown."""
    if anomaly_mode(window):
        return measure_share_of_plain(window, float(anomaly_ns(window))) * window.wall_ns
    if blocking_launches(window):
        return float(blocking_ns(window))
    raise NotKnownError("what these settings cost can only be measured: run once without them")
