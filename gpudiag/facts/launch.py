"""Facts about the host issuing work: host-wait gaps, launches, repeated steps, compiled code."""

from __future__ import annotations

import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.attribution.names import contains, matches
from gpudiag.facts.registry import fact, require
from gpudiag.facts.window import Window

NORMAL_SPACING_NS = 1_000
"""Kernel-to-kernel latency inside a CUDA graph: about 1 us (rules.md OVH-02)."""

COMPILED_NAMES = r"^Torch-Compiled Region|^CompiledFunction|^CompiledFxGraph|^AOTDispatcher Runtime|^TorchDynamo Cache"
"""Ops of code made by torch.compile (rules.md A.1)."""

_ALLOCATIONS = r"^(cuda|hip)(Malloc|Free)(Async)?$|^cuMem(Create|Map)$"


def host_waits(window: Window) -> pl.DataFrame:
    """Return the gaps in which the host was late: its launch call began after the device fell idle.

    On a CPU-only run every gap: Python and framework between ops. Raises NotKnownError where no gap is linked to a launch.
    """
    if window.on_cpu:
        return window.idle
    linked = window.idle.filter(pl.col("kind").is_in(["host_wait", "queued"]))
    lost = int(window.idle.filter(pl.col("kind") == "unlinked")["time_ns"].sum())
    require(lost <= max(int(linked["time_ns"].sum()), 0.05 * window.wall_ns), "most gaps end in kernels whose launch was not recorded")
    return window.idle.filter(pl.col("kind") == "host_wait")


ISSUING = ("idle_launch", "idle_unexplained")
"""Causes of a wait for which the host was slow to issue work: no sync, allocation, compilation, collection or file stood in its way."""


def _starved_ns(window: Window) -> int:
    waits = spans.of(host_waits(window).filter(pl.col("cause").is_in(ISSUING)))
    if window.loader_waits is None:
        return spans.total(waits)
    return spans.total(waits) - spans.overlap(waits, spans.of(window.loader_waits))


@fact("host_wait_share", unit="share")
def host_wait_share(window: Window) -> float:
    """Time in host-wait gaps, loader waits included, over the wall time of the analysed steps."""
    return int(host_waits(window)["time_ns"].sum()) / window.wall_ns


@fact("starved_ns", unit="ns")
def starved_ns(window: Window) -> int:
    """Time in host-wait gaps outside loader waits, syncs and the like: the device was idle and the host had not yet issued the next work.

    On a CPU-only run: Python and framework time between ops.
    """
    return _starved_ns(window)


@fact("starved_share", unit="share")
def starved_share(window: Window) -> float:
    """starved_ns over the wall time of the analysed steps."""
    return _starved_ns(window) / window.wall_ns


@fact("queued_gap_excess_ns", unit="ns")
def queued_gap_excess_ns(window: Window) -> int:
    """Time in gaps whose launch was already issued, beyond the 1 us a gap that a graph leaves."""
    window.require_accelerator()
    pieces = window.idle.filter(pl.col("kind") == "queued")
    whole = pieces.group_by(pl.coalesce("gap", -1 - pl.col("id"))).agg(pl.col("time_ns").sum())
    return int((whole["time_ns"] - NORMAL_SPACING_NS).clip(lower_bound=0).sum())


@fact("kernels_per_step", unit="count")
def kernels_per_step(window: Window) -> float:
    """Kernels, copies and memsets (on a CPU: ops that work) per analysed step."""
    require(window.steps.height > 0, "no complete step was recorded")
    return window.kernels.height / window.steps.height


@fact("mean_kernel_ns", unit="ns")
def mean_kernel_ns(window: Window) -> float:
    """Busy time of the device per kernel."""
    require(window.kernels.height > 0, "no work of the device was recorded in the analysed steps")
    return window.busy_ns / window.kernels.height


@fact("graph_replay_share", unit="share")
def graph_replay_share(window: Window) -> float:
    """Part of the kernels that a graph launch replayed."""
    window.require_accelerator()
    require(window.kernels.height > 0, "no work of the device was recorded in the analysed steps")
    return float(window.kernels["replay"].fill_null(False).sum()) / window.kernels.height


@fact("device_allocations", unit="count")
def device_allocations(window: Window) -> int:
    """Calls of cudaMalloc, cudaFree and their kin within the analysed steps; each may stop the device."""
    window.require_accelerator()
    launches = window.analysis.trace.launches
    require(launches.height > 0, "no runtime calls were recorded: record with activities=[CPU, CUDA]")
    calls = launches.filter(matches("api", _ALLOCATIONS))
    inside = spans.covered(window.step_spans, calls["start_ns"].to_numpy(), calls["end_ns"].to_numpy())
    return int((inside > 0).sum())


@fact("repeats_itself", unit="bool")
def repeats_itself(window: Window) -> bool:
    """Whether every analysed step launched the same kernels with the same grids in the same order."""
    window.require_accelerator()
    ids = window.steps["id"].to_list()
    require(len(ids) >= 3, "fewer than 3 steps: whether they repeat cannot be told")
    kernels = window.analysis.trace.kernels.select("kind", "step", "launch", "start_ns", "name", "grid")
    kernels = kernels.filter((pl.col("kind") == "kernel") & pl.col("step").is_in(window.steps["id"].implode()))
    order = kernels.sort("launch", "start_ns").select("step", "name", "grid")
    sequences = order.partition_by("step", maintain_order=True, include_key=False)
    require(len(sequences) == len(ids), "a step without linked kernels")
    return all(frame.equals(sequences[0]) for frame in sequences[1:])


@fact("compiled", unit="bool")
def compiled(window: Window) -> bool:
    """Whether any of the work came out of torch.compile."""
    manifest = window.analysis.manifest
    if manifest is not None and manifest.settings.compiled is not None:
        return manifest.settings.compiled
    trace = window.analysis.trace
    require(trace.ops.height > 0, "no ops were recorded: record with activities=[CPU, CUDA]")
    named = any(contains(frame["name"], COMPILED_NAMES).any() for frame in (trace.ops, trace.marks))
    return bool(named or contains(trace.kernels["name"], r"^triton_").any())
