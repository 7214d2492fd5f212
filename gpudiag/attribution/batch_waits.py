"""When the training thread waited for its next batch, where no mark of a DataLoader says so: of recordings of Nsight Systems.

Told by calls and samples whose chain shows a `__next__`; by the pauses between ranges around the passes of a loop, in which nothing can run
but what stands outside the range: the loop's own call for the next batch, and what a user put beside it; else by timed waits for another
thread or process in most steps, as torch's DataLoader makes them (torch.utils.data, MP_STATUS_CHECK_INTERVAL).
A stretch in which the thread calls CUDA is none of these.
"""

from __future__ import annotations

import msgspec
import numpy as np
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.attribution.links import BACKWARD_WORDS, FORWARD_WORDS, OPTIMIZER_WORDS
from gpudiag.attribution.names import decode_column, match_column, match_names
from gpudiag.attribution.step_patterns import TO_DEVICE, TRAINING_KERNEL
from gpudiag.attribution.steps import assign_steps
from gpudiag.model.trace import Trace
from gpudiag.trace.kernel_names import DECODING, IN_NEXT, LOADER_MARK
from gpudiag.trace.table_store import order_table

BRIDGE_NS = 100_000_000
"""Two moments in a `__next__` this far apart at most, with no CUDA call between them, are one wait."""

LEAST_NS = 50_000
"""A shorter pause between two ranges is Python at work."""

MIN_RANGES = 3
MIN_HELD = 0.8
"""Share of the thread's CUDA calls that lie within the ranges of a loop's passes."""

BATCH_BYTES = 65_536
"""A larger copy to the device may be a batch; token ids and flags of a server are smaller."""

MIN_STEP_SHARE = 0.5
"""Share of the steps in which a wait has to recur to be part of the loop."""

# Ranges that users put around the loading of a batch: "load_batch 3", "next(train_loader)", "train/fetch". All their words are of
# these, and some tell it. Not torchrec's "wait_for_batch", which waits for a copy.
_WORDS = (
    r"(?i)^(?:[\W\d_]*(?:data(?:sets?|load\w*)?|(?:mini\W?)?batch(?:es)?|inputs?|samples?|images?|loader|load(?:ing)?|fetch(?:ing)?|read(?:ing)?"
    r"|get|next|iter(?:at\w+)?|enumerate|wait(?:ing)?|for|the|time|step|train(?:ing)?|val(?:idation)?|prep\w*|pipeline|collate|getitem"
    r"|augment\w*))+[\W\d_]*$"
)
_LOADING = (
    r"(?i)data|load|fetch|collate|getitem|preprocess|augment|(?:get|next|read|prep).*(?:batch|input|sample|image)"
    r"|(?:batch|input|sample|image).*(?:read|prep|pipeline)"
)
_ROUND = r"(?i)(?:^|[\W_])(?:train(?:ing)?[\W_]*)?(?:step|iter(?:ation)?|(?:mini[\W_]*)?batch|pass)(?:$|[\W\d_])"
_TIMED_WAIT = r"^(?:p?poll|sem_(?:timed|clock)wait)$"
_NO_BATCH = r"sleep|^(?:p?write|f(?:data)?sync|fwrite)"
"""What a thread does in a pause that brings no batch."""

_WAITS = {"thread": pl.Int64(), "name": pl.String(), "start_ns": pl.Int64(), "end_ns": pl.Int64()}
_NONE = pl.DataFrame(schema=_WAITS)


def add_batch_waits(trace: Trace, steps: pl.DataFrame) -> Trace:
    """Return `trace` with marks of category 'loader': waits for a batch. The same `trace` where none is found or torch's own marks tell."""
    if trace.meta.recorder != "nsys":
        return trace
    ranges = trace.marks.filter(pl.col("category") == "annotation").with_columns(decode_column("name"))
    if ranges["name"].str.contains(LOADER_MARK).any() or match_names(trace.ops["name"], LOADER_MARK).any():
        return trace
    done = trace.marks.filter(pl.col("category") == "os").with_columns(decode_column("name")).drop_nulls("thread")
    calls = trace.launches.select("thread", "start_ns", "end_ns").drop_nulls("thread").sort("thread", "start_ns")
    found = ranges.filter(pl.col("name").str.contains(_WORDS) & pl.col("name").str.contains(_LOADING)).select(list(_WAITS))
    if found.height < MIN_RANGES:
        found = _find_in_next(done, calls)
        # a program that trains, or copies large inputs to the device again and again; a server waits for its requests instead
        phases = ranges.filter(pl.col("name").str.contains(f"{BACKWARD_WORDS}|{OPTIMIZER_WORDS}"))
        batches = trace.kernels.filter((pl.col("kind") == "memcpy") & match_column("name", TO_DEVICE) & (pl.col("bytes") >= BATCH_BYTES))
        trains = phases.height > 0 or match_names(trace.kernels["name"], TRAINING_KERNEL).any()
        if trains or batches.height >= MIN_RANGES:
            found = pl.concat([found, _find_pauses_of_loop(trace, done, calls)])
            found = found if found.height else _find_timed_waits(done, calls, steps)
    if not found.height:
        return trace
    waits = found.with_columns(pl.col("name").cast(pl.Categorical()), pl.lit("loader").alias("category"))
    marks = pl.concat([trace.marks.drop("id"), waits.select(trace.marks.drop("id").columns)])
    return msgspec.structs.replace(trace, marks=order_table("marks", marks))


def _find_in_next(done: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Return the stretches (_WAITS) from one moment in a `__next__` or a decoder to the next, without CUDA calls between."""
    told = done.filter(pl.col("name").str.contains(f" (?:{IN_NEXT}|{DECODING})$")).sort("thread", "start_ns")
    # the row of the first call on the same thread at or after each moment
    asked = told.select("thread", "start_ns").with_row_index("asked").sort("start_ns")
    known = calls.with_row_index("call").select("thread", "call", "start_ns").sort("start_ns")
    joined = asked.join_asof(known, on="start_ns", by="thread", strategy="forward", check_sortedness=False)
    following = joined.sort("asked")["call"].cast(pl.Int64).fill_null(-1)
    before = pl.col("end_ns").cum_max().shift(1).over("thread")
    apart = (pl.col("following") != pl.col("following").shift(1)) | (pl.col("start_ns") - before > BRIDGE_NS) | before.is_null()
    told = told.with_columns(following=following).with_columns(wait=apart.fill_null(True).cum_sum())
    length = pl.col("end_ns") - pl.col("start_ns")
    waits = told.group_by("wait", maintain_order=True).agg(
        pl.col("thread").first(), pl.col("name").sort_by(length).last(), pl.col("start_ns").min(), pl.col("end_ns").max(), held=length.max()
    )
    at_work = pl.format("at work {}", pl.col("name").str.extract(f"({IN_NEXT}|{DECODING})$"))
    name = pl.when(2 * pl.col("held") >= length).then("name").otherwise(at_work).alias("name")
    return waits.filter(length > 0).select("thread", name, "start_ns", "end_ns")


def _find_rounds(trace: Trace) -> pl.DataFrame:
    """Return (thread, before, start_ns, end_ns) of the passes of each loop, in order, and what is said of the time before each.

    The ranges around a pass, and from the begin of each forward pass to the end of what follows of the same step.
    """
    marks = trace.marks.filter(pl.col("category") == "annotation").drop_nulls("thread").sort("start_ns").with_columns(decode_column("name"))
    said = pl.format("between two ranges '{}'", pl.col("name").str.replace_all(r"\d+", "N").str.slice(0, 60))
    found = [marks.filter(pl.col("name").str.contains(_ROUND)).select("thread", "start_ns", "end_ns", before=said)]
    for _, own in marks.group_by("thread", maintain_order=True):
        forward, backward, update = (
            own.filter(pl.col("name").str.contains(words)) for words in (FORWARD_WORDS, BACKWARD_WORDS, OPTIMIZER_WORDS)
        )
        if min(forward.height, backward.height) < MIN_RANGES:
            continue
        phases = pl.concat([forward, backward, update]).sort("start_ns")
        in_forward = pl.col("name").str.contains(FORWARD_WORDS)
        begun = in_forward & ~in_forward.shift(1).fill_null(False)
        rounds = phases.with_columns(step=begun.cum_sum()).filter(pl.col("step") > 0).group_by("step", maintain_order=True)
        whole = rounds.agg(pl.col("thread", "name").first(), pl.col("start_ns").min(), pl.col("end_ns").max())
        found.append(
            whole.select("thread", "start_ns", "end_ns", before=pl.format("before the range '{}'", pl.col("name").str.slice(0, 60)))
        )
    return pl.concat(found)


def _find_pauses_of_loop(trace: Trace, done: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Return the longest stretch (_WAITS) without CUDA calls between each two passes of a loop, less sleeps and writes."""
    found = [_NONE]
    for (thread, before), ranges in _find_rounds(trace).group_by("thread", "before", maintain_order=True):
        own = calls.filter(pl.col("thread") == thread)
        start, end = ranges["start_ns"].to_numpy(), ranges["end_ns"].to_numpy()
        if len(start) < MIN_RANGES or (start[1:] < end[:-1]).any():
            continue
        within = own.filter((pl.col("start_ns") >= start[0]) & (pl.col("start_ns") < end[-1]))
        held = intervals.measure_covered(
            ranges.select("start_ns", "end_ns").to_numpy(), *(within["start_ns"].to_numpy() + by for by in (0, 1))
        )
        if not within.height or (held > 0).mean() < MIN_HELD:
            continue
        others = done.filter((pl.col("thread") == thread) & pl.col("name").str.contains(_NO_BATCH))
        known = (own, others, trace.ops.filter(pl.col("thread") == thread))
        taken = intervals.merge_spans(np.concatenate([intervals.build_spans(frame) for frame in known]))
        free = intervals.subtract_spans(np.stack((end[:-1], start[1:]), axis=1), taken)
        pauses = pl.DataFrame({"start_ns": free[:, 0], "end_ns": free[:, 1], "after": np.searchsorted(end, free[:, 0], side="right")})
        pauses = pauses.with_columns(length=pl.col("end_ns") - pl.col("start_ns")).filter(pl.col("length") >= LEAST_NS)
        pauses = pauses.sort("length").unique("after", keep="last", maintain_order=True)
        name = pl.lit(before).alias("name")
        found.append(pauses.select(pl.lit(thread, dtype=pl.Int64).alias("thread"), name, "start_ns", "end_ns"))
    return pl.concat(found)


def _find_timed_waits(done: pl.DataFrame, calls: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Return the timed waits (_WAITS) during which no thread calls CUDA, where they recur in most steps."""
    length = pl.col("end_ns") - pl.col("start_ns")
    waits = done.filter(pl.col("name").str.contains(_TIMED_WAIT) & (length >= LEAST_NS)).sort("start_ns")
    starts = np.sort(calls["start_ns"].to_numpy())
    first, last = (np.searchsorted(starts, waits[column].to_numpy()) for column in ("start_ns", "end_ns"))
    inside = intervals.measure_covered(intervals.build_spans(calls), *(waits["start_ns"].to_numpy() + by for by in (0, 1)))
    waits = waits.filter(pl.Series((last == first) & (inside == 0), dtype=pl.Boolean))
    step = assign_steps(steps, waits["end_ns"].to_numpy())
    if step.n_unique() - step.has_nulls() < max(MIN_RANGES, MIN_STEP_SHARE * steps.height):
        return _NONE
    name = pl.format("{}: a timed wait for another thread or process in most steps", "name").alias("name")
    return waits.filter(pl.Series(step.is_not_null())).select("thread", name, "start_ns", "end_ns")
