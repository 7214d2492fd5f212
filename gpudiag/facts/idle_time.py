"""Facts about idle time: its causes, launches and the queue, compilation and graph breaks, and what removing a cause would save.

Each takes its figure from the what-if of `gpudiag whatif` that it names. Where the steps cannot be replayed, or the replayed ones hold
nothing of the kind, it falls back to a formula: the idle or exposed time itself.
"""

from __future__ import annotations

import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.attribution.names import match_column, match_names
from gpudiag.facts.communication import exposed_communication_ns
from gpudiag.facts.efficiency import COMPILATION
from gpudiag.facts.input_pipeline import loader_wait_ns, pageable_copy_exposed_ns
from gpudiag.facts.memory_bound import unfused_chain_saving_ns
from gpudiag.facts.registry import Fact, NotKnownError, fact, require
from gpudiag.facts.window import Window
from gpudiag.model.timeline import QueueStats
from gpudiag.roofline.fused_kernels import GENERATED_KERNEL
from gpudiag.roofline.op_calls import MATRIX_FAMILIES

EXPLAINED_ENOUGH = 0.05
"""Share of the steps below which unexplained idle time cannot hide a cause that is worth a finding (the least of the rules is 2 %)."""


def _bucket_ns(window: Window, *causes: str) -> int:
    require(window.wall_ns > 0, "no complete step was recorded")
    return sum(getattr(window.analysis.breakdown.buckets_ns, cause) for cause in causes)


@fact("causes_told", unit="bool")
def causes_told(window: Window) -> bool:
    """True where most of the idle time has a known cause, or all but 5 % of the steps; never false: else it is not known.

    A rule about one cause passes only where this holds: `when: idle_gc_share > 0.03 or not causes_told`.
    """
    unexplained, idle = _bucket_ns(window, "idle_unexplained"), window.analysis.breakdown.idle_ns
    require(
        unexplained <= max(idle / 2, EXPLAINED_ENOUGH * window.wall_ns),
        "most of the idle time has no known cause: nothing was recorded on the host then; record with activities=[CPU, CUDA] and Python "
        "stacks, or with gpudiag.profile",
    )
    return True


@fact("idle_unexplained_share", unit="share")
def idle_unexplained_share(window: Window) -> float:
    """Idle time without a known cause over the wall time of the analysed steps."""
    return _bucket_ns(window, "idle_unexplained") / window.wall_ns


@fact("idle_launch_ns", unit="ns")
def idle_launch_ns(window: Window) -> int:
    """Host overhead: idle time of the device while the host is in Python, the framework or the launch itself, with nothing queued.

    On a CPU-only run: time of Python and the framework between ops.
    """
    return _bucket_ns(window, "idle_launch")


@fact("idle_launch_share", unit="share")
def idle_launch_share(window: Window) -> float:
    """idle_launch_ns over the wall time of the analysed steps."""
    return _bucket_ns(window, "idle_launch") / window.wall_ns


@fact("idle_sync_share", unit="share")
def idle_sync_share(window: Window) -> float:
    """Exposed sync time: idle after calls that wait for the device (CPU: for other threads) over the wall time of the analysed steps."""
    return _bucket_ns(window, "idle_sync") / window.wall_ns


@fact("idle_allocation_ns", unit="ns")
def idle_allocation_ns(window: Window) -> int:
    """Idle time of the device while the host allocated device memory from the driver or gave it back (cudaMalloc, cudaFree)."""
    window.require_accelerator()
    return _bucket_ns(window, "idle_allocation")


@fact("idle_allocation_share", unit="share")
def idle_allocation_share(window: Window) -> float:
    """idle_allocation_ns over the wall time of the analysed steps."""
    window.require_accelerator()
    return _bucket_ns(window, "idle_allocation") / window.wall_ns


@fact("idle_compile_ns", unit="ns")
def idle_compile_ns(window: Window) -> int:
    """Idle time of the device while torch.compile, Triton or the driver compiled or loaded code."""
    return _bucket_ns(window, "idle_compile")


@fact("idle_compile_share", unit="share")
def idle_compile_share(window: Window) -> float:
    """idle_compile_ns over the wall time of the analysed steps."""
    return _bucket_ns(window, "idle_compile") / window.wall_ns


@fact("stall_ns", unit="ns")
def stall_ns(window: Window) -> int:
    """Idle time of the device while Python collected garbage, or the program wrote files: checkpoints, logs."""
    return _bucket_ns(window, "idle_gc", "idle_io")


@fact("stall_share", unit="share")
def stall_share(window: Window) -> float:
    """stall_ns over the wall time of the analysed steps."""
    return _bucket_ns(window, "idle_gc", "idle_io") / window.wall_ns


@fact("idle_gc_ns", unit="ns")
def idle_gc_ns(window: Window) -> int:
    """The part of stall_ns in which Python collected garbage."""
    return _bucket_ns(window, "idle_gc")


@fact("idle_io_ns", unit="ns")
def idle_io_ns(window: Window) -> int:
    """The part of stall_ns in which the program wrote files."""
    return _bucket_ns(window, "idle_io")


@fact("stalls_recorded", unit="bool")
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

_ALLOCATIONS = r"^(cuda|hip)(Malloc|Free)(Async)?$|^cuMem(Create|Map)$"


def find_host_waits(window: Window) -> pl.DataFrame:
    """Return the gaps in which the host was late: its launch call began after the device fell idle.

    On a CPU-only run every gap: Python and framework between ops. Raises NotKnownError where no gap is linked to a launch.
    """
    if window.on_cpu:
        return window.idle
    linked = window.idle.filter(pl.col("kind").is_in(["host_wait", "queued"]))
    lost = int(window.idle.filter(pl.col("kind") == "unlinked")["time_ns"].sum())
    require(lost <= max(int(linked["time_ns"].sum()), 0.05 * window.wall_ns), "most gaps end in kernels whose launch was not recorded")
    return window.idle.filter(pl.col("kind") == "host_wait")


ISSUING = ("idle_launch", "idle_unexplained")
"""Causes of a wait for which the host was slow to issue work: no sync, allocation, compilation, collection or file stood in its way."""


def _starved_ns(window: Window) -> int:
    waits = spans.build_spans(find_host_waits(window).filter(pl.col("cause").is_in(ISSUING)))
    if window.loader_waits is None:
        return spans.measure_spans(waits)
    return spans.measure_spans(waits) - spans.measure_overlap(waits, spans.build_spans(window.loader_waits))


@fact("host_wait_share", unit="share")
def host_wait_share(window: Window) -> float:
    """Time in host-wait gaps, loader waits included, over the wall time of the analysed steps."""
    return int(find_host_waits(window)["time_ns"].sum()) / window.wall_ns


@fact("starved_ns", unit="ns")
def starved_ns(window: Window) -> int:
    """Time in host-wait gaps outside loader waits, syncs and the like: the device is idle and the host has not launched the next work.

    On a CPU-only run: Python and framework time between ops.
    """
    return _starved_ns(window)


@fact("starved_share", unit="share")
def starved_share(window: Window) -> float:
    """starved_ns over the wall time of the analysed steps."""
    return _starved_ns(window) / window.wall_ns


@fact("queued_gap_excess_ns", unit="ns")
def queued_gap_excess_ns(window: Window) -> int:
    """Time in kernel gaps with work queued, beyond the 1 us a gap that a graph leaves."""
    window.require_accelerator()
    pieces = window.idle.filter(pl.col("kind") == "queued")
    whole = pieces.group_by(pl.coalesce("gap", -1 - pl.col("id"))).agg(pl.col("time_ns").sum())
    return int((whole["time_ns"] - NORMAL_SPACING_NS).clip(lower_bound=0).sum())


@fact("kernels_per_step", unit="count")
def kernels_per_step(window: Window) -> float:
    """Kernels, copies and memsets (on a CPU: ops that work) per analysed step."""
    require(window.steps.height > 0, "no complete step was recorded")
    return window.kernels.height / window.steps.height


@fact("mean_kernel_ns", unit="ns")
def mean_kernel_ns(window: Window) -> float:
    """Busy time of the device per kernel."""
    require(window.kernels.height > 0, "no work of the device was recorded in the analysed steps")
    return window.busy_ns / window.kernels.height


@fact("graph_replay_share", unit="share")
def graph_replay_share(window: Window) -> float:
    """Part of the kernels that a graph launch replayed."""
    window.require_accelerator()
    require(window.kernels.height > 0, "no work of the device was recorded in the analysed steps")
    return float(window.kernels["replay"].fill_null(False).sum()) / window.kernels.height


@fact("device_allocations", unit="count")
def device_allocations(window: Window) -> int:
    """Calls of cudaMalloc, cudaFree and their kin within the analysed steps; each may stop the device."""
    window.require_accelerator()
    launches = window.analysis.trace.launches
    require(launches.height > 0, "no runtime calls were recorded: record with activities=[CPU, CUDA]")
    calls = launches.filter(match_column("api", _ALLOCATIONS))
    inside = spans.measure_covered(window.step_spans, calls["start_ns"].to_numpy(), calls["end_ns"].to_numpy())
    return int((inside > 0).sum())


@fact("repeats_itself", unit="bool")
def repeats_itself(window: Window) -> bool:
    """Whether every analysed step launched the same kernels with the same grids in the same order."""
    window.require_accelerator()
    ids = window.steps["id"].to_list()
    require(len(ids) >= 3, "fewer than 3 steps: whether they repeat cannot be told")
    kernels = window.analysis.trace.kernels.select("kind", "step", "launch", "start_ns", "name", "grid")
    kernels = kernels.filter((pl.col("kind") == "kernel") & pl.col("step").is_in(window.steps["id"].implode()))
    order = kernels.sort("launch", "start_ns").select("step", "name", "grid")
    sequences = order.partition_by("step", maintain_order=True, include_key=False)
    require(len(sequences) == len(ids), "a step without linked kernels")
    return all(frame.equals(sequences[0]) for frame in sequences[1:])


@fact("compiled", unit="bool")
def compiled(window: Window) -> bool:
    """Whether any of the work came out of torch.compile."""
    manifest = window.analysis.manifest
    if manifest is not None and manifest.settings.compiled is not None:
        return manifest.settings.compiled
    trace = window.analysis.trace
    require(trace.ops.height > 0, "no ops were recorded: record with activities=[CPU, CUDA]")
    named = any(match_names(frame["name"], COMPILED_NAMES).any() for frame in (trace.ops, trace.marks))
    return bool(named or match_names(trace.kernels["name"], r"^triton_").any())


def _read_queue(window: Window) -> QueueStats:
    """Return the queue figures of the window; raises NotKnownError where no launch was recorded."""
    window.require_accelerator()
    found = window.analysis.queue
    if found is None:
        raise NotKnownError("no launch of the device's work was recorded in the analysed steps: record with activities=[CPU, CUDA]")
    return found


@fact("launch_delay_ns", unit="ns")
def launch_delay_ns(window: Window) -> int:
    """Median time from the return of the call that launched work to the start of that work; of a graph launch the first kernel.

    Some microseconds: the device was waiting for the host. Much more: work was queued, the host is ahead.
    """
    return _read_queue(window).delay_median_ns


@fact("queue_depth", unit="count")
def queue_depth(window: Window) -> float:
    """Kernels in flight, median by time over the analysed steps."""
    return _read_queue(window).depth_median


@fact("queue_empty_share", unit="share")
def queue_empty_share(window: Window) -> float:
    """Share of the analysed time in which nothing was queued or running: the host had launched nothing more."""
    return _read_queue(window).empty_share


@fact("launches_per_step", unit="count")
def launches_per_step(window: Window) -> float:
    """Calls that started work of the device per analysed step; one launch of a graph counts once."""
    return _read_queue(window).launches_per_step


@fact("host_bound_share", unit="share")
def host_bound_share(window: Window) -> float:
    """Share of the kernels (by count) that began within the normal launch latency of their call: the device was waiting for them."""
    return _read_queue(window).host_bound_share


def _measure_number(found: Fact, window: Window) -> float:
    return float(found(window))


@fact("without_launch_ns", unit="ns")
def without_launch_ns(window: Window) -> float:
    """Time saved if Python, the framework and launch calls took none: what-if host=0, else idle_launch_ns."""
    return window.without_idle_ns("host=0", idle_ns=lambda: _measure_number(idle_launch_ns, window))


@fact("as_graph_ns", unit="ns")
def as_graph_ns(window: Window) -> float:
    """Time saved with the step as one CUDA graph: what-if launch=0, else idle_launch_ns + queued_gap_excess_ns."""
    return window.what_if_ns(
        "launch=0", otherwise=lambda: _measure_number(idle_launch_ns, window) + _measure_number(queued_gap_excess_ns, window)
    )


@fact("compiled_ns", unit="ns")
def compiled_ns(window: Window) -> float:
    """Time saved if launching the work cost nothing and chains of element-wise ops were one kernel each: what-ifs host=0 and fused.

    Else idle_launch_ns + unfused_chain_saving_ns. Unknown where the chains are: half of an upper bound is none.
    """
    formula = _measure_number(idle_launch_ns, window) + _measure_number(unfused_chain_saving_ns, window)
    return window.what_if_ns("host=0", "fused", otherwise=lambda: formula)


@fact("chains_fused_ns", unit="ns")
def chains_fused_ns(window: Window) -> float:
    """Time saved with chains of element-wise ops fused: what-if fused, else unfused_chain_saving_ns."""
    return window.less_work_ns("fused", otherwise=lambda: _measure_number(unfused_chain_saving_ns, window))


@fact("without_loader_ns", unit="ns")
def without_loader_ns(window: Window) -> float:
    """Time saved if the next batch was always ready: what-if loader=0, else loader_wait_ns."""
    return window.without_idle_ns("loader=0", idle_ns=lambda: _measure_number(loader_wait_ns, window))


@fact("copies_overlapped_ns", unit="ns")
def copies_overlapped_ns(window: Window) -> float:
    """Time saved if copies between host and device ran beside other work: what-if copies=overlapped, else pageable_copy_exposed_ns."""
    return window.less_work_ns("copies=overlapped", otherwise=lambda: _measure_number(pageable_copy_exposed_ns, window))


@fact("communication_overlapped_ns", unit="ns")
def communication_overlapped_ns(window: Window) -> float:
    """Time saved if collectives ran beside other work: what-if communication=overlapped, else exposed_communication_ns."""
    return window.less_work_ns("communication=overlapped", otherwise=lambda: _measure_number(exposed_communication_ns, window))


@fact("without_allocation_ns", unit="ns")
def without_allocation_ns(window: Window) -> float:
    """Time saved if no device memory was allocated from the driver: what-if allocation=0, else idle_allocation_ns."""
    return window.without_idle_ns("allocation=0", idle_ns=lambda: _measure_number(idle_allocation_ns, window))


@fact("without_compile_ns", unit="ns")
def without_compile_ns(window: Window) -> float:
    """Time saved if nothing was compiled: what-if compile=0, else idle_compile_ns."""
    return window.without_idle_ns("compile=0", idle_ns=lambda: _measure_number(idle_compile_ns, window))


@fact("without_stalls_ns", unit="ns")
def without_stalls_ns(window: Window) -> float:
    """Time saved without garbage collections and file writes: what-ifs gc=0 and io=0, else stall_ns."""
    return window.without_idle_ns("gc=0", "io=0", idle_ns=lambda: _measure_number(stall_ns, window))


def _measure_compiling_ns(window: Window) -> int:
    """Return the time in ns under compile events in which the device was idle (on a CPU: all of it), at least idle_compile_ns."""
    trace = window.analysis.trace
    frames = (frame.filter(match_column("name", COMPILATION)).select("start_ns", "end_ns") for frame in (trace.ops, trace.marks))
    events = spans.build_spans(pl.concat(frames))
    under = spans.measure_overlap(events, window.step_spans if window.on_cpu else spans.build_spans(window.idle))
    return min(max(under, int(idle_compile_ns(window))), window.wall_ns)


@fact("compiling_ns", unit="ns")
def compiling_ns(window: Window) -> int:
    """Idle time of the device while code was compiled or loaded, with garbage that was collected meanwhile.

    On a CPU all time under the events of torch.compile: what it computes then is not training.
    """
    return _measure_compiling_ns(window)


@fact("compiling_share", unit="share")
def compiling_share(window: Window) -> float:
    """compiling_ns over the wall time of the analysed steps."""
    return _measure_compiling_ns(window) / window.wall_ns


@fact("without_compiling_ns", unit="ns")
def without_compiling_ns(window: Window) -> float:
    """Time saved if nothing was compiled: the larger of without_compile_ns (replayed) and compiling_ns."""
    return max(float(without_compile_ns(window)), float(_measure_compiling_ns(window)))


COMPILED_REGION = r"^Torch-Compiled Region"
"""A compiled frame: what follows a graph break runs nested in it, as a frame of its own (seen with torch 2.13)."""

GRAPH_CALL = r"^CompiledFunction$"
BACKWARD_NODE = r"^autograd::engine::evaluate_function: CompiledFunctionBackward$"


def _find_ops(window: Window, pattern: str) -> pl.DataFrame:
    trace = window.analysis.trace
    require(trace.ops.height > 0, "no ops were recorded: record with activities=[CPU, CUDA]")
    inside = pl.col("step").is_in(window.steps["id"].implode())
    return trace.ops.filter(inside & match_column("name", pattern)).sort("start_ns")


def _find_graph_calls(window: Window) -> pl.DataFrame:
    """Return the graph calls of the steps with `region`, the start of the outermost compiled region around each, where it holds several.

    Raises NotKnownError where the trace marks the calls but not the regions (older torch): which belong together is not told then.
    """
    regions = _find_ops(window, COMPILED_REGION)
    last = pl.col("end_ns").cum_max().shift(1).over("thread")
    outer = regions.filter((pl.col("start_ns") >= last).fill_null(True)).select("thread", region="start_ns", region_end="end_ns")
    calls = _find_ops(window, GRAPH_CALL)
    if calls.height and not outer.height:
        raise NotKnownError("this version of torch does not mark compiled regions, so which graphs are of one function is not known")
    if not calls.height:
        return calls.with_columns(region=pl.lit(None, dtype=pl.Int64)).clear()
    found = calls.join_asof(
        outer.sort("region"), left_on="start_ns", right_on="region", by="thread", coalesce=False, check_sortedness=False
    )
    found = found.filter(pl.col("end_ns") <= pl.col("region_end"))
    return found.filter(pl.len().over("thread", "region") > 1)


def find_break_spans(window: Window) -> pl.DataFrame:
    """Return the host's time between the graphs of one compiled region (start_ns, end_ns): eager ops, guards, Python."""
    pieces = _find_graph_calls(window).sort("thread", "start_ns")
    start = pl.col("end_ns").cum_max().shift(1).over("thread", "region")
    return pieces.select(start_ns=start, end_ns="start_ns").drop_nulls().filter(pl.col("end_ns") > pl.col("start_ns"))


@fact("broken_regions_per_step", unit="count")
def broken_regions_per_step(window: Window) -> float:
    """Calls of compiled functions per step that ran as several graphs, because torch.compile had to break them."""
    require(window.steps.height > 0, "no complete step was recorded")
    return _find_graph_calls(window).select("thread", "region").unique().height / window.steps.height


@fact("breaks_per_step", unit="count")
def breaks_per_step(window: Window) -> float:
    """Times per step that compiled code was left between two graphs of one compiled function; calls of several functions do not count."""
    require(window.steps.height > 0, "no complete step was recorded")
    pieces = _find_graph_calls(window)
    return (pieces.height - pieces.select("thread", "region").unique().height) / window.steps.height


def _estimate_pieces_ns(window: Window) -> float:
    """Return what a CPU would save at most if each function were one graph: of all time in compiled functions, forward and backward,
    matrix work aside, the part of the further graphs. Each is entered, writes its results and reads its inputs for itself.
    """
    pieces = _find_graph_calls(window)
    if not pieces.height:
        return 0.0
    whole = spans.build_spans(
        pl.concat([_find_ops(window, pattern).select("start_ns", "end_ns") for pattern in (COMPILED_REGION, BACKWARD_NODE)])
    )
    matrix = window.kernels.filter(pl.col("family").is_in(MATRIX_FAMILIES))
    starts = matrix["start_ns"].to_numpy()
    products = matrix.filter(pl.Series(spans.measure_covered(whole, starts, starts + 1) > 0, dtype=pl.Boolean))["time_ns"].sum()
    further = pieces.height - pieces.select("thread", "region").unique().height
    return (
        max(0.0, spans.measure_spans(spans.merge_spans(whole)) - float(products)) * further / max(1, _find_ops(window, GRAPH_CALL).height)
    )


def _estimate_split_ns(window: Window) -> float:
    """Return what the generated kernels would save at most where pieces of a function became one: each writes for the next."""
    pieces = _find_graph_calls(window)
    if not pieces.height:
        return 0.0
    extra = pieces.height - pieces.select("thread", "region").unique().height
    split = window.kernels.filter(pl.col("name").str.contains(GENERATED_KERNEL))
    return window.exposed_ns(split) * extra / max(1, _find_ops(window, GRAPH_CALL).height)


def _estimate_break_ns(window: Window) -> float:
    found = spans.build_spans(find_break_spans(window))
    if window.on_cpu:
        return max(float(spans.measure_spans(found)), _estimate_pieces_ns(window))
    eager = window.kernels.join(window.analysis.trace.ops.select(op="id", issued_ns="start_ns"), on="op", how="left").filter(
        pl.col("issued_ns").is_not_null()
    )
    starts = eager["issued_ns"].to_numpy()
    chosen = eager.filter(pl.Series(spans.measure_covered(found, starts, starts + 1) > 0, dtype=pl.Boolean))
    idle = spans.build_spans(window.idle.filter(pl.col("cause").is_in(["idle_launch", "idle_sync", "idle_unexplained"])))
    return float(spans.measure_overlap(found, idle) + window.exposed_ns(chosen)) + _estimate_split_ns(window)


@fact("break_ns", unit="ns")
def break_ns(window: Window) -> float:
    """Time that the breaks cost: between the graphs of one compiled function the device is idle or runs ops that are not compiled.

    Generated kernels could be fused across a break too. On a CPU: all time in compiled functions but matrix work, as far as it is that of
    further graphs.
    """
    return min(_estimate_break_ns(window), float(window.wall_ns))


@fact("break_share", unit="share")
def break_share(window: Window) -> float:
    """break_ns over the wall time of the analysed steps."""
    return min(_estimate_break_ns(window) / window.wall_ns, 1.0)
