"""Facts about what the workers of the DataLoader do while training waits for them (INP-02)."""

from __future__ import annotations

from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window

_FULL_CORE = 100.0
"""cpu_util_pct of one busy core."""


def _cores(window: Window) -> float:
    manifest = window.analysis.manifest
    machine = manifest.machine if manifest else None
    if machine is None or not machine.cpu_cores:
        raise NotKnownError("the number of processor cores is not known: record with gpudiag.profile")
    return min(float(machine.cpu_cores), machine.cpu_quota or float(machine.cpu_cores))


def _cores_used(window: Window) -> float:
    """Return how many cores the process and its workers kept busy, median over the samples of the run."""
    sampled = window.analysis.telemetry
    column = sampled.columns.get("cpu_util_pct") if sampled else None
    if column is None:
        raise NotKnownError("the load of the processor was not sampled: record with gpudiag.profile and telemetry")
    return column.median / _FULL_CORE


@fact("cores_used", unit="count")
def cores_used(window: Window) -> float:
    """Cores that the training process and its loader workers kept busy, median of the samples."""
    return _cores_used(window)


@fact("cores_busy_share", unit="share")
def cores_busy_share(window: Window) -> float:
    """cores_used over the cores that the run may use (those of the machine, or the quota of its control group)."""
    return min(1.0, _cores_used(window) / _cores(window))


@fact("worker_cpu_share", unit="share")
def worker_cpu_share(window: Window) -> float:
    """At most this part of the time the loader's workers compute: all CPU time of the run, divided by their number.

    Low: they wait, for storage, the network or a lock.
    """
    manifest = window.analysis.manifest
    workers = manifest.settings.loader.num_workers if manifest and manifest.settings.loader else None
    require(bool(workers), "the DataLoader has no worker processes, or their number is not known")
    return min(1.0, _cores_used(window) / int(workers or 1))
