"""Facts about what helps to find faults and costs time in each step (OVH-07): anomaly detection, blocking launches, debug variables."""

from __future__ import annotations

import polars as pl

from gpudiag.attribution.names import matches
from gpudiag.facts.host_time import share_of_plain
from gpudiag.facts.registry import NotKnownError, fact
from gpudiag.facts.settings import anomaly_detection, launch_blocking
from gpudiag.facts.window import Window

NAN_CHECKS = r"^aten::(isnan|any|_is_any_true|is_nonzero|item)$"
"""Ops by which autograd looks for NaN after each backward node (torch/csrc/autograd/engine.cpp: isnan().any().item())."""

NODE = r"^autograd::engine::evaluate_function"

COSTLY = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("0", "false", "no", "off"),
    "TORCH_NCCL_BLOCKING_WAIT": ("0", "false", "no", "off"),
    "TORCH_DISTRIBUTED_DEBUG": ("OFF",),
    "NCCL_DEBUG": ("VERSION", "WARN", "ABORT"),
    "TORCH_LOGS": ("",),
}
"""Variables that slow every step down -> the values with which they do not."""


def _checks(window: Window) -> pl.DataFrame:
    """Return the outermost NaN checks of the backward nodes in the analysed steps."""
    ops = window.analysis.trace.ops
    nodes = ops.filter(matches("name", NODE))["id"]
    found = ops.filter(matches("name", NAN_CHECKS) & pl.col("parent").is_in(nodes.implode()))
    return found.filter(pl.col("step").is_in(window.steps["id"].implode()))


@fact("nan_checks_per_step", unit="count")
def nan_checks_per_step(window: Window) -> float:
    """Checks for NaN after backward nodes (aten::isnan under a node of autograd) per analysed step: anomaly detection was on."""
    ops = window.analysis.trace.ops
    if not ops.height or not window.steps.height:
        raise NotKnownError("no ops were recorded: record with activities=[CPU, CUDA]")
    return _checks(window).filter(pl.col("name") == "aten::isnan").height / window.steps.height


@fact("anomaly_mode", unit="bool")
def anomaly_mode(window: Window) -> bool:
    """Whether autograd's anomaly detection was on in the analysed steps: by its checks for NaN, else by the setting."""
    try:
        return float(nan_checks_per_step(window)) > 0 or bool(anomaly_detection(window))
    except NotKnownError:
        if float(nan_checks_per_step(window)) > 0:
            return True
        if window.analysis.trace.ops.filter(matches("name", NODE)).height:
            return False  # backward nodes without a check
        raise


def _forward_ops(window: Window) -> pl.DataFrame:
    """Return self_ns and t_roof_ns of the forward ops of a CPU-only run that autograd numbers."""
    work = window.kernels.filter(pl.col("phase") == "forward")
    numbered = window.analysis.trace.ops["id"].filter(window.analysis.trace.ops["sequence"].is_not_null())
    return work.filter(pl.col("op").is_in(numbered.implode())).select("op_name", "time_ns", "t_roof_ns")


def _traces_ns(window: Window) -> float:
    """Return what keeping a Python stack for each forward node costs on a CPU: the excess of forward ops, at most twice that of a view.

    A view does nothing by itself, so its own time is that of the stack.
    """
    forward = _forward_ops(window)
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
    checks = _checks(window)
    if window.on_cpu:
        return float((checks["end_ns"] - checks["start_ns"]).sum()) + _traces_ns(window)
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
    return ", ".join(name for name, harmless in COSTLY.items() if name in values and values[name] not in harmless)


@fact("debug_features_ns", unit="ns")
def debug_features_ns(window: Window) -> float:
    """At most this time is given back without them: anomaly_ns with anomaly detection, blocking_ns with blocking launches; else unknown."""
    if anomaly_mode(window):
        return share_of_plain(window, float(anomaly_ns(window))) * window.wall_ns
    if blocking_launches(window):
        return float(blocking_ns(window))
    raise NotKnownError("what these settings cost can only be measured: run once without them")
