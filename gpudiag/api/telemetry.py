"""The telemetry of a bundle put beside the analysed steps: its samples are on the Unix clock, the trace on one of its own."""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from gpudiag.attribution import intervals
from gpudiag.capture.bundle import OpenedBundle
from gpudiag.model.telemetry import Energy, Telemetry
from gpudiag.timeline.energy import energy
from gpudiag.timeline.telemetry import summary


class Sampled(NamedTuple):
    """What telemetry says of the run; None: nothing was sampled."""

    telemetry: Telemetry | None = None
    energy: Energy | None = None


def find_telemetry(bundle: OpenedBundle | None, steps: pl.DataFrame, unix_base_ns: int | None) -> Sampled:
    """Return summary and energy of the steps of `bundle`; `steps`: table steps, `unix_base_ns`: Unix time of its zero, where known."""
    if bundle is None or (bundle.telemetry.is_empty() and bundle.manifest.telemetry is None):
        return Sampled()
    start, end = pl.col("start_ns") + (unix_base_ns or 0), pl.col("end_ns") + (unix_base_ns or 0)
    known = pl.col("analysed") & (unix_base_ns is not None)
    chosen = steps.filter(known).select(start.alias("start_unix_ns"), (end - start).alias("wall_ns"))
    info, samples, records = bundle.manifest.telemetry, bundle.telemetry, bundle.step_records
    return Sampled(summary(info, samples, _spans(chosen), _spans(records)), energy(info, samples, records, chosen))


def _spans(steps: pl.DataFrame) -> intervals.Spans:
    start = pl.col("start_unix_ns")
    return intervals.of(steps.select(start_ns=start, end_ns=start + pl.col("wall_ns")))
