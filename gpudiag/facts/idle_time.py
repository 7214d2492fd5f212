"""Facts about idle time: its causes, launches and the queue, compilation and graph breaks, and what removing a cause would save.

Each takes its figure from the what-if of `gpudiag whatif` that it names. Where the steps cannot be replayed, or the replayed ones hold
nothing of the kind, it falls back to a formula: the idle or exposed time itself.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.attribution.cuda_graphs import find_captures
from gpudiag.attribution.names import match_column, match_names
from gpudiag.facts.efficiency import find_compilation_spans
from gpudiag.facts.input_pipeline import loader_wait_ns, measure_plain_wait
from gpudiag.facts.memory_bound import unfused_chain_saving_ns
from gpudiag.facts.registry import NotKnownError, fact, fact_of, gpu_only, per_step, raise_unknown, require, with_share
from gpudiag.facts.window import Window
from gpudiag.model.trace import Trace
from gpudiag.roofline.fused_kernels import GENERATED_KERNEL
from gpudiag.roofline.op_calls import MATRIX_FAMILIES
from gpudiag.timeline.host_events import FIRST_CALL_NS
from gpudiag.timeline.host_threads import FRAME_PATTERNS
from gpudiag.trace.kernel_names import COMPILE_MARK

EXPLAINED_ENOUGH = 0.05
"""Share of the steps below which unexplained idle time cannot hide a cause that is worth a finding (the least of the rules is 2 %)."""


def measure_idle_ns(window: Window, *causes: str) -> int:
    """Return the time in ns of these buckets of the breakdown, such as idle_launch."""
    require(window.wall_ns > 0, "no complete step was recorded")
    return sum(getattr(window.analysis.breakdown.buckets_ns, cause) for cause in causes)


def causes_told(window: Window) -> bool:
    """True where most of the idle time has a known cause, or all but 5 % of the steps; never false: else it is not known.

    A rule about one cause passes only where this holds: `when: compiling_share > 0.03 or not causes_told`.
    """
    unexplained, idle = measure_idle_ns(window, "idle_unexplained"), window.analysis.breakdown.idle_ns
    require(
        unexplained <= max(idle / 2, EXPLAINED_ENOUGH * window.wall_ns),
        "most of the idle time has no known cause: nothing was recorded on the host then; record with activities=[CPU, CUDA] and Python "
        "stacks, or with gpudiag.profile",
    )
    return True


def stalls_recorded(window: Window) -> bool:
    """True where garbage collections and file writes were recorded, so that there being none means something; else it is not known."""
    analysis = window.analysis
    require(
        analysis.host_marks is not None or analysis.trace.frames.height > 0 or window.analysis.breakdown.idle_ns == 0,
        "garbage collections and file writes are not in this trace: record with gpudiag.profile, or with Python stacks",
    )
    return True


NORMAL_SPACING_NS = 1_000
"""Kernel-to-kernel latency inside a CUDA graph: about 1 us (rules.md OVH-02)."""

COMPILED_NAMES = r"^Torch-Compiled Region|^CompiledFunction|^CompiledFxGraph|^AOTDispatcher Runtime|^TorchDynamo Cache"
"""Ops of code made by torch.compile (rules.md A.1)."""

_NO_WORK = "no work of the device was recorded in the analysed steps"
_ALLOCATIONS = r"^(cuda|hip)(Malloc|Free)(Async)?$|^cuMem(Create|Map)$"


def queued_gap_excess_ns(window: Window) -> int:
    """Return the time in ns of kernel gaps with work queued, beyond the 1 us a gap that a graph leaves."""
    window.require_accelerator()
    pieces = window.idle.filter(pl.col("kind") == "queued")
    whole = pieces.group_by(pl.coalesce("gap", -1 - pl.col("id"))).agg(pl.col("time_ns").sum())
    return int((whole["time_ns"] - NORMAL_SPACING_NS).clip(lower_bound=0).sum())


def device_allocations(window: Window) -> int:
    """Calls of cudaMalloc, cudaFree and their kin within the analysed steps; each may stop the device."""
    window.require_accelerator()
    launches = window.analysis.trace.launches
    require(launches.height > 0, "no runtime calls were recorded: record with activities=[CPU, CUDA]")
    calls = launches.filter(match_column("api", _ALLOCATIONS))
    inside = spans.measure_covered(window.host_spans, calls["start_ns"].to_numpy(), calls["end_ns"].to_numpy())
    return int((inside > 0).sum())


def repeats_itself(window: Window) -> bool:
    """Whether every analysed step launched the same kernels with the same grids in the same order."""
    window.require_accelerator()
    ids = window.steps["id"].to_list()
    require(len(ids) >= 3, "fewer than 3 steps: whether they repeat cannot be told")
    kernels = window.analysis.trace.kernels.select("kind", "step", "launch", "start_ns", "name", "grid")
    kernels = kernels.filter((pl.col("kind") == "kernel") & window.within_steps)
    order = kernels.sort("launch", "start_ns").select("step", "name", "grid")
    sequences = order.partition_by("step", maintain_order=True, include_key=False)
    require(len(sequences) == len(ids), "a step without linked kernels")
    return all(frame.equals(sequences[0]) for frame in sequences[1:])


def captures_graphs(window: Window) -> bool:
    """Whether a graph is captured in the recording: it shows the making of the graphs, not the steps that replay them."""
    return bool(find_captures(window.analysis.trace))


def compiled(window: Window) -> bool:
    """Whether any of the work came out of torch.compile."""
    manifest = window.analysis.manifest
    if manifest is not None and manifest.settings.compiled is not None:
        return manifest.settings.compiled
    frames = (window.recorded_ops, window.analysis.trace.marks)
    named = any(match_names(frame["name"], COMPILED_NAMES).any() for frame in frames)
    return bool(named or match_names(window.analysis.trace.kernels["name"], r"^triton_").any())


def as_graph_ns(window: Window) -> float:
    """Return the time in ns saved with the step as one CUDA graph: what-if launch=0, else launches and gaps with work queued."""
    return window.what_if_ns("launch=0", otherwise=lambda: measure_idle_ns(window, "idle_launch") + queued_gap_excess_ns(window))


def compiled_ns(window: Window) -> float:
    """Return the time in ns saved if launching the work cost nothing and chains of element-wise ops were one kernel each.

    Unknown where the chains are: half of an upper bound is none.
    """
    formula = measure_idle_ns(window, "idle_launch") + unfused_chain_saving_ns(window)
    return window.what_if_ns("host=0", "fused", otherwise=lambda: formula)


def without_loader_ns(window: Window) -> float:
    """Time saved if the next batch was always ready: on a CPU the share of the unprofiled steps where their waits are known; else what-if
    loader=0, or loader_wait_ns."""
    plain = measure_plain_wait(window)
    return window.what_if_ns("loader=0", otherwise=lambda: loader_wait_ns(window)) if plain is None else plain * window.wall_ns


def without_launch_ns(window: Window) -> float:
    """Return the time in ns saved if Python, the framework and launch calls took none."""
    return window.what_if_ns("host=0", otherwise=lambda: measure_idle_ns(window, "idle_launch"))


def without_compile_ns(window: Window) -> float:
    """Return the time in ns saved if nothing was compiled, by its idle time."""
    return window.what_if_ns("compile=0", otherwise=lambda: measure_idle_ns(window, "idle_compile"))


def without_stalls_ns(window: Window) -> float:
    """Return the time in ns saved without garbage collections and file writes in the analysed steps."""
    return window.what_if_ns("gc=0", "io=0", otherwise=lambda: measure_idle_ns(window, "idle_gc", "idle_io"))


def compiling_ns(window: Window) -> int:
    """Idle time of the device while code was compiled or loaded, with garbage that was collected meanwhile.

    On a CPU all time under the events of torch.compile: what it computes then is not training.
    """
    under = spans.measure_overlap(find_compilation_spans(window), window.step_spans if window.on_cpu else window.idle_spans())
    return min(max(under, measure_idle_ns(window, "idle_compile")), window.wall_ns)


def starts_up(window: Window) -> bool:
    """Whether the device was set up in the analysed time, for as long as a first call takes: it holds the start of the program."""
    return measure_idle_ns(window, "idle_init") >= FIRST_CALL_NS


def code_loading_ns(window: Window) -> int:
    """The idle time by compilation without torch's or Triton's compiler at work: the driver loads kernels at their first launch."""
    trace, waits = window.analysis.trace, window.idle_spans("idle_compile")
    frames = trace.frames.filter(match_column("name", FRAME_PATTERNS["idle_compile"]))
    named = [frame.filter(match_column("name", COMPILE_MARK)) for frame in (trace.ops, trace.marks)]
    at_work = spans.build_spans(pl.concat([rows.select("start_ns", "end_ns") for rows in (frames, *named)]))
    compiled = spans.merge_spans(np.concatenate((at_work, find_compilation_spans(window), find_capture_spans(trace))))
    return spans.measure_spans(waits) - spans.measure_overlap(waits, compiled)


def find_capture_spans(trace: Trace) -> spans.Spans:
    """Find when graphs were captured."""
    return spans.merge_spans(np.array([capture[:2] for capture in find_captures(trace)], dtype=np.int64).reshape(-1, 2))


def capturing_ns(window: Window) -> int:
    """The part of breakdown.buckets_ns.idle_compile in which a graph was captured: launches are recorded, and nothing runs."""
    return spans.measure_overlap(window.idle_spans("idle_compile"), find_capture_spans(window.analysis.trace))


def capture_steps(window: Window) -> int:
    """Analysed steps in which a graph was captured."""
    steps = window.analysis.host_steps.filter("analysed").select("start_ns", "end_ns")
    return int((spans.measure_covered(find_capture_spans(window.analysis.trace), *steps.to_numpy().T) > 0).sum())


COMPILED_REGION = r"^Torch-Compiled Region"
"""A compiled frame: what follows a graph break runs nested in it, as a frame of its own (seen with torch 2.13)."""

GRAPH_CALL = r"^CompiledFunction$"
BACKWARD_NODE = r"^autograd::engine::evaluate_function: CompiledFunctionBackward$"


def find_ops(window: Window, pattern: str) -> pl.DataFrame:
    """Return the ops of the analysed steps whose names match, in their order."""
    return window.recorded_ops.filter(window.within_steps & match_column("name", pattern)).sort("start_ns")


def find_graph_calls(window: Window) -> pl.DataFrame:
    """Return the graph calls of the steps with `region`, the start of the outermost compiled region around each, where it holds several.

    Raises NotKnownError where the trace marks the calls but not the regions (older torch): which belong together is not told then.
    """
    regions = find_ops(window, COMPILED_REGION)
    last = pl.col("end_ns").cum_max().shift(1).over("thread")
    outer = regions.filter((pl.col("start_ns") >= last).fill_null(True)).select("thread", region="start_ns", region_end="end_ns")
    calls = find_ops(window, GRAPH_CALL)
    if calls.height and not outer.height:
        raise NotKnownError("this version of torch does not mark compiled regions, so which graphs are of one function is not known")
    if not calls.height:
        return calls.with_columns(region=pl.lit(None, dtype=pl.Int64)).clear()
    found = calls.join_asof(
        outer.sort("region"), left_on="start_ns", right_on="region", by="thread", coalesce=False, check_sortedness=False
    )
    found = found.filter(pl.col("end_ns") <= pl.col("region_end"))
    return found.filter(pl.len().over("thread", "region") > 1)


def _count_further_graphs(calls: pl.DataFrame) -> int:
    return calls.height - calls.select("thread", "region").unique().height


def _filter_begun_within(rows: pl.DataFrame, starts: pl.Series, within: spans.Spans) -> pl.DataFrame:
    at = starts.to_numpy()
    return rows.filter(pl.Series(spans.measure_covered(within, at, at + 1) > 0, dtype=pl.Boolean))


def break_ns(window: Window) -> float:
    """Time that the breaks cost: between the graphs of one compiled function the device is idle or runs ops that are not compiled.

    Generated kernels could be fused across a break too. On a CPU: all time in compiled functions but matrix work, as far as it is that of
    further graphs.
    """
    # the host's time between the graphs of one compiled region: eager ops, guards, Python
    calls = find_graph_calls(window).sort("thread", "start_ns")
    between = calls.select(start_ns=pl.col("end_ns").cum_max().shift(1).over("thread", "region"), end_ns="start_ns").drop_nulls()
    compiling = find_compilation_spans(window)  # a cause of its own
    breaks = spans.subtract_spans(spans.build_spans(between.filter(pl.col("end_ns") > pl.col("start_ns"))), compiling)
    if window.on_cpu:
        pieces_ns = 0.0
        if calls.height:  # of the time in compiled functions, forward and backward, each graph writes its results and reads its inputs
            inside = [find_ops(window, pattern).select("start_ns", "end_ns") for pattern in (COMPILED_REGION, BACKWARD_NODE)]
            whole, matrix = spans.build_spans(pl.concat(inside)), window.kernels.filter(pl.col("family").is_in(MATRIX_FAMILIES))
            products = _filter_begun_within(matrix, matrix["start_ns"], whole)["time_ns"].sum()
            running = spans.subtract_spans(spans.merge_spans(whole), compiling)
            outside = max(0.0, spans.measure_spans(running) - float(products))
            pieces_ns = outside * _count_further_graphs(calls) / max(1, find_ops(window, GRAPH_CALL).height)
        return min(max(float(spans.measure_spans(breaks)), pieces_ns), float(window.wall_ns))
    issued = window.analysis.trace.ops.select(op="id", issued_ns="start_ns")
    eager = window.kernels.join(issued, on="op", how="left").filter(pl.col("issued_ns").is_not_null())
    eager_ns = window.exposed_ns(_filter_begun_within(eager, eager["issued_ns"], breaks))
    lost_ns = float(spans.measure_overlap(breaks, window.idle_spans("idle_launch", "idle_sync", "idle_unexplained")) + eager_ns)
    if calls.height:  # what the generated kernels would save at most where pieces of a function became one: each writes for the next
        generated = window.kernels.filter(pl.col("name").str.contains(GENERATED_KERNEL))
        lost_ns += window.exposed_ns(generated) * _count_further_graphs(calls) / max(1, find_ops(window, GRAPH_CALL).height)
    return min(lost_ns, float(window.wall_ns))


def mean_kernel_ns(window: Window) -> float:
    """Mean time of a kernel. Collectives are left out: they wait for other ranks."""
    work = window.kernels.filter(~pl.col("collective").fill_null(False))["time_ns"]
    require(work.len() > 0, _NO_WORK)
    return float(work.sum()) / work.len()


# fmt: off
FACTS = (
    fact_of(causes_told, "bool"),
    *with_share(gpu_only(lambda window: measure_idle_ns(window, "idle_allocation")), "idle_allocation",
                "Idle time of the device while the host allocated device memory from the driver or gave it back (cudaMalloc, cudaFree)."),
    fact_of(stalls_recorded, "bool"),
    fact("kernels_per_step", "count", "Kernels, copies and memsets (on a CPU: ops that work) per analysed step.",
         per_step(lambda window: window.kernels)),
    fact_of(mean_kernel_ns, "ns"),
    fact("graph_replay_share", "share", "Part of the kernels that a graph launch replayed.",
         gpu_only(lambda window: (float(window.kernels["replay"].fill_null(False).sum()) / window.kernels.height
                                  if window.kernels.height else raise_unknown(_NO_WORK)))),
    fact_of(device_allocations, "count"),
    fact_of(repeats_itself, "bool"),
    fact_of(compiled, "bool"),
    fact_of(captures_graphs, "bool"),
    fact_of(without_loader_ns, "ns"),
    *with_share(compiling_ns),
    fact_of(code_loading_ns, "ns"),
    fact_of(capturing_ns, "ns"),
    fact_of(capture_steps, "count"),
    fact_of(starts_up, "bool"),
    fact("without_compiling_ns", "ns", "Time saved if nothing was compiled: the larger of what-if compile=0 and compiling_ns.",
         lambda window: max(without_compile_ns(window), float(compiling_ns(window)))),
    fact("breaks_per_step", "count", "Times per step that compiled code was left between two graphs of one compiled function; calls of "
         "several functions do not count.", lambda window: _count_further_graphs(find_graph_calls(window)) / window.step_count),
    *with_share(break_ns),
)
# fmt: on
