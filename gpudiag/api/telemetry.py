"""The telemetry of a bundle put beside the analysed steps: its samples are on the Unix clock, the trace on one of its own."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.capture.bundle import OpenedBundle
from gpudiag.capture.telemetry.readings import GPU_COLUMNS
from gpudiag.model.bundle import Manifest, TelemetryInfo
from gpudiag.model.telemetry import Energy, Telemetry
from gpudiag.timeline.energy import energy
from gpudiag.timeline.telemetry import summary

HOST_LIMITS = frozenset({"cpus", "host_memory_bytes", "max_cpu_freq_mhz"})
"""Limits that are not of a GPU (capture.telemetry.cpu)."""


class Sampled(NamedTuple):
    """What telemetry says of the run; None: nothing was sampled."""

    telemetry: Telemetry | None = None
    energy: Energy | None = None
    warnings: tuple[str, ...] = ()


def of_device(bundle: OpenedBundle, number: int | None) -> tuple[pl.DataFrame, str]:
    """Return the samples of `bundle` with the GPU's columns only where they are of device `number`, and what is left out, in words.

    `number`: CUDA's index of the analysed device; None: no kernel tells it. What an older recorder asked is the manifest's device.
    """
    samples, asked = bundle.telemetry, _asked(bundle.manifest)
    of_gpu = samples.select(pl.any_horizontal(pl.col(name).is_not_null() for name in GPU_COLUMNS).any()).item()
    if not of_gpu:
        return samples, ""
    if asked is not None and number is not None and asked != number:
        why = f"telemetry is of device {asked}, not of device {number}, which is analysed: its clocks, power and energy are not used"
        return _without_gpu(samples, pl.lit(value=True)), why
    since = 0 if bundle.manifest.telemetry is None else bundle.manifest.telemetry.device_since_unix_ns
    return _without_gpu(samples, pl.col("t_ns") < since), ""


def _asked(manifest: Manifest) -> int | None:
    """Return the index of the GPU that NVML was asked about; None where that is not known."""
    if manifest.telemetry is not None and manifest.telemetry.device_index is not None:
        return manifest.telemetry.device_index
    return None if manifest.device is None else manifest.device.index


def _without_gpu(samples: pl.DataFrame, rows: pl.Expr) -> pl.DataFrame:
    """Return `samples` without the GPU's columns in `rows`."""
    return samples.with_columns(pl.when(~rows).then(pl.col(name)).alias(name) for name in GPU_COLUMNS)


def _told(info: TelemetryInfo | None, why: str) -> TelemetryInfo | None:
    """Return `info` without what is of a GPU that is not analysed, where `why` says so."""
    if info is None or not why:
        return info
    short = why.partition(":")[0]
    return msgspec.structs.replace(
        info,
        missing={name: reason for name, reason in info.missing.items() if name not in GPU_COLUMNS} | dict.fromkeys(GPU_COLUMNS, short),
        notes={name: note for name, note in info.notes.items() if name not in GPU_COLUMNS},
        limits={name: limit for name, limit in info.limits.items() if name in HOST_LIMITS},
    )


def find_telemetry(bundle: OpenedBundle | None, steps: pl.DataFrame, unix_base_ns: int | None, number: int | None = None) -> Sampled:
    """Return summary and energy of the steps of `bundle`, and what to warn of.

    `steps`: table steps; `unix_base_ns`: Unix time of its zero, where known; `number`: index of the analysed device.
    """
    if bundle is None or (bundle.telemetry.is_empty() and bundle.manifest.telemetry is None):
        return Sampled()
    start, end = pl.col("start_ns") + (unix_base_ns or 0), pl.col("end_ns") + (unix_base_ns or 0)
    known = pl.col("analysed") & (unix_base_ns is not None)
    chosen = steps.filter(known).select(start.alias("start_unix_ns"), (end - start).alias("wall_ns"))
    samples, other = of_device(bundle, number)
    info, records = _told(bundle.manifest.telemetry, other), bundle.step_records
    spent = Energy(reason=other.partition(":")[0]) if other else energy(info, samples, records, chosen)
    return Sampled(summary(info, samples, _spans(chosen), _spans(records)), spent, (other,) if other else ())


def _spans(steps: pl.DataFrame) -> intervals.Spans:
    start = pl.col("start_unix_ns")
    return intervals.of(steps.select(start_ns=start, end_ns=start + pl.col("wall_ns")))
