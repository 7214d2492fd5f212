"""One window through the layers: read, link, cost, classify, explain idle time, build the graph; and the summary of a rank.

A process that reads ranks imports this module alone: the rules and what judges by them are not among it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.attribution.batch_waits import add_batch_waits
from gpudiag.attribution.call_sites import Frames, Sites, carry_from_site_window, find_modules, find_sites
from gpudiag.attribution.cuda_graphs import map_replays
from gpudiag.attribution.device import (
    align_clocks,
    classify_run,
    find_cpu_gaps,
    find_cpu_spans,
    find_gaps,
    follow_device,
    list_outside_notices,
)
from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.steps import Steps, find_steps
from gpudiag.cache import CachedResult, ResultKey
from gpudiag.devices import FoundDevice, derate_to_observed_clock, find_device, find_telemetry
from gpudiag.errors import InputError
from gpudiag.inputs import Input, load_trace, open_rank
from gpudiag.job import rank_summary
from gpudiag.job.rank_summary import encode_summary
from gpudiag.memory_report import find_memory
from gpudiag.model.analysis import Analysis
from gpudiag.model.hardware import Device, Telemetry
from gpudiag.model.notices import Notice, NoticeCode, make_notice
from gpudiag.model.timeline import Breakdown
from gpudiag.model.trace import Trace
from gpudiag.recordings.paths import RankInput
from gpudiag.roofline.attributed_ops import drop_contradicted_costs, find_attributed_ops
from gpudiag.roofline.element_types import infer_named_types, resolve_list_types
from gpudiag.roofline.fused_kernels import find_compiled_costs
from gpudiag.roofline.inferred_costs import estimate_paged_attention
from gpudiag.roofline.kernel_bounds import classify_kernels, list_above_roofline_notices, list_engine_notices
from gpudiag.roofline.launch_geometry import estimate_costs_by_grid
from gpudiag.roofline.op_table import build_op_table, measure_coverage
from gpudiag.timeline.breakdown import break_down, build_unknown_breakdown, find_critical_paths, measure_device_time
from gpudiag.timeline.graph import build_all_graphs, list_graph_notices
from gpudiag.timeline.history import SETTLED_AFTER
from gpudiag.timeline.host_events import LOOP_PAUSE_NS, bound_writes, find_host_events, find_own_frames
from gpudiag.timeline.idle import add_sync_costs, explain_idle
from gpudiag.timeline.launch_queue import find_syncs, measure_queue
from gpudiag.timeline.replay import measure_replay_trust
from gpudiag.trace import kernel_names
from gpudiag.trace.decompression import format_path
from gpudiag.trace.kineto import RECORDED_THREAD_HINT
from gpudiag.trace.table_store import release_memory
from gpudiag.trace.trace_files import find_rank_files
from gpudiag.units import Progress


def map_graph_captures(trace: Trace, sites: tuple[Trace, pl.DataFrame] | None, capture: Path | None) -> tuple[Trace, tuple[Notice, ...]]:
    """Return `trace` (stage 'link') with its graph replays mapped to the ops of their capture, and notices.

    `sites`: the linked site window of the same run; `capture`: a trace of the capture pass, or a folder of such.
    Raises InputError where that cannot be read.
    """
    if capture is None:
        return map_replays(trace, (sites[0],) if sites else ())
    if not trace.kernels["replay"].any():
        return trace, (make_notice(NoticeCode.CAPTURE_NOT_NEEDED, path=str(capture)),)
    recordings = []
    # inference servers write a folder with a trace for each captured batch size
    for path in find_rank_files(capture).values() if os.path.isdir(capture) else [capture]:
        recording = load_trace(path)
        if recording.launches["api"].cast(pl.String).str.contains(kernel_names.CAPTURE_BEGIN).any():
            recordings.append(link_kernels(recording, find_steps(recording).table, on_cpu=False)[0])
    if not recordings:
        mapped, notes = map_replays(trace)
        return mapped, (make_notice(NoticeCode.CAPTURE_WITHOUT_GRAPH, path=str(capture)), *notes)
    return map_replays(trace, tuple(recordings))


class IdleAnalysis(NamedTuple):
    """Where the time of the window went, and what the host did meanwhile."""

    idle: pl.DataFrame
    syncs: pl.DataFrame
    breakdown: Breakdown
    events: pl.DataFrame
    sites: Sites


class _Costed(NamedTuple):
    trace: Trace
    steps: Steps
    """From mark to mark of the host."""
    paced: pl.DataFrame
    """The same as long as the device takes for their work, where the host runs ahead of it more and more."""
    run: str
    found: FoundDevice
    device: Device | None
    gaps: pl.DataFrame
    work: pl.Series | npt.NDArray[np.int64]
    """Rows of kernels, one for each of `spans`."""
    spans: intervals.Spans
    site_window: tuple[Trace, pl.DataFrame] | None
    op_rows: pl.DataFrame
    clocks: tuple[Notice, ...]
    costs: tuple[Notice, ...]
    """Notices of the costs; `clocks`: of the clocks."""

    @property
    def on_cpu(self) -> bool:
        """Whether the ops themselves are the device's work."""
        return self.run.startswith("cpu")

    @property
    def silent(self) -> bool:
        """Whether the device's work was not recorded."""
        return self.run.endswith(("without events", "without ops"))


def analyse(chosen: Input, tell: Progress, *, modules: bool = False, keep_frames: bool = True) -> Analysis:
    """Return the analysis of one window. `modules`: tell op rows apart by nn.Module where it is known.

    `keep_frames`: False where nobody asks for the Python frames, the largest table: one of each name and the long ones are then kept.
    """
    costed = _cost_window(chosen, tell, modules=modules)
    bundle, steps, silent = chosen.bundle, costed.steps.table, costed.silent
    records = bundle.step_records if bundle else None
    marks = bound_writes(bundle.host_marks, records) if bundle else None
    release_memory()  # before and after what needs most memory at once
    tell("replaying")
    host = _explain_window(costed, marks)
    memory = find_memory(chosen, (costed.trace, steps), costed.site_window, device=costed.found.number)
    if not keep_frames:  # facts ask which names there are, and what long pauses hold; the rest has served call sites and causes
        long = pl.col("end_ns") - pl.col("start_ns") >= LOOP_PAUSE_NS
        frames = costed.trace.frames.filter(pl.col("name").is_first_distinct() | long)
        costed = costed._replace(trace=msgspec.structs.replace(costed.trace, frames=frames))
        del frames
    trace = costed.trace
    release_memory()  # the graphs that follow need the memory
    graphs, run_graph = ((), None) if silent else build_all_graphs(trace, steps, host.idle, host.syncs, costed.on_cpu, marks, host.events)
    release_memory()
    critical_path = find_critical_paths(graphs, trace) if graphs else None
    window = intervals.build_spans(steps.filter("analysed"))
    queue = None if costed.on_cpu or silent else measure_queue(trace, steps, window)
    replay = measure_replay_trust(graphs, steps, run_graph)
    of_graphs = () if silent else list_graph_notices(trace, steps, on_cpu=costed.on_cpu)
    release_memory()
    sampled = find_telemetry(bundle, costed.paced, trace.meta.unix_base_ns, costed.found.number)
    return msgspec.structs.replace(
        _build_analysis(chosen, costed, host, sampled.telemetry),
        gaps=costed.gaps,
        syncs=add_sync_costs(host.syncs, host.idle),
        graphs=graphs,
        run_graph=run_graph,
        critical_path=critical_path,
        queue=queue,
        replay=replay,
        memory=memory.memory,
        compile_log=bundle.compile_log if bundle else None,
        energy=sampled.energy,
        device_time=measure_device_time(trace.kernels) if costed.run == "gpu" else None,
        samples=bundle.telemetry if bundle else None,
        host_marks=marks,
        ask_frames=None if trace.frames.height else partial(_ask_frames, trace, chosen.sites),  # its own are thinned
        rank_records=cache(bundle.rank_records) if bundle and len(bundle.ranks) > 1 else None,
        profiler_slowdown=None if records is None else estimate_profiler_slowdown(records),
        notices=(
            *trace.meta.notices, *costed.clocks, *costed.found.notices, *sampled.notices, *costed.steps.notices, *costed.costs,
            *of_graphs, *memory.notices,
        ),
    )  # fmt: skip


def _build_analysis(chosen: Input, costed: _Costed, host: IdleAnalysis, telemetry: Telemetry | None) -> Analysis:
    """Build what a rank tells to its job (job.rank_summary): no graphs, no replay, no memory, no notices."""
    manifest, records = (chosen.bundle.manifest, chosen.bundle.step_records) if chosen.bundle else (None, None)
    return Analysis(
        trace=costed.trace,
        device_kind=costed.found.kind,
        device=costed.device,
        device_index=costed.found.number,
        steps=costed.paced,
        host_steps=costed.steps.table,
        steps_source=costed.steps.source,
        idle=host.idle,
        breakdown=host.breakdown,
        telemetry=telemetry,
        device_time=None,
        coverage=measure_coverage(costed.trace),
        op_rows=costed.op_rows,
        sites=host.sites.site,
        site_match_share=host.sites.match_share,
        manifest=manifest,
        step_records=records,
    )


def _explain_window(costed: _Costed, marks: pl.DataFrame | None) -> IdleAnalysis:
    trace, steps, silent = costed.trace, costed.steps.table, costed.silent
    frames = Frames(trace.frames)
    sites = find_sites(trace, steps, costed.site_window, frames)
    release_memory()
    window = intervals.build_spans(costed.paced.filter("analysed"))
    syncs = find_syncs(trace, steps, sites)
    own = find_own_frames(trace)
    frames = frames if own.table is trace.frames else own
    release_memory()
    events = find_host_events(trace, frames, marks, on_cpu=costed.on_cpu)
    release_memory()
    idle = explain_idle(
        trace, costed.gaps.clear() if silent else costed.gaps, window, steps, syncs=syncs, host_marks=marks, sites=sites,
        site_window=costed.site_window, on_cpu=costed.on_cpu, frames=frames, events=events,
    )  # fmt: skip
    frames.forget()
    release_memory()
    bounds = trace.kernels["bound"].gather(costed.work)
    parts = build_unknown_breakdown(window) if silent else break_down(bounds, costed.spans, window, idle)
    parts.validate()
    return IdleAnalysis(idle, syncs, parts, events, sites)


def _cost_window(chosen: Input, tell: Progress, *, modules: bool) -> _Costed:
    trace, clocks = align_clocks(load_trace(chosen.trace))
    # NVTX ranges alone tell neither a GPU that waits nor a CPU that computes
    if trace.meta.recorder == "nsys" and not trace.kernels.height and not trace.launches.height:
        from gpudiag.trace.nsys_reader import NSYS_RECORD_HINT

        message = f"{format_path(trace.meta.source)} holds NVTX ranges only: neither device work nor CUDA calls were recorded"
        raise InputError(message, f"{NSYS_RECORD_HINT}, of steps that run on the GPU")
    run = classify_run(trace)
    on_cpu = run.startswith("cpu")
    steps = find_steps(trace)
    tell("linking")
    trace, nesting = link_kernels(add_batch_waits(trace, steps.table), steps.table, on_cpu=on_cpu)
    manifest = chosen.bundle.manifest if chosen.bundle else None
    found = find_device(trace, run, manifest)
    trace = trace if on_cpu else _select_device(trace, found.number)
    paced, pace = (steps.table, ()) if run != "gpu" else follow_device(trace, steps.table)
    if pace:  # the share that the host's marks leave out is no longer that of the steps
        steps = steps._replace(notices=tuple(notice for notice in steps.notices if notice.code != NoticeCode.OUTSIDE_STEPS))
    pace = (*pace, *(list_outside_notices(trace.kernels, paced) if run == "gpu" else ()))
    window = intervals.build_spans(paced.filter("analysed"))
    work: pl.Series | npt.NDArray[np.int64] = trace.kernels["id"]
    if on_cpu:
        work, spans = find_cpu_spans(trace.ops, trace.kernels, nesting)
        gaps = find_cpu_gaps(spans, window)
    else:
        spans = trace.kernels.select("start_ns", "end_ns").to_numpy()
        gaps = find_gaps(trace.kernels, trace.launches, window)
    del nesting
    device = derate_to_observed_clock(found.device, chosen.bundle, window, trace.meta.unix_base_ns, found.number)
    site_window = _read_site_window(chosen.sites)
    trace, captures = map_graph_captures(trace, site_window, chosen.graph_capture)
    tell("costing")
    trace, types = infer_named_types(trace)
    compiled = find_compiled_costs(chosen.bundle.inductor if chosen.bundle else None, trace)
    owners = find_attributed_ops(trace, on_cpu=on_cpu, known=compiled)
    for complete in (resolve_list_types, estimate_costs_by_grid, estimate_paged_attention, drop_contradicted_costs):
        complete(trace, owners)
    trace = classify_kernels(trace, owners, gaps, device, manifest.settings if manifest else None)
    engines = list_engine_notices(owners.costs, device)
    del owners
    named = trace.ops.with_columns(find_modules(trace, site_window)) if modules or on_cpu else trace.ops  # facts.loops asks on a CPU
    trace = msgspec.structs.replace(trace, ops=named) if modules else trace
    table = build_op_table(trace, paced)
    trace = msgspec.structs.replace(trace, ops=named)
    over = list_above_roofline_notices(table, "op" if on_cpu else "kernel")
    costs = (*pace, *_list_shape_notices(trace), *types, *captures, *engines, *over)
    return _Costed(trace, steps, paced, run, found, device, gaps, work, spans, site_window, table, clocks, costs)


def _select_device(trace: Trace, index: int | None) -> Trace:
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


def _list_shape_notices(trace: Trace) -> tuple[Notice, ...]:
    nsys = trace.meta.recorder == "nsys"
    if not trace.ops.height and nsys:
        return (make_notice(NoticeCode.NO_OPS_NSYS),)
    if not trace.ops.height and not trace.kernels.height:
        return (make_notice(NoticeCode.NO_OPS, hint=RECORDED_THREAD_HINT),)
    if not trace.ops.height:
        return (make_notice(NoticeCode.NO_OPS_DEVICE_ONLY),)
    if not trace.signatures.height:
        return (make_notice(NoticeCode.NO_SHAPES_NSYS if nsys else NoticeCode.NO_SHAPES),)
    return ()


def _read_site_window(path: Path | None) -> tuple[Trace, pl.DataFrame] | None:
    if path is None:
        return None
    try:
        trace = load_trace(path)
    except InputError:
        return None
    steps = find_steps(trace).table
    return link_kernels(trace, steps, on_cpu=not trace.kernels.height)[0], steps


def _ask_frames(trace: Trace, sites: Path | None, own: Callable[[Trace], pl.Series]) -> pl.Series:
    return carry_from_site_window(trace, _read_site_window(sites), own)


def estimate_profiler_slowdown(records: pl.DataFrame) -> float | None:
    """Estimate the median profiled step over the median of the plain steps nearest to them; None where there are too few of either.

    Neighbours, because the pace of a shared machine wanders over a run.
    """
    settled = records.filter(pl.col("step") >= SETTLED_AFTER)
    timed = settled.filter(pl.col("window") == "timing")
    profiled, near = timed["wall_ns"], (pl.col("step") - pl.lit(timed["step"].median())).abs()
    # Plain steps nearest to the profiled ones with which those are compared (heuristic: a few times as many as are profiled)
    plain = settled.filter(pl.col("window") == "plain").sort(near, "step").head(20)["wall_ns"]
    if min(len(profiled), len(plain)) < 3:  # too few for a ratio
        return None
    above, below = profiled.median(), plain.median()
    return float(above) / float(below) if below else None  # type: ignore[arg-type]


def answer_summary_request(request: bytes) -> bytes:
    """Return what one rank tells of itself, as bytes of job.rank_summary; kept for large traces. `request`: a RankInput as JSON.

    Raises InputError where the rank cannot be read.
    """
    item = msgspec.json.decode(request, type=RankInput)
    chosen = open_rank(item)
    made_from = (chosen.trace, item.path) if item.bundle else (chosen.trace,)
    cached = CachedResult(ResultKey("rank", made_from, asked=(item.rank, item.window), rank=item.rank if item.bundle else None))
    data = cached.load(bytes)
    if data is None:
        costed = _cost_window(chosen, lambda _: None, modules=False)
        host = _explain_window(costed, bound_writes(chosen.bundle.host_marks, chosen.bundle.step_records) if chosen.bundle else None)
        sampled = find_telemetry(chosen.bundle, costed.paced, costed.trace.meta.unix_base_ns, costed.found.number)
        analysis = _build_analysis(chosen, costed, host, sampled.telemetry)
        data = encode_summary(rank_summary.summarise_rank(analysis, rank=item.rank, path=item.path))
        cached.store(data)
    return data
