"""Steps of a trace without ProfilerStep marks: from the optimizer, the loader, annotations, or the period of the kernels.

Every source gives moments of the host at which one step ends and the next begins. What lies before the first and after the last of them
may be cut by the recording and is no step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution import step_work
from gpudiag.attribution.names import text
from gpudiag.attribution.nesting import Rows, nest
from gpudiag.model.trace import Trace
from gpudiag.trace import kernel_names

Ids = npt.NDArray[np.int64]

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


class Cuts(NamedTuple):
    """Moments (ns, ascending) between steps, the steps' names where the source has any, and the source in words."""

    times: Ids
    names: tuple[str, ...] | None
    source: str


def by_optimizer(trace: Trace) -> Cuts | None:
    """Return the steps from the end of one optimizer step to that of the next.

    So the batch that a step trains on is asked for within it, whether gradients are zeroed before or after, and what follows the update
    (logging, schedulers) is done once in each step all the same. Updates that take turns (a GAN's two optimizers) make one step together.
    """
    found, source = _optimizer_steps(trace)
    if found.height < 2:
        return None
    ends = found["end_ns"].to_numpy()
    cycle = step_work.cycle(trace, ends, found["name"].to_list())
    pauses = np.append(found["start_ns"].to_numpy()[1:] - ends[:-1], 0)
    return _chosen(ends, cycle, pauses, f"{source}, {cycle} updates in each" if cycle > 1 else source)


def _optimizer_steps(trace: Trace) -> tuple[pl.DataFrame, str]:
    """Return the calls of optimizers by the firmest sign that the trace has of them, and what that is."""
    marked = _marks(trace, _OPTIMIZER_STEP)
    if marked.height:
        return marked, "optimizer steps"
    bursts = step_work.optimizer_bursts(trace)
    return (bursts, "optimizer ops") if bursts.height else (step_work.optimizer_frames(trace), "optimizer frames")


def by_loader(trace: Trace) -> Cuts | None:
    """Return the steps from one batch's being asked for to the next's, on the training thread."""
    found = _marks(trace, kernel_names.LOADER_MARK)
    if found.height < 2 or found["thread"][0] != step_work.training_thread(trace):
        return None
    starts = found["start_ns"].to_numpy()
    cycle = step_work.cycle(trace, starts, found["name"].to_list())
    return _chosen(starts, cycle, np.diff(starts, prepend=starts[0]), "loader iterations")


def by_annotation(trace: Trace) -> Cuts | None:
    """Return the steps from one annotation to the next of its name, numbers aside, where one recurs over most of the recording."""
    marks = _candidates(trace)
    extent = step_work.extent(trace)
    length = max(extent[1] - extent[0], 1)
    kinds = marks.group_by("kind").agg(
        pl.len().alias("count"), pl.col("depth").min(), pl.col("start_ns").min().alias("first"), pl.col("start_ns").max().alias("last"),
        (pl.col("end_ns") - pl.col("start_ns")).sum().alias("time"),
    )  # fmt: skip
    calls = pl.col("count").cast(pl.Float64)
    apart = (pl.col("last") - pl.col("first")) / (calls - 1)
    kinds = kinds.filter(pl.col("count") >= MIN_ANNOTATIONS).filter(apart * calls >= MIN_COVER * length)
    around = pl.col("time") / calls >= MIN_AROUND * apart
    for kind in kinds.sort(~around, "depth", "first", "kind")["kind"].head(_MAX_KINDS):
        found = step_work.apart(marks.filter(pl.col("kind") == kind))
        if cuts := _from_annotations(trace, found, kind):
            return cuts
    return None


def by_period(trace: Trace, *, on_cpu: bool) -> Cuts | None:
    """Return the steps from the period of the kernels (CPU: ops) in the order of their launch."""
    sequence = step_work.op_sequence(trace) if on_cpu else step_work.kernel_sequence(trace)
    found = step_work.step_period(sequence)
    if found is None:
        return None
    what = "op" if on_cpu else "kernel"
    repetitions = len(found.cuts) - 1
    source = f"period of the {what} sequence ({found.length} {what}s, {repetitions} repetitions, {100 * found.equal_share:.0f} % equal)"
    # a step begins when the last launch of the one before is over: so it holds the wait before its first
    before = np.maximum(found.cuts - 1, 0)
    times = np.where(found.cuts > 0, np.minimum(sequence.ends_ns[before], sequence.starts_ns[found.cuts]), sequence.starts_ns[0])
    return Cuts(np.unique(times), None, source) if times[-1] > times[0] else None


def _marks(trace: Trace, pattern: str) -> pl.DataFrame:
    """Return the annotations that match, of the thread that has most, in time order and without those inside another."""
    named = trace.marks.with_columns(text("name")).filter(
        (pl.col("category") == "annotation") & pl.col("name").str.contains(pattern) & pl.col("thread").is_not_null()
    )
    return step_work.apart(step_work.of_one_thread(named))


def _chosen(moments: Ids, cycle: int, pauses: Ids, source: str) -> Cuts | None:
    """Return every `cycle`-th of the moments, beginning with the one whose pauses are the longest: there a step ends."""
    medians = [float(np.median(pauses[offset::cycle])) for offset in range(cycle)]
    times = np.unique(moments[int(np.argmax(medians)) :: cycle])
    return Cuts(times, None, source) if len(times) > 1 else None


def _candidates(trace: Trace) -> pl.DataFrame:
    """Return the user's annotations on the training thread with `kind` (the name without its numbers) and `depth` among themselves."""
    thread = step_work.training_thread(trace)
    marks = trace.marks.with_columns(text("name"))
    mine = (pl.col("category") == "annotation") & (pl.col("end_ns") > pl.col("start_ns")) & (pl.col("thread") == thread)
    theirs = _NOT_THE_USERS + "|" + kernel_names.COMPILE_MARK
    marks = marks.filter(mine & ~pl.col("name").str.contains(theirs) & ~pl.col("name").str.contains(_PART))
    marks = marks.sort("start_ns", "end_ns", descending=[False, True])
    depth = _depths(nest(marks).parent)
    return marks.with_columns(pl.col("name").str.replace_all(r"\d+", "N").alias("kind"), pl.Series("depth", depth, dtype=pl.Int64))


def _depths(parent: Rows) -> list[int]:
    depth: list[int] = []
    for above in parent.tolist():  # a row stands below the one that encloses it
        depth.append(0 if above < 0 else depth[above] + 1)
    return depth


def _from_annotations(trace: Trace, found: pl.DataFrame, kind: str) -> Cuts | None:
    starts, names = found["start_ns"].to_numpy(), found["name"].to_list()
    if len(starts) < MIN_ANNOTATIONS:
        return None
    cycle = _name_cycle(names) or step_work.cycle(trace, starts, [kind] * len(names))
    times = starts[::cycle]
    if len(times) < MIN_ANNOTATIONS or step_work.alikeness(trace, times) < MIN_ALIKE:
        return None
    own = found["end_ns"].to_numpy()[::cycle] - times
    told = [_printable(name) for name in names[::cycle]]
    source = f"annotations '{_printable(kind)}'"
    if cycle == 1 and np.median(own[:-1] / np.diff(times)) >= MIN_AROUND:  # the last step is whole too: it ends with its annotation
        return Cuts(np.append(times, times[-1] + own[-1]), tuple(told), source)
    return Cuts(times, tuple(told[:-1]), source)


def _printable(name: str) -> str:
    return "".join(filter(str.isprintable, name[:_LONGEST]))


def _name_cycle(names: list[str]) -> int | None:
    """Return after how many annotations the numbers in the names begin anew (image 0, image 1, image 0, ...); None where never."""
    for cycle in range(2, min(len(names) // 2, 1000) + 1):
        if names[cycle] == names[0] and names[cycle:] == names[:-cycle] and len(set(names[:cycle])) == cycle:
            return cycle
    return None
