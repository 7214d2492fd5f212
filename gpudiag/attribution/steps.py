"""The steps of a trace: ProfilerStep marks, else the optimizer, the loader, annotations or the period of the kernels, else one window.

Every source gives moments of the host at which one step ends and the next begins. What lies before the first and after the last of them
may be cut by the recording and is no step.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import polars as pl

from gpudiag.arrays import Ints
from gpudiag.attribution import step_patterns
from gpudiag.attribution.device import classify_run, find_busiest_device
from gpudiag.attribution.names import decode_column
from gpudiag.attribution.nesting import nest, null_missing
from gpudiag.attribution.step_patterns import drop_nested, measure_extent
from gpudiag.model import trace as trace_module
from gpudiag.model.notices import Notice, NoticeCode, make_notice
from gpudiag.model.trace import Trace
from gpudiag.trace import kernel_names

MIN_ANNOTATIONS = 3
MIN_COVER = 0.5
"""Share of the recording over which an annotation has to recur."""
MIN_AROUND = 0.8
"""Share of the time from one annotation to the next that it must last to be the step itself and not a part of it."""
MIN_ALIKE = 0.6
"""Share of ops that the intervals between recurring annotations must have in common: phases of a script differ, steps do not."""

_OPTIMIZER_STEP = r"^Optimizer\.step#"
# Annotations that torch itself writes, many in a step or for a part of it.
_NOT_THE_USERS = (
    r"^(Optimizer\.|enumerate\(DataLoader\)|ProfilerStep|DistributedDataParallel|FullyShardedDataParallel|FSDP|Torch-Compiled|autograd::"
    r"|## Call CompiledFxGraph|PyTorch Profiler|Iteration Start|record_param_comms|torch::|nccl:|gloo:|mpi:|ucc:|c10d)"
)
_MAX_KINDS = 20
_LONGEST = 80
"""Characters of an annotation that a report repeats."""
# Parts of a model that a user numbers; they recur within a step.
_PART = r"(?i)layer|block|stage|module|head|expert|chunk|bucket|micro|tile"


class StepCuts(NamedTuple):
    """Moments (ns, ascending) between steps, the steps' names where the source has any, and the source in words."""

    times: Ints
    names: tuple[str, ...] | None
    source: str


def cut_by_optimizer(trace: Trace) -> StepCuts | None:
    """Return the steps from the end of one optimizer step to that of the next.

    So the batch that a step trains on is asked for within it, whether gradients are zeroed before or after, and what follows the update
    (logging, schedulers) is done once in each step all the same. Updates that take turns (a GAN's two optimizers) make one step together.
    """
    # the firmest sign that the trace has of its optimizers; several without a backward pass between them are one update
    found, source = step_patterns.join_updates(trace, _find_annotations(trace, _OPTIMIZER_STEP)), "optimizer steps"
    if not found.height:
        found, source = step_patterns.find_optimizer_bursts(trace), "optimizer ops"
    if not found.height:
        found, source = step_patterns.find_optimizer_frames(trace), "optimizer frames"
    if found.height < 2:
        return None
    ends = found["end_ns"].to_numpy()
    cycle = step_patterns.find_cycle(trace, ends, found["name"].to_list())
    pauses = np.append(found["start_ns"].to_numpy()[1:] - ends[:-1], 0)
    return _choose_cuts(ends, cycle, pauses, f"{source}, {cycle} updates in each" if cycle > 1 else source)


def cut_by_loader(trace: Trace) -> StepCuts | None:
    """Return the steps from one batch's being asked for to the next's, on the training thread."""
    found = _find_annotations(trace, kernel_names.LOADER_MARK)
    if found.height < 2 or found["thread"][0] != step_patterns.find_training_thread(trace):
        return None
    starts = found["start_ns"].to_numpy()
    cycle = step_patterns.find_cycle(trace, starts, found["name"].to_list())
    return _choose_cuts(starts, cycle, np.diff(starts, prepend=starts[0]), "loader iterations")


def cut_by_annotation(trace: Trace) -> StepCuts | None:
    """Return the steps from one annotation to the next of its name, numbers aside, where one recurs over most of the recording."""
    # the user's annotations on the training thread, with their kind (the name without its numbers) and depth among themselves
    thread = step_patterns.find_training_thread(trace)
    marks = trace.marks.with_columns(decode_column("name"))
    mine = (pl.col("category") == "annotation") & (pl.col("end_ns") > pl.col("start_ns")) & (pl.col("thread") == thread)
    theirs = _NOT_THE_USERS + "|" + kernel_names.COMPILE_MARK
    marks = marks.filter(mine & ~pl.col("name").str.contains(theirs) & ~pl.col("name").str.contains(_PART))
    marks = marks.sort("start_ns", "end_ns", descending=[False, True])
    depth: list[int] = []
    for above in nest(marks).parent.tolist():  # a row stands below the one that encloses it
        depth.append(0 if above < 0 else depth[above] + 1)
    # a name that makes up most of its kind is one by itself: the others of the kind come after it, or around it
    kind, count = pl.col("name").str.replace_all(r"\d+", "N"), pl.len().over("name")
    mostly = (count >= MIN_ANNOTATIONS) & (2 * count > pl.len().over(kind))
    marks = marks.with_columns(pl.when(mostly).then("name").otherwise(kind).alias("kind"), pl.Series("depth", depth, dtype=pl.Int64))
    extent = step_patterns.measure_extent(trace)
    length = max(extent[1] - extent[0], 1)
    kinds = marks.group_by("kind").agg(
        pl.len().alias("count"),
        pl.col("depth").min(),
        pl.col("start_ns").min().alias("first"),
        pl.col("start_ns").max().alias("last"),
        (pl.col("end_ns") - pl.col("start_ns")).sum().alias("time"),
    )
    calls = pl.col("count").cast(pl.Float64)
    apart = (pl.col("last") - pl.col("first")) / (calls - 1)
    kinds = kinds.filter(pl.col("count") >= MIN_ANNOTATIONS).filter(apart * calls >= MIN_COVER * length)
    around = pl.col("time") / calls >= MIN_AROUND * apart
    for kind in kinds.sort(~around, "depth", "first", "kind")["kind"].head(_MAX_KINDS):
        found = step_patterns.drop_nested(marks.filter(pl.col("kind") == kind))
        if cuts := _cut_at_annotations(trace, found, kind):
            return cuts
    return None


def cut_by_period(trace: Trace, *, on_cpu: bool) -> StepCuts | None:
    """Return the steps from the period of the kernels (CPU: ops) in the order of their launch."""
    sequence = step_patterns.build_op_sequence(trace) if on_cpu else step_patterns.build_kernel_sequence(trace)
    found = step_patterns.find_step_period(sequence)
    if found is None:
        return None
    what = "op" if on_cpu else "kernel"
    repetitions = len(found.cuts) - 1
    source = f"period of the {what} sequence ({found.length} {what}s, {repetitions} repetitions, {100 * found.equal_share:.0f} % equal)"
    # a step begins when the last launch of the one before is over: so it holds the wait before its first
    before = np.maximum(found.cuts - 1, 0)
    times = np.where(found.cuts > 0, np.minimum(sequence.ends_ns[before], sequence.starts_ns[found.cuts]), sequence.starts_ns[0])
    return StepCuts(np.unique(times), None, source) if times[-1] > times[0] else None


def _find_annotations(trace: Trace, pattern: str) -> pl.DataFrame:
    """Return the annotations that match, of the thread that has most, in time order and without those inside another."""
    named = trace.marks.with_columns(decode_column("name")).filter(
        (pl.col("category") == "annotation") & pl.col("name").str.contains(pattern) & pl.col("thread").is_not_null()
    )
    return step_patterns.drop_nested(step_patterns.keep_busiest_thread(named))


def _choose_cuts(moments: Ints, cycle: int, pauses: Ints, source: str) -> StepCuts | None:
    """Return every `cycle`-th of the moments, beginning with the one whose pauses are the longest: there a step ends."""
    medians = [float(np.median(pauses[offset::cycle])) for offset in range(cycle)]
    times = np.unique(moments[int(np.argmax(medians)) :: cycle])
    return StepCuts(times, None, source) if len(times) > 1 else None


def _cut_at_annotations(trace: Trace, found: pl.DataFrame, kind: str) -> StepCuts | None:
    starts, names = found["start_ns"].to_numpy(), found["name"].to_list()
    if len(starts) < MIN_ANNOTATIONS:
        return None
    # after how many annotations the numbers in the names begin anew (image 0, image 1, image 0, ...)
    cycle = 0
    for length in range(2, min(len(names) // 2, 1000) + 1):
        if names[length] == names[0] and names[length:] == names[:-length] and len(set(names[:length])) == length:
            cycle = length
            break
    cycle = cycle or step_patterns.find_cycle(trace, starts, [kind] * len(names))
    times = starts[::cycle]
    if len(times) < MIN_ANNOTATIONS or step_patterns.measure_similarity(trace, times) < MIN_ALIKE:
        return None
    own = found["end_ns"].to_numpy()[::cycle] - times
    told = [_clean_name(name) for name in names[::cycle]]
    source = f"annotations '{_clean_name(kind)}'"
    if cycle == 1 and np.median(own[:-1] / np.diff(times)) >= MIN_AROUND:  # the last step is whole too: it ends with its annotation
        return StepCuts(np.append(times, times[-1] + own[-1]), tuple(told), source)
    return StepCuts(times, tuple(told[:-1]), source)


def _clean_name(name: str) -> str:
    return "".join(filter(str.isprintable, name[:_LONGEST]))


KEEP_AT_LEAST = 5
"""The first and the last step are dropped only where this many remain."""

OUTSIDE_SHARE = 0.2
"""More of the recording than this outside every step is worth a warning; a less sure source that holds so much more of the device's time is
the better one."""

FROM_MARKS = "ProfilerStep marks"
WHOLE_TRACE = "no step marks: one window over the whole trace"


class Steps(NamedTuple):
    """The rows of `steps`, how they were found, and what to know about them."""

    table: pl.DataFrame
    source: str
    notices: tuple[Notice, ...]


def find_steps(trace: Trace) -> Steps:
    """Return the steps of `trace`: half-open host intervals, contiguous but for gaps in the numbers of ProfilerStep marks."""
    by_period = partial(cut_by_period, on_cpu=classify_run(trace).startswith("cpu"))
    # when the work of the busiest device was issued, or began where no call is known, and its time
    work = trace.kernels.filter(pl.col("device").eq_missing(find_busiest_device(trace.kernels)[0]))
    calls = trace.launches.filter(pl.col("correlation") > 0).unique("correlation").select("correlation", called_ns="start_ns")
    issued = work.join(calls, on="correlation", how="left").select(
        pl.coalesce("called_ns", "start_ns"), ns=pl.col("end_ns") - pl.col("start_ns")
    )
    best, most, total = None, 0.0, int(issued["ns"].sum())
    for find in (_find_marked, cut_by_optimizer, cut_by_loader, cut_by_annotation, by_period):  # the surest first
        found = find(trace)
        if found is None:
            continue
        if isinstance(found, StepCuts):
            times, source = found.times.tolist(), found.source
            names = found.names or tuple(f"#{row}" for row in range(len(times) - 1))
            rows: StepRows = list(zip(names, times[:-1], times[1:], strict=True))
        else:
            rows, source = found, FROM_MARKS
        # the share of the work that was issued within the steps; what lies before the first and after the last cut is a step of its own,
        # cut by the recording, so that one more like the others counts
        inside = int(issued.filter((pl.col("called_ns") >= rows[0][1]) & (pl.col("called_ns") < rows[-1][2]))["ns"].sum())
        held = min(1.0, inside / total * (1 + (source != FROM_MARKS) / len(rows))) if total else 1.0
        if best is None or held > most + OUTSIDE_SHARE:
            best, most = (rows, source), held
        if most >= 1 - OUTSIDE_SHARE:
            break
    if best is None:
        return Steps(_build_table([("whole trace", *measure_extent(trace))]), WHOLE_TRACE, (make_notice(NoticeCode.NO_STEP_MARKS),))
    rows, source = best
    table = _build_table(_end_with_activity(trace, rows))
    # what lies outside the cuts may be incomplete and is no step
    first, last = measure_extent(trace)
    outside = 1 - (rows[-1][2] - rows[0][1]) / max(last - first, 1)
    said = source != FROM_MARKS and outside > OUTSIDE_SHARE
    notes = (make_notice(NoticeCode.OUTSIDE_STEPS, source=source, share=float(outside)),) if said else ()
    if table["analysed"].all() and table.height < KEEP_AT_LEAST + 2:
        notes = (make_notice(NoticeCode.FEW_STEPS, steps=table.height), *notes)
    return Steps(table, source, notes)


StepRows = list[tuple[str, int, int]]
"""Name, start and end of each step, in ns."""


def _find_marked(trace: Trace) -> StepRows | None:
    """Return the steps from ProfilerStep mark to mark; where the next number is missing a step ends with its own mark.

    Of two marks of one number the first stands where an epoch ended: that step was begun again in the next one (capture/windows.py).
    """
    # in time order, without those that begin inside another (a second profiler's)
    text = decode_column("name")
    marks = trace.marks.filter((pl.col("category") == "annotation") & text.str.contains(kernel_names.STEP_MARK))
    marks = marks.with_columns(text.str.extract(kernel_names.STEP_MARK, 1).cast(pl.Int64, strict=False).fill_null(-2).alias("number"))
    rows = list(drop_nested(marks.with_columns(text)).select("name", "number", "start_ns", "end_ns").iter_rows())
    steps = []
    for (name, number, start, end), following in zip(rows, [*rows[1:], None], strict=False):
        after = following[1] - number if following is not None else None
        if after != 0 or number < 0:
            steps.append((name, start, following[2] if after == 1 and following is not None else end))
    return steps or None


TAIL_NS, TAIL_TIMES = 1_000_000, 3
"""The last step ends with its last event where nothing was recorded for longer than 1 ms to the end of its mark, and 3 times as long as in
any other step: the end of a loop stops workers and profilers, which is no step's work."""


def _end_with_activity(trace: Trace, rows: StepRows) -> StepRows:
    ends = np.array([end for _, _, end in rows], dtype=np.int64)
    last = np.zeros(len(ends) + 1, dtype=np.int64)  # the last moment of activity before each end, and after all of them
    for frame in (trace.ops, trace.launches, trace.kernels, trace.frames):
        for moments in (frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy()):
            np.maximum.at(last, np.searchsorted(ends, moments, "right"), moments)
    before = np.maximum.accumulate(last)[:-1]
    tails = ends - before
    if last[-1] or len(rows) < 2 or tails[-1] <= max(TAIL_NS, TAIL_TIMES * int(tails[:-1].max())):
        return rows
    name, start, _ = rows[-1]
    return [*rows[:-1], (name, start, max(int(before[-1]), start + 1))]


def _build_table(steps: list[tuple[str, int, int]]) -> pl.DataFrame:
    drop_edges = len(steps) - 2 >= KEEP_AT_LEAST
    rows = [(row, name, start, end, not (drop_edges and row in (0, len(steps) - 1))) for row, (name, start, end) in enumerate(steps)]
    return pl.DataFrame(rows, schema=trace_module.build_table_schema("steps"), orient="row")


def assign_steps(steps: pl.DataFrame, times: Ints) -> pl.Series:
    """Return the row of `steps` that holds each moment, null outside every step."""
    starts, ends = steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy()
    row = np.searchsorted(starts, times, side="right") - 1
    inside = (row >= 0) & (times < ends[np.maximum(row, 0)]) if len(starts) else np.zeros(len(times), dtype=bool)
    found: pl.Series = null_missing(np.where(inside, row, -1), "step")
    return found
