"""A hand-made report in which every part of the page has something to show, and one with as many ops as a page holds."""

from __future__ import annotations

from typing import Any

import msgspec
from jobviews import job, shapes
from outcomes import every_verdict
from report import sample

from gpudiag.model.hardware import ClockEvent, ColumnRange, Energy, Telemetry, TelemetryStrip
from gpudiag.model.memory import MemoryReport, MemoryRow
from gpudiag.model.report import OpRow, ReportData

GB = 10**9
KINDS = (("compute", 0.6), ("memory", 0.7), ("overhead", 0.1))


def report(**changes: Any) -> ReportData:
    """Return a training step on an H100, one of eight, with all that can be known of it."""
    compared = job(8, **shapes())
    fields: dict[str, Any] = {
        "job": compared,
        "ranks": compared.ranks,
        "ops": many(240),
        "telemetry": telemetry(),
        "energy": Energy(
            joule_per_step=44.0, mean_power_w=590.0, steps=40, duration_ns=3 * GB, of="unprofiled steps", provenance="counter"
        ),
        "memory": memory(),
        "experiments": every_verdict(),
        "findings": (
            sample.finding(),
            sample.finding(
                rule="MEM-01",
                title="Chains of unfused element-wise ops",
                severity="warning",
                fixes=("fuse-region", "accumulation"),
                where=(sample.Where("aten::op_0003 [64] x [64]", "model.py", 7, sample.MS),),
            ),
        ),
    }
    return sample.replayed(**(fields | changes))


def many(count: int) -> tuple[OpRow, ...]:
    """Return `count` distinct ops of falling cost: in three phases, twenty modules and with different shapes; every fifth has no cost."""
    return tuple(_op(k, count) for k in range(count))


def _op(k: int, count: int) -> OpRow:
    bound, efficiency = KINDS[k % len(KINDS)]
    made = sample.op(
        f"aten::op_{k:04d}",
        0.05 * (count - k),
        count=k + 1,
        phase=("forward", "backward", "optimizer")[k % 3],
        module=f"model.layers.{k % 20}.mlp",
        signature=f"[{64 + k}, 512] [{64 + k}, 512] bf16",
        where=f"/home/me/model.py({k + 1}): forward",
        bound=bound,
        efficiency=efficiency,
    )
    if k % 5 == 4:
        return msgspec.structs.replace(made, flops=None, bytes=None, t_roof_ns=None, efficiency=None, bound="unknown", provenance="none")
    return msgspec.structs.replace(made, bytes=(made.bytes or 0) * (1 + k % 8), flops=(made.flops or 0) / (1 + k % 7))


def telemetry(**changes: Any) -> Telemetry:
    """Return a run on a GPU whose clocks were lowered by its power limit in the second half, with a hole in it."""
    clock = tuple(None if 50 <= k < 56 else 1980.0 if k < 60 else 1410.0 + 5 * (k % 3) for k in range(120))
    made = Telemetry(
        source="nvml",
        interval_ns=50_000_000,
        samples=600,
        over="analysed steps",
        columns={
            "sm_clock_mhz": ColumnRange(1410, 1420, 1980, 600, "MHz"),
            "power_w": ColumnRange(380, 690, 702, 600, "W"),
            "temperature_c": ColumnRange(48, 71, 83, 60, "C"),
            "mem_used_bytes": ColumnRange(11e9, 62e9, 63e9, 60, "B"),
        },
        clock_events=(ClockEvent("SW Power Cap", 0.48, lowers=True), ClockEvent("GPU Idle", 0.1, lowers=False)),
        throttle_share=0.48,
        limits={"max_sm_clock_mhz": 1980.0, "power_limit_w": 700.0},
        strip=TelemetryStrip(
            span_ns=30 * GB,
            columns={
                "sm_clock_mhz": clock,
                "power_w": tuple(400 + 2.5 * k for k in range(120)),
                "temperature_c": tuple(48 + 0.3 * k for k in range(120)),
                "mem_used_bytes": tuple(11e9 if k < 8 else 62e9 for k in range(120)),
            },
            lowered={"SW Power Cap": tuple(0.0 if k < 60 else min(1.0, (k - 59) / 12) for k in range(120))},
            analysed_ns=((10 * GB, 12 * GB),),
        ),
    )
    return msgspec.structs.replace(made, **changes)


def memory() -> MemoryReport:
    """Return the memory of a training at its peak."""
    return MemoryReport(
        device="NVIDIA H100 80GB HBM3",
        peak_bytes=62 * GB,
        peak_phase="backward",
        peak_step="ProfilerStep#3",
        peak_op="aten::mm",
        capacity_bytes=80 * GB,
        by_category={"activations": 40 * GB, "optimizer_state": 12 * GB, "parameters": 6 * GB, "gradients": 4 * GB},
        by_site=(MemoryRow("/home/me/model.py(57): forward", 30 * GB, 48, "activations"),),
        by_module=(MemoryRow("model.layers.0.mlp", 10 * GB, 16, "activations"),),
        by_op=(MemoryRow("aten::mm", 20 * GB, 16, "activations"),),
    )
