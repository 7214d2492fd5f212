"""The device of a run: which one is analysed, its clock against the host's, its pace, its gaps, and the CPU where it is the device."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import polars as pl

from gpudiag.arrays import Ints
from gpudiag.attribution import intervals
from gpudiag.attribution.intervals import Spans
from gpudiag.attribution.names import decode_names, mask_names, match_column, match_names
from gpudiag.attribution.nesting import Nesting, find_self_spans, measure_self_ns
from gpudiag.model import trace
from gpudiag.model.notices import Notice, NoticeCode, make_notice
from gpudiag.model.trace import Trace
from gpudiag.trace.kernel_names import COMPILE_MARK, choose_first

RunKind = Literal["gpu", "gpu without events", "cpu", "cpu without ops"]


def classify_run(trace: Trace) -> RunKind:
    """Return what the trace is of; 'gpu without events': a GPU was used or present, nothing of it was recorded."""
    if trace.kernels.height:
        return "gpu"
    if trace.launches.height or trace.meta.devices or (trace.allocations["device_kind"] == "gpu").any():
        return "gpu without events"
    return "cpu" if trace.ops.height else "cpu without ops"


def find_busiest_device(kernels: pl.DataFrame) -> tuple[int | None, tuple[int, ...]]:
    """Return the device with the most summed work, and the others."""
    sums = kernels.group_by("device").agg(time=(pl.col("end_ns") - pl.col("start_ns")).sum()).drop_nulls("device")
    order = sums.sort("time", "device", descending=[True, False])["device"].to_list()
    return (order[0], tuple(order[1:])) if order else (None, ())


CLOCK_NOISE_NS = 5_000
"""Files of whole microseconds and the conversion between the clocks let work seem to start this much before its launch. In none of 25
real recordings did it: there the least time between the two is 4 us."""

LATE_NOISE_NS = 20_000
"""Work may seem to end this much after a call that waited for it: up to 9 us in a recording of an MI300X whose clocks agree."""

FEW_EARLY_SHARE = 0.01
"""Up to this share of the launched work may start too early without a word: broken records, not a clock."""

EDGE_SHARE = 0.001
"""The clocks differ by what the earliest of a thousand starts shows: the one before it may be a broken record."""

MAX_DRIFT = 1e-3
"""Clocks that drift apart by more than a millisecond a second are no clocks (crystals: 1e-4 at most)."""

QUICK_NS, QUICK_LAUNCHES = 10_000, 10
"""So many launches that took effect within 10 us of the quickest found the device idle: their latency is that of any launch."""

_WHOLE_SYNC = r"(?i)^(cuda|hip|cu)(DeviceSynchronize|CtxSynchronize)"
_COPY_SYNC = r"(?i)^(cuda|hip)Memcpy(_v\d+)?$|^hipMemcpyWithStream$|^cuMemcpy(HtoD|DtoH)(_v\d+)?$"


def align_clocks(trace: Trace) -> tuple[Trace, tuple[Notice, ...]]:
    """Return `trace` with the times of each device moved to where they are possible, and a notice where moved; else the same `trace`.

    No work starts before the call that launches it, and none ends after a sync that waited for it returned. The clocks differ by the least
    that both ask for; where no constant does, by a straight line in time. How far it may be off is what lies between the two; where
    nothing waited, the true difference is larger by the latency of the quickest launch, and by more where every launch waited in a queue.
    """
    calls = trace.launches.filter(pl.col("correlation") > 0).unique("correlation", keep="first", maintain_order=True)
    calls = calls.select("correlation", "thread", "api", called_ns="start_ns", returned_ns="end_ns")
    work = trace.kernels.select("id", "kind", "device", "stream", "correlation", "start_ns", "end_ns").filter(pl.col("kind") != "cpu")
    linked = work.join(calls, on="correlation", how="inner")
    least = linked.select("device", at="start_ns", by=pl.col("called_ns") - pl.col("start_ns"))
    most = _find_latest_ends(trace, linked)
    moves, impossible, error_ns = {}, 0, None
    for device in linked["device"].unique().sort().to_list():
        mine = pl.col("device").eq_missing(pl.lit(device, dtype=pl.Int64))
        early, late = least.filter(mine), most.filter(mine)
        wrong = [int((early["by"] > CLOCK_NOISE_NS).sum()), int(late.filter(pl.col("by") < -LATE_NOISE_NS)["pieces"].sum())]
        if wrong[0] <= FEW_EARLY_SHARE * early.height and wrong[1] <= max(FEW_EARLY_SHARE * late.height, 1):
            continue
        moves[device], off = _fit_clock(early, late)
        impossible += sum(wrong)
        error_ns = max(off, error_ns or 0) if off is not None else error_ns
    if not moves:
        return trace, ()
    # in the order of their start, as tables are; collectives keep pointing at theirs
    by = np.zeros(trace.kernels.height, dtype=np.int64)
    devices, starts = trace.kernels["device"], trace.kernels["start_ns"].to_numpy()
    for device, (origin, shift, drift) in moves.items():
        chosen = devices.eq_missing(pl.Series([device], dtype=pl.Int64)).to_numpy()
        by[chosen] = np.rint(shift + drift * (starts[chosen] - origin)).astype(np.int64)
    kernels = trace.kernels.with_columns(pl.col("start_ns") + pl.Series(by), pl.col("end_ns") + pl.Series(by))
    kernels = kernels.sort("start_ns", maintain_order=True).rename({"id": "old"}).with_row_index("id")
    kernels = kernels.with_columns(pl.col("id").cast(pl.Int64))
    renamed = trace.collectives["kernel"].replace_strict(kernels["old"], kernels["id"], default=None, return_dtype=pl.Int64)
    collectives = trace.collectives.with_columns(renamed.alias("kernel"))
    moved = msgspec.structs.replace(trace, kernels=kernels.drop("old"), collectives=collectives)
    largest = int(np.abs(by).max())
    drift = max((drift for _, _, drift in moves.values()), key=abs)
    if drift:
        return moved, (make_notice(NoticeCode.CLOCK_DRIFT, shift_ns=largest, drift=1e6 * drift, count=impossible),)
    if error_ns is None:
        return moved, (make_notice(NoticeCode.CLOCK_SHIFTED, shift_ns=largest, early=impossible, count=linked.height),)
    return moved, (make_notice(NoticeCode.CLOCK_BOUNDED, shift_ns=largest, error_ns=error_ns, count=impossible),)


def _find_latest_ends(trace: Trace, linked: pl.DataFrame) -> pl.DataFrame:
    """Return (device, at, by, pieces): the time left from the end of work to the return of the call that waited for it, below 0 where that
    is impossible, and how many pieces of that work ended after its return.

    The calls: of the whole device (all work that was launched before; the device that its thread used last, where there are several),
    blocking copies (their stream's work), and a stream's sync that follows a copy as the next call of its thread, as reading a value does.
    """
    copies = linked.filter(pl.col("kind") == "memcpy")
    calls = trace.launches.select("thread", "api", "start_ns", "end_ns").sort("thread", "start_ns")
    text = pl.col("api").cast(pl.String)
    following = calls.with_columns(
        called_ns=pl.col("start_ns").shift(1).over("thread"), copied=text.str.contains("(?i)memcpy").shift(1).over("thread")
    ).filter(pl.col("copied") & text.str.contains("(?i)StreamSynchronize"))
    read = copies.join(following.select("thread", "called_ns", synced_ns="end_ns"), on=["thread", "called_ns"], how="inner")
    blocking = copies.filter(match_column("api", _COPY_SYNC)).with_columns(synced_ns="returned_ns")
    of_stream = pl.concat([frame.select("device", "stream", "called_ns", "synced_ns") for frame in (blocking, read)])
    whole = calls.filter(match_column("api", _WHOLE_SYNC)).select("thread", called_ns="start_ns", synced_ns="end_ns").sort("called_ns")
    used = linked.select("thread", "called_ns", "device").sort("called_ns")
    whole = whole.join_asof(used, on="called_ns", by="thread", check_sortedness=False)
    devices = linked["device"].unique()
    only = pl.lit(devices[0] if len(devices) == 1 else None, dtype=pl.Int64)
    of_device = whole.select(pl.col("device").fill_null(only), "called_ns", "synced_ns")
    # each piece of work and the first wait for it that was called after it
    work = linked.select("device", "stream", "called_ns", at="end_ns").sort("called_ns")
    found = []
    for waits, keys in ((of_stream, ["device", "stream"]), (of_device, ["device"])):
        waits = waits.sort("called_ns").with_row_index("wait")
        pairs = work.join_asof(waits, on="called_ns", by=keys, strategy="forward", check_sortedness=False).drop_nulls("wait")
        pairs = pairs.with_columns(by=pl.col("synced_ns") - pl.col("at")).sort("by")
        ends = pairs.group_by("device", "wait", maintain_order=True)
        found.append(ends.agg(pl.col("at", "by").first(), pieces=(pl.col("by") < -LATE_NOISE_NS).sum()).drop("wait"))
    return pl.concat(found)


def _fit_clock(early: pl.DataFrame, late: pl.DataFrame) -> tuple[tuple[int, float, float], int | None]:
    """Return (origin, move at the origin, drift per ns) that `early` asks for at least and `late` allows at most, and the room between.

    The room is None where nothing bounds the move from above.
    """
    times = [frame["at"].to_numpy().astype(np.float64) for frame in (early, late)]
    least, most = (frame["by"].to_numpy().astype(np.float64) for frame in (early, late))
    origin = float(times[0][0])

    def find_limits(drift: float) -> tuple[float, float]:
        """Return the least and the most that may be added at the origin where the clocks drift so."""
        low = float(np.quantile(least - drift * (times[0] - origin), 1 - EDGE_SHARE, method="nearest"))
        room = most - drift * (times[1] - origin)
        return low, float(np.quantile(room, EDGE_SHARE, method="nearest")) if len(room) else np.inf

    drift = 0.0
    low, high = find_limits(drift)
    if low - high > CLOCK_NOISE_NS:
        # the room between the limits is concave in the drift: the interval that holds its largest value is cut by thirds
        first, last = -MAX_DRIFT, MAX_DRIFT
        for _ in range(60):
            one, other = first + (last - first) / 3, last - (last - first) / 3
            rooms = [limits[1] - limits[0] for limits in (find_limits(one), find_limits(other))]
            first, last = (one, last) if rooms[0] < rooms[1] else (first, other)
        drift = (first + last) / 2
        low, high = find_limits(drift)
    quick = (least - drift * (times[0] - origin) >= low - QUICK_NS).sum() >= QUICK_LAUNCHES
    move = (low + high) / 2 if high < low else low if low > 0 or drift or quick else min(high, 0.0)
    return (int(origin), move, drift), None if np.isinf(high) else max(int(high - low), 0)


PACE_GROWTH = 0.05
"""Where the device takes this part longer for the steps' work than lies between the host's marks, its backlog grows: its pace counts."""


def follow_device(trace: Trace, steps: pl.DataFrame) -> tuple[pl.DataFrame, tuple[Notice, ...]]:
    """Return `steps` as long as the device takes for their work where the host runs ahead more and more, and a notice; else as they are.

    Where backlog grows, marks of the host lie as close as it can issue work, and a run that goes on does not keep that pace: the queue
    fills and the host waits. A step then lasts from when the device is done with all that was issued before its mark to when it is done
    with all that was issued before the next (never before the mark itself). `trace`: stage 'link', the analysed device's work alone.
    """
    chosen = steps.filter("analysed")
    calls = trace.launches.select(pl.col("id").alias("launch"), pl.col("start_ns").alias("called_ns"))
    # work without a launch record was issued by the time it began; what begins before its stream's first launched work, before all calls
    work = trace.kernels.select("stream", "launch", "start_ns", "end_ns").join(calls, on="launch", how="left")
    first_launched = pl.col("start_ns").filter(pl.col("called_ns").is_not_null()).min().over("stream")
    carried = pl.when(pl.col("start_ns") < first_launched).then(pl.lit(np.iinfo(np.int64).min))
    work = work.select(pl.coalesce("called_ns", carried, "start_ns").alias("called_ns"), "end_ns").sort("called_ns")
    if not chosen.height or not work.height:
        return steps, ()
    done = np.maximum.accumulate(work["end_ns"].to_numpy())
    issued = work["called_ns"].to_numpy()

    def find_done(moments: pl.Series) -> Ints:
        """Return when the device was done with what had been issued before each moment, at the earliest at the moment."""
        times = moments.to_numpy()
        count = np.searchsorted(issued, times)
        return np.where(count > 0, np.maximum(done[np.maximum(count, 1) - 1], times), times)

    host_ns = int(chosen["end_ns"][-1]) - int(chosen["start_ns"][0])
    device_ns = int(find_done(chosen["end_ns"])[-1] - find_done(chosen["start_ns"])[0])
    if device_ns <= (1 + PACE_GROWTH) * host_ns:
        return steps, ()
    followed = steps.with_columns(pl.Series("start_ns", find_done(steps["start_ns"])), pl.Series("end_ns", find_done(steps["end_ns"])))
    return followed, (make_notice(NoticeCode.STEPS_AT_DEVICE_PACE, host_ns=host_ns / chosen.height, device_ns=device_ns / chosen.height),)


OUTSIDE_SHARE = 0.1
"""More of the device's time than this outside the steps is said: what recurs may not be what takes the time."""


def list_outside_notices(kernels: pl.DataFrame, steps: pl.DataFrame) -> tuple[Notice, ...]:
    """Return that much of the time of the device's work belongs to none of the `steps`, by its own time and by that of its launch.

    In a first or last step that is left out, what it has more than the others: a warm-up, or work that is done once.
    """
    busy, within_steps = intervals.build_spans(kernels), intervals.build_spans(steps)
    held = intervals.measure_covered(busy, steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy())
    analysed = steps["analysed"].to_numpy()
    usual = float(held[analysed].mean()) if analysed.any() else 0.0
    launched = intervals.build_spans(kernels.filter(pl.col("step").is_not_null()))
    carried = intervals.measure_spans(launched) - intervals.measure_overlap(launched, within_steps)
    within = float(np.where(analysed, held, np.minimum(held, usual)).sum()) + carried
    total = intervals.measure_spans(busy)
    share = 1 - within / total if total else 0.0
    much = share > OUTSIDE_SHARE + (usual / total if total else 0.0)  # a step that the recording cuts off lies outside, too
    return (make_notice(NoticeCode.DEVICE_TIME_OUTSIDE, share=share),) if much else ()


# The calls of torch.distributed and their work on the CPU back ends (gloo, MPI, UCC, oneCCL), as the profiler names them.
_COLLECTIVE = r"^(gloo|mpi|ucc|nccl|ccl|xccl):|^c10d::|^_?c10d_functional::|^record_param_comms$"


# Work of a back end of its own, on the threads of the back end.
_BACKEND = r"^(gloo|mpi|ucc|ccl|xccl):"


def build_cpu_kernels(ops: pl.DataFrame, marks: pl.DataFrame, nesting: Nesting) -> pl.DataFrame:
    """Return the kernels table (stage 'link') of a CPU-only run.

    Work of the device are ops on threads that run aten ops, and the back ends' messages wherever they run: a thread that waits in an
    unknown call would make the device look busy; one that sends gradients is why the training thread waits. What is done to compile code
    is none.
    """
    busy, name = measure_self_ns(nesting), decode_names(ops["name"])
    aten, sends = name.str.starts_with("aten::").to_numpy(), name.str.contains(_BACKEND).to_numpy()
    working = np.isin(nesting.thread, np.unique(nesting.thread[aten])) | sends
    # torch.compile, an op or (in some versions) an annotation, and what lies within: tracing and autotuning run ops that train nothing
    columns = ("thread", "start_ns", "end_ns")
    ranges = pl.concat([frame.filter(pl.Series(mask_names(frame["name"], COMPILE_MARK))).select(columns) for frame in (ops, marks)])
    for (thread,), spans in ranges.drop_nulls("thread").group_by("thread"):
        first, last = np.searchsorted(nesting.thread, [thread, thread + 1])
        within = np.searchsorted(intervals.build_spans(spans).reshape(-1), nesting.start_ns[first:last], side="right")
        working[first:last] &= within % 2 == 0
    chosen = np.flatnonzero((busy > 0) & working)
    rows = ops[chosen]
    order = np.argsort(rows["start_ns"].to_numpy(), kind="stable")
    rows, busy = rows[order], busy[chosen][order]
    known = {
        "name": rows["name"],
        "kind": pl.repeat("cpu", rows.height, eager=True),
        "start_ns": rows["start_ns"],
        "end_ns": rows["end_ns"],
        "busy_ns": pl.Series(busy),
        "op": rows["id"],
        "step": rows["step"],
        "collective": match_names(rows["name"], _COLLECTIVE),
        "replay": pl.repeat(False, rows.height, eager=True, dtype=pl.Boolean),
        "mapped": pl.repeat(False, rows.height, eager=True, dtype=pl.Boolean),
        "id": pl.int_range(rows.height, eager=True),
    }
    return pl.DataFrame(
        [
            known[name].cast(dtype).alias(name) if name in known else pl.repeat(None, rows.height, eager=True, dtype=dtype).alias(name)
            for name, dtype in trace.build_table_schema("kernels", "link").items()
        ]
    )


def find_cpu_spans(ops: pl.DataFrame, kernels: pl.DataFrame, nesting: Nesting) -> tuple[np.ndarray, Spans]:
    """Return (kernel rows, spans): the pieces of time in which each kernels row was the innermost op of its thread."""
    rows, spans = find_self_spans(nesting)
    kernel_of_op = np.full(ops.height, -1, dtype=np.int64)
    kernel_of_op[kernels["op"].to_numpy()] = kernels["id"].to_numpy()
    kernel = kernel_of_op[rows]
    return kernel[kernel >= 0], spans[kernel >= 0]


def _find_idle(window: Spans, busy: Spans) -> pl.DataFrame:
    idle = intervals.subtract_spans(np.array([[window[0, 0], window[-1, 1]]], dtype=np.int64), busy)
    frame = pl.DataFrame({"start_ns": idle[:, 0], "end_ns": idle[:, 1]}, schema={"start_ns": pl.Int64, "end_ns": pl.Int64})
    return frame.with_row_index("id").with_columns(pl.col("id").cast(pl.Int64))


def find_gaps(kernels: pl.DataFrame, launches: pl.DataFrame, window: intervals.Spans) -> pl.DataFrame:
    """Return the gaps of the device whose work is `kernels`, within the extent of `window`.

    kind: host_wait (the call that launched the next work began after the device had fallen idle), queued (it had been issued
    before), unlinked (the next work has no launch record), edge (nothing follows within the window).
    """
    if not len(window):
        return trace.build_empty_table("gaps")
    frame = _find_idle(window, intervals.build_spans(kernels))
    # work without length ends no gap; what begins with the end of the window lies outside it
    working = (pl.col("end_ns") > pl.col("start_ns")) & (pl.col("start_ns") < int(window[-1, 1]))
    first = (
        kernels.select("start_ns", "end_ns", "id", "launch", "op")
        .filter(working)
        .sort("start_ns", "id")
        .unique("start_ns", keep="first", maintain_order=True)
    )
    first = first.select(pl.col("start_ns").alias("end_ns"), pl.col("id").alias("kernel"), "launch", "op")
    calls = launches.select(pl.col("id").alias("launch"), pl.col("start_ns").alias("launched_ns"))
    frame = frame.join(first, on="end_ns", how="left", maintain_order="left").join(calls, on="launch", how="left", maintain_order="left")
    issued_later = pl.col("launched_ns") > pl.col("start_ns")
    chain = ((pl.col("kernel").is_null(), "edge"), (pl.col("launched_ns").is_null(), "unlinked"), (issued_later, "host_wait"))
    return frame.with_columns(kind=choose_first(chain, "queued")).select(list(trace.build_table_schema("gaps")))


def find_cpu_gaps(spans: intervals.Spans, window: intervals.Spans) -> pl.DataFrame:
    """Return the gaps of a CPU-only run: time of the window in which no thread ran an op (`spans`: when they did)."""
    if not len(window):
        return trace.build_empty_table("gaps")
    nothing = [pl.lit(None, dtype=pl.Int64).alias(name) for name in ("kernel", "op", "launch")]
    frame = _find_idle(window, intervals.merge_spans(spans)).with_columns(*nothing, kind=pl.lit("host_wait"))
    return frame.select(list(trace.build_table_schema("gaps")))
