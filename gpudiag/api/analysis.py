"""One window through the layers: read, link, cost, classify, break down."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.api.cached_trace import read
from gpudiag.api.captures import with_captures
from gpudiag.api.devices import Found as FoundDevice
from gpudiag.api.devices import at_observed_clock, find_device
from gpudiag.api.inputs import Input
from gpudiag.api.memory import find_memory
from gpudiag.api.telemetry import find_telemetry
from gpudiag.api.timeline import Explained, Found, explained, timeline
from gpudiag.attribution import cpu, gaps, intervals
from gpudiag.attribution.clocks import on_one_clock
from gpudiag.attribution.device import kind_of_run
from gpudiag.attribution.links import link
from gpudiag.attribution.modules import find_modules
from gpudiag.attribution.sites import Frames, Sites, find_sites
from gpudiag.attribution.steps import Steps, find_steps
from gpudiag.errors import InputError
from gpudiag.model.analysis import Analysis
from gpudiag.model.hardware import Device
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
from gpudiag.trace.reader import OWN_THREAD
from gpudiag.trace.source import shown

Progress = Callable[[str], None]

MIN_STEPS_FOR_SLOWDOWN = 3
"""Fewer profiled or plain steps than this give no ratio."""


class _Costed(NamedTuple):
    """A window with its costs, before its idle time is explained."""

    trace: Trace
    steps: Steps
    run: str
    found: FoundDevice
    device: Device | None
    gaps: pl.DataFrame
    work: pl.Series | npt.NDArray[np.int64]
    """Rows of kernels, one for each of `spans`."""
    spans: intervals.Spans
    site_window: tuple[Trace, pl.DataFrame] | None
    op_rows: pl.DataFrame
    clocks: tuple[str, ...]
    costs: tuple[str, ...]
    """Warnings of the costs; `clocks`: of the clocks."""

    @property
    def on_cpu(self) -> bool:
        """Return whether the ops themselves are the device's work."""
        return self.run.startswith("cpu")

    @property
    def silent(self) -> bool:
        """Return whether the device's work was not recorded."""
        return self.run.endswith(("without events", "without ops"))


def analyse(chosen: Input, tell: Progress, *, modules: bool = False, keep_frames: bool = True) -> tuple[Analysis, Sites]:
    """Return the analysis of one window and the call sites of its ops. `modules`: tell op rows apart by nn.Module where it is known.

    `keep_frames`: False where nobody asks for the Python frames, the largest table: of those one of each name is then kept.
    """
    costed = _costed(chosen, tell, modules=modules)
    steps, number = costed.steps.table, costed.found.number
    give_back()  # before and after what needs most memory at once
    marks, records = (chosen.bundle.host_marks, chosen.bundle.step_records) if chosen.bundle else (None, None)
    tell("replaying")
    host, sites = _explained(costed, marks)
    memory = find_memory(chosen, (costed.trace, steps), costed.site_window, device=number)
    if not keep_frames:
        costed = costed._replace(trace=_with_names_of_frames(costed.trace))
    give_back()  # the graphs that follow need the memory
    trace = costed.trace
    told = timeline(trace, steps, host, marks, on_cpu=costed.on_cpu, silent=costed.silent)
    give_back()
    sampled = find_telemetry(chosen.bundle, steps, trace.meta.unix_base_ns, number)
    analysis = Analysis(
        trace=trace,
        device_kind=costed.found.kind,
        device=costed.device,
        device_index=number,
        steps=steps,
        steps_source=costed.steps.source,
        idle=host.idle,
        gaps=costed.gaps,
        syncs=told.syncs,
        breakdown=host.breakdown,
        graphs=told.graphs,
        run_graph=told.run_graph,
        critical_path=told.critical_path,
        queue=told.queue,
        replay=told.replay,
        memory=memory.memory,
        telemetry=sampled.telemetry,
        energy=sampled.energy,
        device_time=device_time(trace.kernels) if costed.run == "gpu" else None,
        coverage=coverage(trace),
        op_rows=costed.op_rows,
        manifest=chosen.bundle.manifest if chosen.bundle else None,
        step_records=records,
        samples=chosen.bundle.telemetry if chosen.bundle else None,
        host_marks=marks,
        rank_records=cache(chosen.bundle.rank_records) if chosen.bundle and len(chosen.bundle.ranks) > 1 else None,
        profiler_slowdown=None if records is None else slowdown(records),
        warnings=(
            *trace.meta.warnings,
            *costed.clocks,
            *costed.found.warnings,
            *sampled.warnings,
            *costed.steps.warnings,
            *costed.costs,
            *told.warnings,
            *memory.warnings,
        ),
    )
    return analysis, sites


def analyse_for_job(chosen: Input) -> Analysis:
    """Return of the analysis of one window what a rank tells to its job (job.summary): no graphs, no replay, no memory, no warnings."""
    costed = _costed(chosen, lambda _: None, modules=False)
    bundle, steps = chosen.bundle, costed.steps.table
    host, _ = _explained(costed, bundle.host_marks if bundle else None)
    return Analysis(
        trace=costed.trace,
        device_kind=costed.found.kind,
        device=costed.device,
        device_index=costed.found.number,
        steps=steps,
        steps_source=costed.steps.source,
        idle=host.idle,
        breakdown=host.breakdown,
        telemetry=find_telemetry(bundle, steps, costed.trace.meta.unix_base_ns, costed.found.number).telemetry,
        device_time=None,
        coverage=coverage(costed.trace),
        op_rows=costed.op_rows,
        manifest=bundle.manifest if bundle else None,
        step_records=bundle.step_records if bundle else None,
    )


def _explained(costed: _Costed, marks: pl.DataFrame | None) -> tuple[Explained, Sites]:
    """Return where the time of the window went, and the call sites of its ops; `marks`: the bundle's."""
    frames = Frames(costed.trace.frames)
    sites = find_sites(costed.trace, costed.steps.table, costed.site_window, frames)
    give_back()
    found = Found(
        costed.trace, costed.steps.table, costed.gaps, costed.work, costed.spans, sites, costed.site_window, marks, costed.on_cpu,
        costed.silent, frames,
    )  # fmt: skip
    return explained(found), sites


def _costed(chosen: Input, tell: Progress, *, modules: bool) -> _Costed:
    """Return the window of `chosen` read, linked and costed."""
    trace, clocks = on_one_clock(read(chosen.trace))
    _check_recorded(trace)
    run = kind_of_run(trace)
    on_cpu = run.startswith("cpu")
    steps = find_steps(trace)
    window = intervals.of(steps.table.filter("analysed"))
    tell("linking")
    trace, nesting = link(trace, steps.table, on_cpu=on_cpu)
    manifest = chosen.bundle.manifest if chosen.bundle else None
    found = find_device(trace, run, manifest)
    trace = trace if on_cpu else _one_device(trace, found.number)
    work, spans = cpu.cpu_spans(trace.ops, trace.kernels, nesting) if on_cpu else _kernel_spans(trace)
    del nesting
    found_gaps = gaps.cpu_gaps(spans, window) if on_cpu else gaps.gaps(trace.kernels, trace.launches, window)
    device = at_observed_clock(found.device, chosen.bundle, window, trace.meta.unix_base_ns, found.number)
    site_window = _site_window(chosen.sites)
    trace, captures = with_captures(trace, site_window, chosen.graph_capture)
    tell("costing")
    trace, types = with_named_types(trace)
    owners = _owners(trace, chosen, on_cpu)
    trace = classify(trace, owners, found_gaps, device, manifest.settings if manifest else None)
    engines = engine_warnings(owners.costs, device)
    del owners
    if modules:
        trace = msgspec.structs.replace(trace, ops=trace.ops.with_columns(find_modules(trace, site_window)))
    table = op_rows(trace, steps.table)
    over = over_roof_warnings(table, "op" if on_cpu else "kernel")
    costs = (*_shape_warnings(trace), *types, *captures, *engines, *over)
    return _Costed(trace, steps, run, found, device, found_gaps, work, spans, site_window, table, clocks, costs)


def _with_names_of_frames(trace: Trace) -> Trace:
    """Return `trace` with one frame of each name: facts ask which there are, and the rest has served call sites and causes."""
    return msgspec.structs.replace(trace, frames=trace.frames.unique("name", keep="first", maintain_order=True))


def _owners(trace: Trace, chosen: Input, on_cpu: bool) -> Owners:
    """Return which op owns the cost of each kernel, and what the ops cost."""
    owners = find_owners(trace, on_cpu=on_cpu, known=known_costs(chosen.bundle.inductor if chosen.bundle else None, trace))
    return without_hidden_products(trace, with_geometry(trace, with_list_types(trace, owners)))


def _check_recorded(trace: Trace) -> None:
    """Raise InputError where Nsight Systems recorded NVTX ranges alone: they tell neither a GPU that waits nor a CPU that computes."""
    if trace.meta.recorder == "nsys" and not trace.kernels.height and not trace.launches.height:
        from gpudiag.trace.nsys.reader import RECORD

        message = f"{shown(trace.meta.source)} holds NVTX ranges only: neither device work nor CUDA calls were recorded"
        raise InputError(message, f"{RECORD}, of steps that run on the GPU")


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
