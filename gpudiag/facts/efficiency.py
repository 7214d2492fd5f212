"""Facts about the steps and their efficiency: busy and idle time, coverage, data quality, utilisation and published references."""

from __future__ import annotations

import msgspec
import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.attribution.names import match_column, match_names
from gpudiag.attribution.steps import WHOLE_TRACE
from gpudiag.facts import precision
from gpudiag.facts.fields import field_fact
from gpudiag.facts.registry import NotKnownError, fact, fact_of, raise_unknown, require, require_known
from gpudiag.facts.window import Window, cache_by_window, measure_known_share
from gpudiag.hardware.device_table import load_table
from gpudiag.model.hardware import Device
from gpudiag.model.notices import Notice, NoticeCode, make_notice
from gpudiag.model.ops import Provenance
from gpudiag.model.report import MfuReference
from gpudiag.model.timeline import BUSY_BUCKETS
from gpudiag.roofline.op_calls import MATRIX_FAMILIES
from gpudiag.units import format_share

_WORK = pl.col("kind").is_in(["kernel", "cpu"]) & ~pl.col("collective").fill_null(False)
"""Kernels; collectives, copies and memsets aside."""

# The op around a graph launch is not the op of the kernels that it replays: that stands in the pass that captured the graph.
_LOST = pl.col("replay").fill_null(False) & ~pl.col("mapped").fill_null(False)


def measure_share_of_work(window: Window, chosen: pl.Expr) -> float:
    """Return the part of the time in kernels of the analysed steps that is `chosen`."""
    time = pl.col("time_ns")
    total, part = window.kernels.select(total=time.filter(_WORK).sum(), part=time.filter(_WORK & chosen).sum()).row(0)
    require(total > 0, "no kernel ran in the analysed steps")
    return int(part) / int(total)


COMPILATION = r"entire_frame_compile|backend_compile|_compile\.compile_inner|\(dynamo_timed\)"
"""Events of torch.compile at work (rules.md A.1)."""

_STARTS_WORK = r"^(cuda|hip)(Launch|GraphLaunch|ExtLaunch|ExtModuleLaunch|ModuleLaunch|Memcpy|Memset)|^cu(LaunchKernel|GraphLaunch)"


def device_events_missing(window: Window) -> bool:
    """Whether an accelerator was given work (runtime calls say so) but not one kernel, copy or memset was recorded.

    A run that used no accelerator is no fault: false.
    """
    trace = window.analysis.trace
    if trace.kernels.filter(pl.col("kind") != "cpu").height:
        return False
    called = match_names(trace.launches["api"], _STARTS_WORK).any()
    return bool(called) or not window.on_cpu


@cache_by_window
def find_compilation_spans(window: Window) -> spans.Spans:
    """Return when torch.compile was at work."""
    frames = (window.analysis.trace.ops, window.analysis.trace.marks)
    return spans.build_spans(pl.concat([frame.filter(match_column("name", COMPILATION)).select("start_ns", "end_ns") for frame in frames]))


def measure_compiling_share(window: Window) -> float:
    """Return the part of the analysed steps in which torch.compile was at work."""
    require(window.recorded_ops.height > 0 and window.steps.height > 0, "no complete step was recorded")
    steps = window.analysis.host_steps.filter("analysed")
    starts, ends = (steps[column].to_numpy() for column in ("start_ns", "end_ns"))
    at_work = spans.measure_covered(find_compilation_spans(window), starts, ends)
    return float((at_work > 0).sum()) / window.steps.height


def profiler_overhead_share(window: Window) -> float:
    """Time of the profiler's own events (buffer flushes, instrumentation) over the wall time of the analysed steps.

    On a GPU at most the idle time that the host or the profiler is to blame for: under a busy GPU it is hidden.
    """
    buckets, events = window.analysis.breakdown.buckets_ns, window.analysis.trace.marks.filter(pl.col("category") == "overhead")
    most = window.wall_ns if window.on_cpu else buckets.idle_profiler + buckets.idle_launch
    return min(spans.measure_overlap(spans.build_spans(events), window.step_spans), most) / window.wall_ns


def step_variation(window: Window) -> float:
    """Coefficient of variation of the analysed steps' wall time: standard deviation over mean."""
    walls = (window.steps["end_ns"] - window.steps["start_ns"]).cast(pl.Float64)
    require(len(walls) >= 2, "fewer than 2 steps: their scatter cannot be told")
    deviation, mean = walls.std(), walls.mean()
    if not isinstance(deviation, float) or not isinstance(mean, float) or mean <= 0:
        raise NotKnownError("steps without duration")
    return deviation / mean


def first_step_ratio(window: Window) -> float:
    """Wall time of the first recorded step, where it is analysed, over the median of the others; 1 where it was left out."""
    steps, walls = window.analysis.steps.sort("start_ns"), (window.steps["end_ns"] - window.steps["start_ns"]).cast(pl.Float64)
    require(len(walls) >= 2, "fewer than 2 steps: the first cannot be compared")
    if not steps["analysed"][0]:
        return 1.0
    median = walls[1:].median()
    if not isinstance(median, float) or median <= 0:
        raise NotKnownError("steps without duration")
    return float(walls[0]) / median


ENOUGH_COUNTED = 0.5
"""With less of the matrix kernels' time counted, the FLOP that were counted say little."""

NEARLY_ALL = 0.95
"""Below this share of counted matrix kernel time a utilisation is called a lower bound: the coverage that the cost models aim at."""

MINOR = 0.05
"""Share of the FLOP below which another origin or type is not worth a word."""


@cache_by_window
def find_counted_work(window: Window) -> pl.DataFrame:
    """Return the matrix work whose FLOP are known; raises NotKnownError where that is less than half of it by time."""
    work = window.matrix_work
    require(work.height > 0, "no matrix work was launched in the analysed steps")
    share = measure_known_share(work) or 0.0
    require(share > 0, "the FLOP of the matrix work are not known: record with record_shapes=True, without graph replays")
    require(
        share >= ENOUGH_COUNTED,
        f"the FLOP of {format_share(1 - share)} of the time in kernels that may do matrix work are not known (graph replays, ops without "
        "shapes or formula): record the capture pass too, with record_shapes=True",
    )
    return work.filter(pl.col("matrix").is_not_null())


def matrix_flop(window: Window) -> float:
    """Model FLOP of the matrix work launched in the analysed steps: without what repeats forward work (recompute_flop)."""
    work = find_counted_work(window)
    return float((work["matrix"] - work["again"]).sum())


def measure_matrix_mix(window: Window) -> dict[str, float]:
    """Return the share of the matrix FLOP by engine, largest first; {} where no engine is known. Mixed types have no single peak."""
    known = find_counted_work(window).drop_nulls("engine")
    sums = known.group_by("engine").agg(pl.col("matrix").sum()).sort("matrix", "engine", descending=True)
    total = float(sums["matrix"].sum())
    return {engine: flop / total for engine, flop in sums.rows()} if total else {}


def list_mfu_notices(window: Window) -> tuple[Notice, ...]:
    """Return what a reader of the utilisation must know: that it is a lower bound, or that several types have no single peak."""
    found = []
    share = measure_known_share(window.matrix_work)
    if share is not None and share < NEARLY_ALL:
        found.append(make_notice(NoticeCode.MFU_LOWER_BOUND, share=float(1 - share)))
    mix = [f"{engine} {format_share(part)}" for engine, part in measure_matrix_mix(window).items() if part >= MINOR]
    if len(mix) > 1:
        found.append(make_notice(NoticeCode.MFU_MIXED_TYPES, types=", ".join(mix)))
    return tuple(found)


def find_weakest_provenance(window: Window) -> Provenance:
    """Return the weakest provenance among those that carry at least MINOR of the matrix FLOP: generic, derived or exact."""
    sums = dict(find_counted_work(window).group_by("provenance").agg(pl.col("matrix").sum()).rows())
    order: tuple[Provenance, ...] = ("generic", "derived")
    return next((word for word in order if sums.get(word, 0.0) >= MINOR * sum(sums.values())), "exact")


def _find_main_type(window: Window) -> tuple[str, float | None]:
    """Return the type that carries most matrix FLOP ('tf32' where fp32 work ran on the TF32 path) and its peak in FLOP/s."""
    device, engine = window.analysis.device, next(iter(measure_matrix_mix(window)), None)
    if device and engine:
        return engine.removesuffix("_tensor"), device.peaks.get(engine)
    work = precision.add_path(window, window.work(shapes=True).filter(pl.col("family").is_in(MATRIX_FAMILIES)))
    effective = pl.when((pl.col("dtype") == "fp32") & (pl.col("path") == "fast")).then(pl.lit("tf32")).otherwise("dtype")
    sums = work.group_by(effective.alias("dtype")).agg(pl.col("flops").sum()).drop_nulls().sort("flops", "dtype", descending=True)
    require(sums.height > 0, "the dtypes of the matrix work were not recorded")
    return str(sums["dtype"][0]), device.matrix_peak(str(sums["dtype"][0])) if device else None


def find_peak_flop_per_s(window: Window) -> float:
    """Return what mfu and hfu are divided by: the dense peak of matrix_dtype in FLOP/s. Raises NotKnownError where it is not known."""
    peak = _find_main_type(window)[1] if window.device else None
    return require_known(peak or None, "the peak of this device is not known for the type that carries the matrix work")


MOST_UTILISATION = 1.05
"""No device works above its peak; clocks above the one that the peak holds for, and rounding, may make this much of it."""


def _measure_utilisation(window: Window, flop: float) -> float:
    share = flop / (window.wall_ns * 1e-9 * find_peak_flop_per_s(window))
    fault = f"it comes out at {share:.0%} of the peak, which cannot be: the steps, the recorded shapes or the device's peak are wrong"
    require(share <= MOST_UTILISATION, fault)
    return share


MAX_REFERENCES = 4

_TORCHTITAN = "torchtitan benchmarks, 8 H100 of 500 W; derived from its tokens per second with 6N + 12LHQT FLOP a token"
_FOLDING = "MoE Parallel Folding"
_FRONTIER = "training on Frontier (Optimizing Distributed Training on Frontier for Large Language Models)"
_MEGATRON = "Megatron-LM: 502 PFLOP/s on 3,072 GPUs"
_INFINITY = "ZeRO-Infinity: 25 PFLOP/s on 512 GPUs"
_OFFLOAD = "ZeRO-Offload"
_FUYOU = "Fuyou"


class PublishedMfu(msgspec.Struct, frozen=True):
    """One published figure and the device that it was reached on."""

    device: str
    """Row of the device table."""
    what: str
    flop_per_s: float
    """Achieved per device."""
    peak_flop_per_s: float
    """Dense peak that the figure was published for: the denominator."""
    peak: str
    source: str

    @property
    def share(self) -> float:
        """Return the utilisation, 0..1."""
        return self.flop_per_s / self.peak_flop_per_s


_H100, _A100, _V100, _MI250X, _RTX4090 = "h100-sxm5-80gb", "a100-sxm4-80gb", "v100-sxm3-32gb", "mi250x-gcd", "rtx-4090"
_H100_PEAK = "989.4 TFLOP/s (H100 SXM, bf16 dense)"
_A100_PEAK = "312 TFLOP/s (A100 SXM 80 GB, fp16 dense)"
_V100_PEAK = "125 TFLOP/s (V100 of a DGX-2, fp16)"
_MI250X_PEAK = "191.5 TFLOP/s (one GCD of an MI250X, fp16)"

PUBLISHED_MFUS: tuple[PublishedMfu, ...] = (
    PublishedMfu(_H100, "Llama-3.1-8B, FSDP, eager", 351.9e12, 989.4e12, _H100_PEAK, _TORCHTITAN),
    PublishedMfu(_H100, "Llama-3.1-8B, FSDP, torch.compile", 407.1e12, 989.4e12, _H100_PEAK, _TORCHTITAN),
    PublishedMfu(_H100, "Mixtral 8x22B (MoE)", 0.493 * 989.4e12, 989.4e12, _H100_PEAK, _FOLDING),
    PublishedMfu(_H100, "Qwen2-57B-A14B (MoE)", 0.390 * 989.4e12, 989.4e12, _H100_PEAK, _FOLDING),
    PublishedMfu(_A100, "GPT 1T, Megatron-LM", 163.4e12, 312e12, _A100_PEAK, _MEGATRON),
    PublishedMfu(_V100, "ZeRO-Infinity on 512 V100", 48.8e12, 125e12, _V100_PEAK, _INFINITY),
    PublishedMfu(_V100, "10B, ZeRO-Offload", 40e12, 125e12, _V100_PEAK, _OFFLOAD),
    PublishedMfu(_V100, "1.4B, plain PyTorch", 30e12, 125e12, _V100_PEAK, _OFFLOAD),
    PublishedMfu(_MI250X, "GPT 22B on Frontier", 0.3838 * 191.5e12, 191.5e12, _MI250X_PEAK, _FRONTIER),
    PublishedMfu(_MI250X, "GPT 175B on Frontier", 0.3614 * 191.5e12, 191.5e12, _MI250X_PEAK, _FRONTIER),
    PublishedMfu(_MI250X, "GPT 1T on Frontier", 0.3196 * 191.5e12, 191.5e12, _MI250X_PEAK, _FRONTIER),
    PublishedMfu(_RTX4090, "GPT-3 13B, Fuyou", 156e12, 330.3e12, "330.3 TFLOP/s (RTX 4090, fp16, fp16 accumulation)", _FUYOU),
    PublishedMfu(_RTX4090, "GPT-3 13B, ZeRO-Infinity", 45e12, 165.2e12, "165.2 TFLOP/s (RTX 4090, fp16, fp32 accumulation)", _FUYOU),
)
"""Figures of the design's knowledge base: rule EFF-01, seed_figures A-06 to A-10, A-30, N-02; papers by their titles.

They mix model and hardware FLOPs (recomputation counted or not), as their papers do, which is one more reason to compare with care.
"""


def list_mfu_references(device: Device, dtype: str) -> tuple[MfuReference, ...]:
    """Return at most MAX_REFERENCES published figures to set beside matrix work of `dtype`; () where none compares.

    Those of the very device; where there are none, those of another device with the same compute capability, marked as such: an H100
    PCIe or an H20 has neither the peak nor the power of an H100 SXM.
    """
    rows = {row.id: row for row in load_table().devices}
    typed = [(item, rows[item.device]) for item in PUBLISHED_MFUS if dtype in ("fp16", "bf16")]
    # a partition or a cut part of a device keeps its id, but not its SMs
    own = [item for item, row in typed if row.id == device.id and row.chip.sm_count == device.sm_count]
    others = [item for item, row in typed if row.chip.compute_capability == device.compute_capability]
    return tuple(MfuReference(item.what, item.share, item.peak, item.source, not own) for item in (own or others)[:MAX_REFERENCES])


# fmt: off
FACTS = (
    fact("wall_ns", "ns", "Wall time of the analysed steps.", lambda window: window.wall_ns),
    fact("steps_analysed", "count", "Complete steps that the figures rest on; a trace in which no steps were found counts as one.",
         lambda window: window.steps.height),
    fact("step_ns", "ns", "Mean wall time of an analysed step.", lambda window: window.wall_ns / window.step_count),
    fact("a_step", "text", "What the analysed time is called in a sentence: 'a step', or 'the recorded window' where no steps were found.",
         lambda window: "the recorded window" if window.analysis.steps_source == WHOLE_TRACE else "a step"),
    fact("device_word", "text", "What the device is called in a sentence: GPU or CPU.", lambda window: "CPU" if window.on_cpu else "GPU"),
    fact("largest_busy_bucket", "text", "Name of the bucket of the breakdown, idle causes aside, that holds the most time.",
         lambda window: (
             max(BUSY_BUCKETS, key=lambda name: getattr(window.analysis.breakdown.buckets_ns, name)).replace("_", " ")
             if window.busy_ns > 0 else raise_unknown("the device did nothing in the analysed steps"))),
    fact("shaped_share", "share", "Part of the time in kernels (collectives, copies and memsets aside) of the analysed steps whose op is "
         "known and has shapes.", lambda window: measure_share_of_work(window, pl.col("signature").is_not_null() & ~_LOST)),
    fact("modelled_work_share", "share", "Part of the time in kernels (collectives, copies and memsets aside) of the analysed steps whose "
         "cost is exact or derived. Unlike coverage.modelled_share it counts what could not be modelled too: graph replays, "
         "kernels without ops, ops without shapes.",
         lambda window: measure_share_of_work(window, pl.col("provenance").is_in(["exact", "derived"]))),
    fact("attributed_work_share", "share", "Part of the time in kernels (collectives, copies and memsets aside) of the analysed steps "
         "whose op is known. Replayed kernels count only where the pass that captured their graph tells.",
         lambda window: measure_share_of_work(window, pl.col("op").is_not_null() & ~_LOST)),
    fact_of(device_events_missing, "bool"),
    field_fact("profiler_slowdown", "profiler_slowdown", "Median profiled step over median unprofiled step of the same run.",
               "how much the profiler slowed the run is not known: only profiled steps were recorded; use gpudiag.profile"),
    fact("compilation_step_share", "share", "Part of the analysed steps in which torch.compile was at work.",
         measure_compiling_share),
    fact_of(step_variation, "share"),
    fact_of(first_step_ratio, "ratio"),
    fact("stacks_recorded", "bool", "Whether Python stacks were recorded in the window that the times come from: they slow the host.",
         lambda window: window.analysis.trace.meta.with_stack or window.analysis.trace.frames.height > 0),
    field_fact("memory_recorded", "trace.meta.profile_memory", "Whether allocations were recorded in the window that the times come from "
               "(profile_memory): they slow the host.", "the trace does not say"),
    fact_of(profiler_overhead_share, "share"),
    fact("matrix_dtype", "text", "Compute type that carries most matrix FLOP.", lambda window: _find_main_type(window)[0]),
    fact("matrix_known_share", "share", "Part of the time in kernels that do or may do matrix work, launched in the analysed steps, whose "
         "FLOP are counted. Below 0.95 mfu and hfu are lower bounds. A kernel without a count may do matrix work by its op's family "
         "or its own name.",
         lambda window: require_known(measure_known_share(window.matrix_work), "no matrix work was launched in the analysed steps")),
    fact_of(matrix_flop, "FLOP"),
    fact("recompute_flop", "FLOP", "Matrix FLOP that repeat forward work: activation checkpointing, and the scores that a fused attention "
         "backward forms again.", lambda window: float(find_counted_work(window)["again"].sum())),
    fact("mfu", "share", "Model FLOP utilisation: matrix_flop / (wall time x dense peak of matrix_dtype) (Chowdhery et al., PaLM, "
         "appendix B). Unlike there the FLOP are counted op by op, so causal attention counts half of its pairs. A lower bound where "
         "matrix_known_share is below 0.95.", lambda window: _measure_utilisation(window, matrix_flop(window))),
    fact("hfu", "share", "Hardware FLOP utilisation: (matrix_flop + recompute_flop) / (wall time x dense peak) (Korthikanti et al., "
         "arXiv:2205.05198).", lambda window: _measure_utilisation(window, float(find_counted_work(window)["matrix"].sum()))),
    fact("roofline_ns", "ns", "Summed roofline time of the modelled kernels: the least time that this work needs on this device.",
         lambda window: (float(times.sum()) if len(times := window.work()["t_roof_ns"].drop_nulls())
                         else raise_unknown("no kernel has a roofline time: the device's peaks or the shapes are not known"))),
    fact("trained_parameters", "count", "Scalar parameters that the optimizers update.",
         lambda window: (sum(optimizer.parameters for optimizer in manifest.settings.optimizers)
                         if (manifest := window.analysis.manifest) is not None and manifest.settings.optimizers
                         else raise_unknown("the number of trained parameters is not in a trace: record with gpudiag.profile"))),
)
# fmt: on
