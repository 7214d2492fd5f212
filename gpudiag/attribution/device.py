"""Which device of the process is analysed."""

from __future__ import annotations

from typing import Literal

import polars as pl

from gpudiag.model.trace import Trace

Run = Literal["gpu", "gpu without events", "cpu", "cpu without ops"]


def kind_of_run(trace: Trace) -> Run:
    """Return what the trace is of; 'gpu without events': a GPU was used or present, nothing of it was recorded."""
    if trace.kernels.height:
        return "gpu"
    if trace.launches.height or trace.meta.devices or (trace.allocations["device_kind"] == "gpu").any():
        return "gpu without events"
    return "cpu" if trace.ops.height else "cpu without ops"


def busiest(kernels: pl.DataFrame) -> tuple[int | None, tuple[int, ...]]:
    """Return the device with the most summed work, and the others."""
    sums = kernels.group_by("device").agg(time=(pl.col("end_ns") - pl.col("start_ns")).sum()).drop_nulls("device")
    order = sums.sort("time", "device", descending=[True, False])["device"].to_list()
    return (order[0], tuple(order[1:])) if order else (None, ())
