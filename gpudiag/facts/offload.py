"""Facts about data that lives in host memory and travels in each step: offloaded state (CAP-09), features of graphs (GNN-01)."""

from __future__ import annotations

import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.attribution.names import contains, matches
from gpudiag.facts.ceilings import without_loader_ns
from gpudiag.facts.loader import loader_wait_share
from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window

LARGE_BYTES = 1 << 20
"""Copies below 1 MiB are scalars, indices and batches of small samples, not offloaded tensors (heuristic)."""

TO_DEVICE = r"HtoD|Host To Device|HOST_TO_DEVICE"
TO_HOST = r"DtoH|Device To Host|DEVICE_TO_HOST"

GRAPH_PACKAGES = ("torch-geometric", "dgl")
_GRAPH_FRAMES = r"torch_geometric[/.]|(^|[/.])dgl[/.]"
_GRAPH_OPS = r"^(torch_scatter|torch_sparse|torch_cluster|pyg|dgl)::"


def _large(window: Window, direction: str) -> pl.DataFrame:
    window.require_accelerator()
    return window.kernels.filter((pl.col("kind") == "memcpy") & pl.col("name").str.contains(direction) & (pl.col("bytes") >= LARGE_BYTES))


@fact("offloaded_bytes_per_step", unit="B")
def offloaded_bytes_per_step(window: Window) -> float:
    """Bytes that travel both ways between host and device in an analysed step, in copies of 1 MiB or more: the lesser of both directions.

    Batches go one way only; offloaded activations, gradients and states go out and come back.
    """
    require(window.steps.height > 0, "no complete step was recorded")
    ways = [float(_large(window, way)["bytes"].sum()) for way in (TO_DEVICE, TO_HOST)]
    return min(ways) / window.steps.height


@fact("large_copy_exposed_ns", unit="ns")
def large_copy_exposed_ns(window: Window) -> int:
    """Time that only copies of 1 MiB or more between host and device fill: nothing else ran on the device."""
    return window.exposed_ns(pl.concat([_large(window, TO_DEVICE), _large(window, TO_HOST)]))


@fact("host_optimizer_ns", unit="ns")
def host_optimizer_ns(window: Window) -> int:
    """Idle time of the device during optimizer steps: with an optimizer on the CPU, the time that it takes alone."""
    window.require_accelerator()
    marks = window.analysis.trace.marks.filter(matches("name", r"^Optimizer\.step#"))
    require(marks.height > 0, "no optimizer step was seen in the window")
    return spans.overlap(spans.of(marks), spans.of(window.idle))


@fact("offload_ns", unit="ns")
def offload_ns(window: Window) -> float:
    """large_copy_exposed_ns and, where optimizer steps were seen, host_optimizer_ns: what offloading costs at most."""
    try:
        alone = float(host_optimizer_ns(window))
    except NotKnownError:
        alone = 0.0
    return float(large_copy_exposed_ns(window)) + alone


@fact("offload_share", unit="share")
def offload_share(window: Window) -> float:
    """offload_ns over the wall time of the analysed steps."""
    return min(1.0, float(offload_ns(window)) / window.wall_ns)


# -- graphs -----------------------------------------------------------------------------------------------------------


@fact("graph_library_used", unit="bool")
def graph_library_used(window: Window) -> bool:
    """Whether the program works on graphs with PyTorch Geometric or DGL: by its packages, its Python frames or its ops."""
    trace, manifest = window.analysis.trace, window.analysis.manifest
    if contains(trace.ops["name"], _GRAPH_OPS).any() or contains(trace.frames["name"], _GRAPH_FRAMES).any():
        return True
    if manifest is not None and manifest.program is not None and manifest.program.packages:
        return any(name in manifest.program.packages for name in GRAPH_PACKAGES)
    require(
        trace.frames.height > 0, "whether this is work on graphs is not in the trace: record with gpudiag.profile, or with Python stacks"
    )
    return False


@fact("feeding_share", unit="share")
def feeding_share(window: Window) -> float:
    """Share of the analysed time that waits for batches, or for their copies to the device: loader_wait_share and exposed copies."""
    return float(loader_wait_share(window)) + window.analysis.breakdown.buckets_ns.exposed_copy / window.wall_ns


@fact("without_feeding_ns", unit="ns")
def without_feeding_ns(window: Window) -> float:
    """Time saved if the next batch lay on the device: without_loader_ns and the copies that nothing hides."""
    return float(without_loader_ns(window)) + window.analysis.breakdown.buckets_ns.exposed_copy
