"""Tiny analyses in one readable call: `analysis(work=[kernel("aten::mm", 0, 10, shapes=[[64, 64], [64, 64]])], steps=3)`.

Times are given in microseconds. Every kernel brings its own op; what is not given is as a plain healthy run would have it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import msgspec
import polars as pl

from gpudiag.model.analysis import Analysis, Coverage
from gpudiag.model.bundle import Manifest
from gpudiag.model.hardware import Device
from gpudiag.model.timeline import Breakdown, BucketsNs
from gpudiag.model.trace import Trace, TraceMeta, build_empty_table, build_table_schema
from gpudiag.roofline.kernel_bounds import add_engine
from gpudiag.roofline.op_calls import MATRIX_FAMILIES, find_family

US = 1000

A100 = Device(
    id="a100",
    name="A100",
    kind="gpu",
    provenance="datasheet",
    source="NVIDIA A100 datasheet",
    vendor="nvidia",
    compute_capability="8.0",
    sm_count=108,
    bandwidth_byte_per_s=2.039e12,
    peaks={"fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12, "bf16": 312e12},
    pcie_byte_per_s=32e9,
)

CPU = Device(
    id="cpu",
    name="CPU",
    kind="cpu",
    provenance="measured",
    source="measured",
    bandwidth_byte_per_s=20e9,
    peaks={"fp32": 100e9},
)

_TORCH = {"fp32": "float", "fp16": "c10::Half", "bf16": "c10::BFloat16", "fp64": "double", "int64": "long int"}


@dataclass
class Work:
    """One kernel (or CPU op) with the op that launched it; times in us."""

    op: str | None
    start: float
    end: float
    name: str = ""
    kind: str = "kernel"
    stream: int = 7
    shapes: list[Any] | None = None
    dtype: str = "fp32"
    dtypes: list[str] | None = None
    strides: list[Any] | None = None
    phase: str = "forward"
    flops: float | None = None
    bytes_moved: float | None = None
    t_roof: float | None = None
    bound: str = "memory"
    step: int | None = None
    copied: int | None = None
    collective: bool = False
    replay: bool = False
    provenance: str = "exact"
    grid: int = 1
    occupancy: float | None = None
    waves: float | None = None
    launched: float | None = None


def kernel(op: str | None, start: float, end: float, **changes: Any) -> Work:
    """Return a kernel launched by `op` that runs from `start` to `end` us."""
    return Work(op, start, end, **changes)


@dataclass
class _Rows:
    ops: list[dict[str, Any]] = field(default_factory=list)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    launches: list[dict[str, Any]] = field(default_factory=list)
    signatures: list[dict[str, Any]] = field(default_factory=list)


def table(name: str, rows: list[dict[str, Any]]) -> pl.DataFrame:
    """Return `rows` as table `name` of stage cost; columns that are not given are null, ids are row numbers."""
    schema = build_table_schema(name, "cost")
    if "id" in schema:
        rows = [{"id": index, **row} for index, row in enumerate(rows)]
    full = [{column: row.get(column) for column in schema} for row in rows]
    return pl.DataFrame(full, schema=schema, orient="row") if full else build_empty_table(name, "cost")


def _signature(rows: _Rows, work: Work) -> int | None:
    if work.shapes is None:
        return None
    kinds = work.dtypes or [
        _TORCH[work.dtype] if isinstance(shape, list) and not any(isinstance(s, list) for s in shape) else "" for shape in work.shapes
    ]
    row = {"shapes": json.dumps(work.shapes), "dtypes": json.dumps(kinds), "strides": json.dumps(work.strides) if work.strides else None}
    if row not in rows.signatures:
        rows.signatures.append(row)
    return rows.signatures.index(row)


def _step_of(work: Work, steps: pl.DataFrame) -> int | None:
    if work.step is not None:
        return work.step
    inside = steps.filter((pl.col("start_ns") <= work.start * US) & (pl.col("end_ns") > work.start * US))
    return int(inside["id"][0]) if inside.height else None


def _add(rows: _Rows, work: Work, steps: pl.DataFrame, *, on_cpu: bool) -> None:
    index, step = len(rows.kernels), _step_of(work, steps)
    start, end = round(work.start * US), round(work.end * US)
    op = None
    if work.op is not None:
        op = len(rows.ops)
        launched = start if work.launched is None else round(work.launched * US)
        signature = _signature(rows, work)
        rows.ops.append(
            {"thread": 0, "name": work.op, "start_ns": launched, "end_ns": max(launched + 1, end if on_cpu else launched + 1)}
            | {"signature": signature, "step": step, "phase": work.phase}
        )
        if not on_cpu:
            rows.launches.append(
                {"thread": 0, "api": "cudaLaunchKernel", "start_ns": launched, "end_ns": launched + 1, "correlation": index, "op": op}
            )
    efficiency = None if work.t_roof is None else work.t_roof * US / (end - start)
    rows.kernels.append(
        {"name": work.name or work.op or "kernel", "kind": "cpu" if on_cpu else work.kind, "device": None if on_cpu else 0}
        | {"stream": None if on_cpu else work.stream, "start_ns": start, "end_ns": end, "busy_ns": end - start, "correlation": index}
        | {"launch": None if on_cpu or op is None else len(rows.launches) - 1, "op": op, "owner": op, "step": step, "grid": work.grid}
        | {
            "bytes": work.copied,
            "flops": work.flops,
            "matrix_flops": work.flops if find_family(work.op or "") in MATRIX_FAMILIES else None,
            "bytes_moved": work.bytes_moved,
            "bound": work.bound,
            "collective": work.collective,
        }
        | {"t_roof_ns": None if work.t_roof is None else work.t_roof * US, "efficiency": efficiency, "replay": work.replay}
        | {"provenance": "none" if op is None else work.provenance, "occupancy": work.occupancy, "waves": work.waves}
    )


def _steps(steps: int | list[tuple[float, float]], wall: float) -> pl.DataFrame:
    """Return `steps` equal steps over `wall` us, or the (start, end) given."""
    bounds = steps if isinstance(steps, list) else [(wall * i / steps, wall * (i + 1) / steps) for i in range(steps)]
    return table(
        "steps",
        [
            {"name": f"ProfilerStep#{i}", "start_ns": round(a * US), "end_ns": round(b * US), "analysed": True}
            for i, (a, b) in enumerate(bounds)
        ],
    )


def gap(
    start: float, end: float, kind: str = "host_wait", op: int | None = None, cause: str = "idle_unexplained", **more: Any
) -> dict[str, Any]:
    """Return a gap of the device from `start` to `end` us, of one `cause`; `more`: further columns of the table `idle`."""
    return {"start_ns": round(start * US), "end_ns": round(end * US), "kind": kind, "cause": cause, "op": op, **more}


def mark(name: str, start: float, end: float, category: str = "annotation") -> dict[str, Any]:
    """Return a mark from `start` to `end` us on thread 0."""
    return {"thread": 0, "name": name, "category": category, "start_ns": round(start * US), "end_ns": round(end * US)}


def op(name: str, start: float, end: float, phase: str = "other") -> dict[str, Any]:
    """Return an op without work of the device."""
    return {"thread": 0, "name": name, "start_ns": round(start * US), "end_ns": round(end * US), "phase": phase}


def analysis(
    work: list[Work] | None = None,
    *,
    steps: int | list[tuple[float, float]] = 1,
    wall: float = 1000,
    idle: list[dict[str, Any]] | None = None,
    marks: list[dict[str, Any]] | None = None,
    ops: list[dict[str, Any]] | None = None,
    launches: list[dict[str, Any]] | None = None,
    device: Device | None = A100,
    buckets: dict[str, float] | None = None,
    modelled: float | None = 1.0,
    manifest: Manifest | None = None,
    step_records: pl.DataFrame | None = None,
    slowdown: float | None = None,
    meta: dict[str, Any] | None = None,
    kind: str | None = None,
) -> Analysis:
    """Return the analysis of a window of `wall` us; buckets in us, what they leave is compute, idle is what `idle` sums to."""
    device_kind = kind or (device.kind if device else "gpu")
    frame = _steps(steps, wall)
    rows = _Rows()
    for item in work or []:
        _add(rows, item, frame, on_cpu=device_kind == "cpu")
    rows.ops.extend(ops or [])
    rows.launches.extend(launches or [])
    gaps = table("idle", idle or [])
    total = int((frame["end_ns"] - frame["start_ns"]).sum())
    parts = {name: round(value * US) for name, value in (buckets or {}).items()}
    for name, ns in gaps.group_by("cause").agg((pl.col("end_ns") - pl.col("start_ns")).sum().alias("ns")).select("cause", "ns").iter_rows():
        parts.setdefault(name, ns)
    parts["compute"] = total - sum(value for name, value in parts.items() if name != "compute")
    breakdown = Breakdown(total, BucketsNs(**parts))
    breakdown.validate()
    trace = Trace(
        meta=msgspec.structs.replace(TraceMeta(source="made", events=len(rows.kernels), base_ns=0), **(meta or {})),
        ops=table("ops", rows.ops),
        signatures=table("signatures", rows.signatures),
        launches=table("launches", rows.launches),
        kernels=_kernels(rows, work or [], device, manifest),
        frames=build_empty_table("frames", "cost"),
        marks=table("marks", marks or []),
        allocations=build_empty_table("allocations", "cost"),
        collectives=build_empty_table("collectives", "cost"),
    )
    return Analysis(
        trace=trace,
        device_kind=device_kind,
        device=device,
        device_index=None if device_kind == "cpu" else 0,
        steps=frame,
        host_steps=frame,
        steps_source="ProfilerStep",
        idle=gaps,
        breakdown=breakdown,
        device_time=None,
        coverage=_coverage(rows, modelled),
        op_rows=pl.DataFrame(),
        sites=pl.repeat(None, len(rows.ops), dtype=pl.String, eager=True),
        site_match_share=None,
        manifest=manifest,
        step_records=step_records,
        profiler_slowdown=slowdown,
    )


def _kernels(rows: _Rows, work: list[Work], device: Device | None, manifest: Manifest | None) -> pl.DataFrame:
    """Return the kernels with the engine that the roofline names for matrix work."""
    kernels = table("kernels", rows.kernels)
    matrix = [item if find_family(item.op or "") in MATRIX_FAMILIES else Work(item.op, 0, 0, dtype="") for item in work]
    frame = kernels.drop("engine", "engine_by").with_columns(
        pl.Series("call_name", [item.op or "" for item in work], dtype=pl.String),
        pl.Series("call_matrix", [item.flops for item in matrix], dtype=pl.Float64),
        pl.Series("dtype", [item.dtype for item in matrix], dtype=pl.String),
        call_ns="busy_ns",
    )
    found = add_engine(frame, device, manifest.settings if manifest else None)
    return kernels.with_columns(found["engine"], found["engine_by"])


def _coverage(rows: _Rows, modelled: float | None) -> Coverage:
    total = sum(row["busy_ns"] for row in rows.kernels)
    rest = None if modelled is None else 1 - modelled
    return Coverage(
        kernels=len(rows.kernels),
        kernel_ns=total,
        attributable_ns=total,
        linked_share=1.0 if total else None,
        modelled_share=modelled,
        generic_share=0.0,
        unknown_share=rest,
        modelled_share_of_all=modelled,
        without_launch_share=0.0,
        outside_ops_share=0.0,
        without_shapes_share=0.0,
        replay_share=0.0,
    )
