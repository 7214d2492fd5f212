"""One window through the layers: read, link, cost, classify, break down."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from gpudiag.api.cached_trace import read
from gpudiag.api.captures import with_captures
from gpudiag.api.devices import at_observed_clock, find_device
from gpudiag.api.inputs import Input
from gpudiag.api.memory import find_memory
from gpudiag.api.telemetry import find_telemetry
from gpudiag.api.timeline import Found, timeline
from gpudiag.attribution import cpu, gaps, intervals
from gpudiag.attribution.clocks import on_one_clock
from gpudiag.attribution.device import kind_of_run
from gpudiag.attribution.links import link
from gpudiag.attribution.modules import find_modules
from gpudiag.attribution.sites import Frames, Sites, find_sites
from gpudiag.attribution.steps import find_steps
from gpudiag.errors import InputError
from gpudiag.model.analysis import Analysis
from gpudiag.model.trace import Trace
from gpudiag.roofline.classify import classify
from gpudiag.roofline.coverage import coverage
from gpudiag.roofline.engine import engine_warnings
from gpudiag.roofline.geometry import with_geometry
from gpudiag.roofline.inductor import known_costs
from gpudiag.roofline.list_types import with_list_types
from gpudiag.roofline.named_types import with_named_types
from gpudiag.roofline.oprows import op_rows
from gpudiag.roofline.over_roof import over_roof_warnings
from gpudiag.roofline.owners import Owners, find_owners
from gpudiag.roofline.plausible import without_hidden_products
from gpudiag.timeline.breakdown import device_time
from gpudiag.timeline.history import SETTLED_AFTER
from gpudiag.trace.garbage import give_back
from gpudiag.trace.nsys.reader import RECORD as RECORD_NSYS
from gpudiag.trace.reader import OWN_THREAD
from gpudiag.trace.source import shown

Progress = Callable[[str], None]

MIN_STEPS_FOR_SLOWDOWN = 3
"""Fewer profiled or plain steps than this give no ratio."""


def analyse(chosen: Input, tell: Progress, *, modules: bool = False) -> tuple[Analysis, Sites]:
    """Return the analysis of one window and the call sites of its ops. `modules`: tell op rows apart by nn.Module where it is known."""
    trace, clocks = on_one_clock(read(chosen.trace))
    _check_recorded(trace)
    run = kind_of_run(trace)
    on_cpu, silent = run.startswith("cpu"), run.endswith(("without events", "without ops"))
    steps = find_steps(trace)
    window = intervals.of(steps.table.filter("analysed"))
    tell("linking")
    trace, nesting = link(trace, steps.table, on_cpu=on_cpu)
    manifest = chosen.bundle.manifest if chosen.bundle else None
    found = find_device(trace, run, manifest)
    trace = trace if on_cpu else _one_device(trace, found.number)
    rows, spans = cpu.cpu_spans(trace.ops, trace.kernels, nesting) if on_cpu else _kernel_spans(trace)
    found_gaps = gaps.cpu_gaps(spans, window) if on_cpu else gaps.gaps(trace.kernels, trace.launches, window)
    device = at_observed_clock(found.device, chosen.bundle, window, trace.meta.unix_base_ns, found.number)
    site_window = _site_window(chosen.sites)
    trace, captures = with_captures(trace, site_window, chosen.graph_capture)
    tell("costing")
    trace, types = with_named_types(trace)
    owners = _owners(trace, chosen, on_cpu)
    trace = classify(trace, owners, found_gaps, device, manifest.settings if manifest else None)
    if modules:
        trace = msgspec.structs.replace(trace, ops=trace.ops.with_columns(find_modules(trace, site_window)))
    table = op_rows(trace, steps.table)
    frames = Frames(trace.frames)
    give_back()  # before and after what needs most memory at once
    sites = find_sites(trace, steps.table, site_window, frames)
    marks, records = (chosen.bundle.host_marks, chosen.bundle.step_records) if chosen.bundle else (None, None)
    give_back()
    tell("replaying")
    told = timeline(Found(trace, steps.table, found_gaps, rows, spans, sites, site_window, marks, on_cpu, silent, frames))
    del frames
    give_back()
    sampled = find_telemetry(chosen.bundle, steps.table, trace.meta.unix_base_ns, found.number)
    memory = find_memory(chosen, (trace, steps.table), site_window, device=found.number)
    analysis = Analysis(
        trace=trace,
        device_kind=found.kind,
        device=device,
        device_index=found.number,
        steps=steps.table,
        steps_source=steps.source,
        idle=told.idle,
        gaps=found_gaps,
        syncs=told.syncs,
        breakdown=told.breakdown,
        graphs=told.graphs,
        run_graph=told.run_graph,
        critical_path=told.critical_path,
        queue=told.queue,
        replay=told.replay,
        memory=memory.memory,
        telemetry=sampled.telemetry,
        energy=sampled.energy,
        device_time=device_time(trace.kernels) if run == "gpu" else None,
        coverage=coverage(trace),
        op_rows=table,
        manifest=manifest,
        step_records=records,
        samples=chosen.bundle.telemetry if chosen.bundle else None,
        host_marks=marks,
        rank_records=cache(chosen.bundle.rank_records) if chosen.bundle and len(chosen.bundle.ranks) > 1 else None,
        profiler_slowdown=None if records is None else slowdown(records),
        warnings=(
            *trace.meta.warnings,
            *clocks,
            *found.warnings,
            *sampled.warnings,
            *steps.warnings,
            *_shape_warnings(trace),
            *types,
            *captures,
            *engine_warnings(owners.costs, device),
            *over_roof_warnings(table, "op" if on_cpu else "kernel"),
            *told.warnings,
            *memory.warnings,
        ),
    )
    return analysis, sites


def _owners(trace: Trace, chosen: Input, on_cpu: bool) -> Owners:
    """Return which op owns the cost of each kernel, and what the ops cost."""
    owners = find_owners(trace, on_cpu=on_cpu, known=known_costs(chosen.bundle.inductor if chosen.bundle else None, trace))
    return without_hidden_products(trace, with_geometry(trace, with_list_types(trace, owners)))


def _check_recorded(trace: Trace) -> None:
    """Raise InputError where Nsight Systems recorded NVTX ranges alone: they tell neither a GPU that waits nor a CPU that computes."""
    if trace.meta.recorder == "nsys" and not trace.kernels.height and not trace.launches.height:
        message = f"{shown(trace.meta.source)} holds NVTX ranges only: neither device work nor CUDA calls were recorded"
        raise InputError(message, f"{RECORD_NSYS}, of steps that run on the GPU")


def _kernel_spans(trace: Trace) -> tuple[Any, Any]:
    """Return (kernel rows, spans) of a device: each kernel is one span."""
    return trace.kernels["id"], trace.kernels.select("start_ns", "end_ns").to_numpy()


def _one_device(trace: Trace, index: int | None) -> Trace:
    """Return `trace` with the kernels of the analysed device alone, renumbered; collectives keep pointing at them."""
    if index is None or trace.kernels.filter(pl.col("device").ne_missing(index)).is_empty():
        return trace
    kept = (
        trace.kernels.filter(pl.col("device") == index).rename({"id": "old"}).with_row_index("id").with_columns(pl.col("id").cast(pl.Int64))
    )
    renamed = kept.select(pl.col("old").alias("kernel"), pl.col("id").alias("new"))
    collectives = trace.collectives.join(renamed, on="kernel", how="left", maintain_order="left")
    collectives = collectives.with_columns(pl.col("new").alias("kernel")).drop("new")
    return msgspec.structs.replace(trace, kernels=kept.drop("old"), collectives=collectives)


def _shape_warnings(trace: Trace) -> tuple[str, ...]:
    if trace.meta.recorder == "nsys":
        return _nsys_warnings(trace)
    if not trace.ops.height and not trace.kernels.height:
        return (f"no ops were recorded: nothing can be linked or modelled; {OWN_THREAD}",)
    if not trace.ops.height:
        return ("no ops were recorded (device activity only): nothing can be linked or modelled; record with activities=[CPU, CUDA]",)
    if not trace.signatures.height:
        return ("no shapes were recorded: no op can be modelled; record with record_shapes=True",)
    return ()


def _nsys_warnings(trace: Trace) -> tuple[str, ...]:
    """Return what a recording of Nsight Systems does not hold, and how to come by it."""
    if not trace.ops.height:
        return (
            "no ops were recorded, so kernels stand alone and none is modelled: run the steps inside "
            "torch.autograd.profiler.emit_nvtx(record_shapes=True), or record with gpudiag.profile or torch.profiler",
        )
    if not trace.signatures.height:
        return ("no shapes were recorded, so no op is modelled: use torch.autograd.profiler.emit_nvtx(record_shapes=True)",)
    return ()


def _site_window(path: Path | None) -> tuple[Trace, pl.DataFrame] | None:
    """Return the linked site window and its steps; None where it was not recorded or cannot be read."""
    if path is None:
        return None
    try:
        trace = read(path)
    except InputError:
        return None
    steps = find_steps(trace).table
    return link(trace, steps, on_cpu=not trace.kernels.height)[0], steps


NEIGHBOURS = 20
"""Plain steps nearest to the profiled ones with which those are compared (heuristic: a few times as many as are profiled)."""


def slowdown(records: pl.DataFrame) -> float | None:
    """Return the median profiled step over the median of the plain steps nearest to them; None where there are too few of either.

    Neighbours, because the pace of a shared machine wanders over a run.
    """
    settled = records.filter(pl.col("step") >= SETTLED_AFTER)
    timed = settled.filter(pl.col("window") == "timing")
    profiled, near = timed["wall_ns"], (pl.col("step") - pl.lit(timed["step"].median())).abs()
    plain = settled.filter(pl.col("window") == "plain").sort(near, "step").head(NEIGHBOURS)["wall_ns"]
    if min(len(profiled), len(plain)) < MIN_STEPS_FOR_SLOWDOWN:
        return None
    above, below = profiled.median(), plain.median()
    return float(above) / float(below) if below else None  # type: ignore[arg-type]
