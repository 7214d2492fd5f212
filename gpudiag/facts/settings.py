"""Facts about how the run was set up, as the bundle says, and about debug features that cost time in each step."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from gpudiag.attribution.names import match_column
from gpudiag.facts.communication import ONE_MACHINE
from gpudiag.facts.host_time import scale_to_recorded_ns
from gpudiag.facts.registry import NotKnownError, fact, fact_of, gpu_only, known, raise_unknown, require, require_known
from gpudiag.facts.window import Window
from gpudiag.model.bundle import Compiled, DistributedData, Program, Settings

HOW_TO_RECORD = "record with gpudiag.profile or gpudiag run"


def _read_settings(window: Window) -> Settings:
    return require_known(window.analysis.manifest, f"a trace does not hold the settings of the run: {HOW_TO_RECORD}").settings


def _read_program(window: Window) -> Program:
    _read_settings(window)
    program = window.analysis.manifest.program if window.analysis.manifest else None
    return require_known(program, f"the bundle does not say what the program brought along: {HOW_TO_RECORD} of this version")


_read_wrappers = known(
    lambda window: _read_program(window).wrappers,
    "how the model is wrapped is looked up when a recording ends: this one did not end, or gc.freeze() hid it",
)


def _read_ddp(window: Window) -> DistributedData:
    """Return the wrapper with the most to find fault with; raises NotKnownError where there is none."""
    found = _read_wrappers(window).ddp
    require(bool(found), "no DistributedDataParallel model was alive when the recording ended")
    return max(found, key=lambda item: (bool(item.find_unused_parameters), -(item.bucket_cap_bytes or 0)))


def _read_compiled(window: Window) -> Compiled:
    return _read_program(window).compiled or Compiled()


def switch(read: Callable[[Window], bool | None], what: str) -> Callable[[Window], bool]:
    """Return what reads a switch, which is not known where it could not be read while recording."""
    return lambda window: require_known(read(window), f"{what} could not be read in this run")


anomaly_detection = switch(lambda window: _read_settings(window).anomaly_detection, "torch.is_anomaly_enabled()")


def launch_blocking(window: Window) -> bool:
    """Whether CUDA_LAUNCH_BLOCKING was set: every launch waits for its kernel."""
    window.require_accelerator()
    value = _read_program(window).variables.get("CUDA_LAUNCH_BLOCKING", "0")
    return require_known(value, "CUDA_LAUNCH_BLOCKING could not be read in this run") not in ("0", "false", "no", "off")


def nccl_ways_disabled(window: Window) -> int:
    """Ways between GPUs that NCCL was told not to use: NCCL_P2P_DISABLE, NCCL_SHM_DISABLE, and from 9 ranks on NCCL_IB_DISABLE.

    Fewer ranks are taken to be on one machine, where InfiniBand has no part.
    """
    window.require_accelerator()
    values, manifest = _read_program(window).variables, window.analysis.manifest
    network = ("IB",) if manifest is not None and manifest.world_size > ONE_MACHINE else ()
    return sum(values.get(f"NCCL_{way}_DISABLE") == "1" for way in ("P2P", "SHM", *network))


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
    # the outermost ones: children of the backward nodes
    ops = window.analysis.trace.ops
    nodes = ops.filter(match_column("name", BACKWARD_NODE))["id"]
    return ops.filter(match_column("name", NAN_CHECKS) & pl.col("parent").is_in(nodes.implode()) & window.within_steps)


def nan_checks_per_step(window: Window) -> float:
    """Checks for NaN after backward nodes (aten::isnan under a node of autograd) per analysed step: anomaly detection was on."""
    require(window.analysis.trace.ops.height > 0 and window.steps.height > 0, "no ops were recorded: record with activities=[CPU, CUDA]")
    return _find_nan_checks(window).filter(pl.col("name") == "aten::isnan").height / window.steps.height


def anomaly_mode(window: Window) -> bool:
    """Whether autograd's anomaly detection was on in the analysed steps: by its checks for NaN, else by the setting."""
    try:
        return nan_checks_per_step(window) > 0 or anomaly_detection(window)
    except NotKnownError:
        if window.analysis.trace.ops.filter(match_column("name", BACKWARD_NODE)).height:
            return False  # backward nodes without a check
        raise


def anomaly_ns(window: Window) -> float:
    """Return how much time in ns at most goes into anomaly detection: its checks for NaN and the Python stack that each forward op keeps.

    On a GPU: the checks' kernels, and all idle time that the host is to blame for, as each check waits for the device.
    """
    checks, ops = _find_nan_checks(window), window.analysis.trace.ops
    if not window.on_cpu:
        around = window.find_around(window.kernels, ops["id"].is_in(checks["id"].implode()).to_numpy())
        return window.exposed_ns(window.kernels.filter(around.is_not_null())) + measure_waits_ns(window)
    # The Python stack for each forward node: the excess of forward ops, at most twice that of a view, which does nothing by itself
    work = window.kernels.filter(pl.col("phase") == "forward")
    numbered = ops["id"].filter(ops["sequence"].is_not_null())  # those that autograd numbers
    forward = work.filter(pl.col("op").is_in(numbered.implode())).select("op_name", "time_ns", "t_roof_ns")
    usual = forward.filter(pl.col("t_roof_ns").fill_null(0) == 0)["time_ns"].quantile(0.75) or 0.0
    excess = (pl.col("time_ns") - pl.col("t_roof_ns").fill_null(0)).clip(0, 2 * usual)
    return float((checks["end_ns"] - checks["start_ns"]).sum()) + float(forward.select(excess.sum()).item() or 0)


def measure_waits_ns(window: Window) -> float:
    """Return the idle time in ns of the device by launches and by synchronisation."""
    return float(window.analysis.breakdown.buckets_ns.idle_launch + window.analysis.breakdown.buckets_ns.idle_sync)


def debug_variables(window: Window) -> str:
    """Environment variables that are set and slow the steps down, by name: distributed checks, NCCL and torch logs; '' where none is."""
    program = window.analysis.manifest.program if window.analysis.manifest else None
    values = require_known(program, f"a trace does not hold the environment of the run: {HOW_TO_RECORD}").variables
    return ", ".join(name for name, harmless in COSTLY_VARIABLES.items() if name in values and values[name] not in harmless)


def debug_features_ns(window: Window) -> float:
    """At most this time is given back without them: with anomaly detection its checks and stacks, with blocking launches the idle time by
    launches and synchronisation; else unknown."""
    if anomaly_mode(window):
        return scale_to_recorded_ns(window, anomaly_ns(window))
    require(not window.on_cpu and launch_blocking(window), "what these settings cost can only be measured: run once without them")
    return measure_waits_ns(window)


# fmt: off
FACTS = (
    fact("cudnn_benchmark", "bool", "Whether cuDNN tried its algorithms out and took the fastest (torch.backends.cudnn.benchmark).",
         gpu_only(switch(lambda window: _read_settings(window).cudnn_benchmark, "torch.backends.cudnn.benchmark"))),
    fact("deterministic_algorithms", "bool", "Whether slower algorithms were asked for whose results repeat: of torch, or of cuDNN.",
         lambda window: (require_known(_read_settings(window).deterministic,
                                       "torch.are_deterministic_algorithms_enabled() could not be read in this run")
                         or (bool(_read_settings(window).cudnn_deterministic) and not window.on_cpu))),
    fact("autocast_used", "bool", "Whether an autocast region was entered while recording.",
         lambda window: bool(_read_settings(window).autocast)),
    fact("ddp_used", "bool", "Whether a model was wrapped in DistributedDataParallel.", lambda window: bool(_read_wrappers(window).ddp)),
    fact("ddp_finds_unused_parameters", "bool", "Whether DistributedDataParallel walks the graph of every step for parameters without "
         "gradients (find_unused_parameters=True).",
         switch(lambda window: _read_ddp(window).find_unused_parameters, "find_unused_parameters")),
    fact("fsdp_units", "count", "Groups of parameters that FSDP gathers and frees together; 0 where it is not used.",
         lambda window: sum(item.units for item in _read_wrappers(window).fsdp)),
    fact_of(nccl_ways_disabled, "count"),
    fact("device_connections", "count", "Queues by which work reaches the GPU (CUDA_DEVICE_MAX_CONNECTIONS; 8 unless it is set).",
         gpu_only(lambda window: int(require_known(_read_program(window).variables.get("CUDA_DEVICE_MAX_CONNECTIONS", "8"),
                                                   "CUDA_DEVICE_MAX_CONNECTIONS is set, but to no number")))),
    fact("compile_mode", "text", "Mode of most torch.compile calls ('default', 'reduce-overhead', 'options', ...), or the name of "
         "another backend than Inductor.",
         lambda window: (calls[0].mode or calls[0].backend if (calls := _read_compiled(window).calls)
                         else raise_unknown("torch.compile was not used, or nothing that it returned was alive when the recording ended"))),
    fact("graph_breaks", "count", "Times torch.compile had to end a graph, counted in each compilation of their frame.",
         lambda window: _read_compiled(window).graph_breaks),
    fact("recompiles", "count", "Compilations of a frame beyond its first, since the process began.",
         lambda window: _read_compiled(window).recompiles),
    fact_of(nan_checks_per_step, "count"),
    fact_of(anomaly_mode, "bool"),
    fact("blocking_launches", "bool", "Whether every launch waited for its kernel (CUDA_LAUNCH_BLOCKING); false on a CPU-only run.",
         lambda window: not window.on_cpu and launch_blocking(window)),
    fact_of(debug_variables, "text"),
    fact("tracers", "text", "Modules that hear of every call or line of Python (debuggers, profilers, coverage); '' where there is none.",
         lambda window: ", ".join(require_known(_read_settings(window).tracers, f"who traces Python was not recorded: {HOW_TO_RECORD}"))),
    fact_of(debug_features_ns, "ns"),
)
# fmt: on
