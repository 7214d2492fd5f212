"""What the host threads did that keeps a device waiting: events with a cause, its evidence and call site; batches made by the user's own
code."""

from __future__ import annotations

import numpy as np
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.attribution.autograd import find_autograd_nodes
from gpudiag.attribution.call_sites import CALLS_PROGRAM, LIBRARY_PATH, Frames, find_frame_threads
from gpudiag.attribution.cuda_graphs import find_captures
from gpudiag.attribution.names import decode_column, decode_names, mask_names, match_column
from gpudiag.attribution.nesting import find_nearest
from gpudiag.model.bundle import IN_ANOTHER_THREAD
from gpudiag.model.notices import NoticeCode
from gpudiag.model.trace import Trace
from gpudiag.timeline import host_threads
from gpudiag.timeline.host_threads import find_main_thread, format_frame
from gpudiag.trace import kernel_names

MIN_STEPS = 3
"""Fewer steps than this show no habit of the loop."""

MIN_STEP_SHARE = 0.5
"""Share of the steps that have to begin with it."""

_NEXT = r"\(\d+\): __next__$"
# The profiler writes the return of a function and the yield of a generator alike, so the name has to say that it makes batches.
_LOADER_WORDS = (
    r"(?i)\(\d+\): (?:\w*(?:loader|batch|dataset|prefetch|fetch|sample|stream|examples|data_?(?:iter|gen|source))\w*"
    r"|(?:get|next|load|read|make|gen)_?(?:data|inputs?|examples?)\w*|__getitem__)$"
)


def find_user_loaders(trace: Trace, frames: Frames) -> pl.DataFrame:
    """Return (thread, start_ns, end_ns, cause, evidence, site) of the calls in which the user's code makes a batch.

    A call counts that the frame of the training loop makes directly (packages in between aside) in most steps, and in which nothing trains:
    of `__next__`, or of a function that is named for it and entered once a step before the forward pass.
    """
    main = find_main_thread(trace)
    own = (frames.table["thread"] == main).fill_null(False).to_numpy()
    # When a step begins: at the profiler's marks, else where an optimizer's step ended
    name = decode_column("name")
    marks = trace.marks.filter((pl.col("thread") == main) & (pl.col("category") == "annotation"))
    stepped = marks.filter(name.str.contains(kernel_names.STEP_MARK))["start_ns"]
    if len(stepped) < MIN_STEPS:
        stepped = marks.filter(name.str.contains(kernel_names.OPTIMIZER_MARK) & name.str.contains(r"\.step#"))["end_ns"]
    moments = np.unique(stepped.to_numpy())
    if len(moments) < MIN_STEPS or not mask_names(frames.table["name"], f"{_NEXT}|{_LOADER_WORDS}")[own].any():
        return pl.DataFrame(schema=EVENT_SCHEMA)
    # The user's frames below the loop, which is the user's innermost frame around most moments
    functions = (frames.user == np.arange(len(own), dtype=frames.user.dtype)) & ~frames.of_calls
    mine = np.flatnonzero(own & functions)
    start, end = (frames.table[column].to_numpy()[mine] for column in ("start_ns", "end_ns"))
    loops = mine[np.searchsorted(moments, end) - np.searchsorted(moments, start) > MIN_STEP_SHARE * len(moments)]
    above = np.append(find_nearest(frames.nesting.parent, functions), -1)[frames.nesting.parent[mine]]
    called = frames.table[mine[above == loops[-1]] if len(loops) else loops]
    # Without those that hold part of a backward pass or an update
    node = pl.Series(find_autograd_nodes(trace.ops), dtype=pl.Boolean)
    optimizer = trace.marks.filter(match_column("name", kernel_names.OPTIMIZER_MARK))["start_ns"]
    training = np.sort(pl.concat([trace.ops["start_ns"].filter(node), optimizer]).to_numpy())
    first, last = (np.searchsorted(training, called[column].to_numpy()) for column in ("start_ns", "end_ns"))
    calls = called.filter(pl.Series(last <= first))
    # early: no op lies between the beginning of the step and the call that a backward pass belongs to
    numbers = trace.ops["sequence"].filter(node).drop_nulls().unique()
    forward = trace.ops.select("start_ns", "sequence").filter(~node & pl.col("sequence").is_in(numbers.implode()))["start_ns"]
    begin = calls["start_ns"].to_numpy()
    step = np.searchsorted(moments, begin, side="right") - 1
    ordered = np.sort(forward.to_numpy())
    early = np.searchsorted(ordered, begin) <= np.searchsorted(ordered, moments[np.maximum(step, 0)])
    calls = calls.with_columns(step=pl.Series(step), early=pl.Series(early)).filter(pl.col("step") >= 0)
    each = {"steps": pl.col("step").n_unique().over("name"), "calls": pl.len().over("name"), "first": pl.col("early").sum().over("name")}
    found = calls.with_columns(**each).filter(pl.col("steps") >= MIN_STEP_SHARE * len(moments))
    once = (pl.col("calls") == pl.col("steps")) & (pl.col("first") == pl.col("calls"))
    found = found.filter(match_column("name", _NEXT) | (match_column("name", _LOADER_WORDS) & once))
    named = found.select("thread", "start_ns", "end_ns", text=decode_column("name"))
    return named.with_columns(cause=pl.lit("idle_data"), evidence=format_frame("text")).drop("text")


EVENT_CAUSES = ("idle_profiler", "idle_gc", "idle_compile", "idle_init", "idle_data", "idle_sync", "idle_io", "idle_allocation")
"""Causes that an event shows, most specific first. A collection inside a loader call is gc, a file that a loader reads is data, and what is
read from a socket is waited for."""

LOADING_NS = 100_000
"""The first launch of a kernel that takes this long, and LOADING_FACTOR times the median launch, loads the kernel's code: launches cost
some microseconds, lazy loading (CUDA_MODULE_LOADING=LAZY, CUDA C++ Programming Guide) from tenths of a millisecond up."""

LOADING_FACTOR = 10

INIT_NS, FIRST_CALL_NS = 1_000_000, 50_000_000
"""A call that asks for the device or a stream takes some microseconds; this long, it sets up the device or a library for it. The first call
of a program sets up the driver whatever it asks for, which takes from a tenth of a second up."""

CODED = ("evidence_code", "evidence_name", "evidence_detail")
"""Columns of evidence that gpudiag words itself: code of a notice and its parameters."""

EVENT_SCHEMA = {
    "thread": pl.Int64(), "start_ns": pl.Int64(), "end_ns": pl.Int64(), "cause": pl.String(), "evidence": pl.String(), "site": pl.String(),
    **dict.fromkeys(CODED, pl.String()),
}  # fmt: skip

_ALL_COMPILING = "dynamo"
"""The phase around all others of torch.compile (torch/_dynamo/convert_frame.py)."""

_LOADED = ("thread", "start_ns", "end_ns", "cause")

_MARK_KINDS = {"gc": "idle_gc", "save": "idle_io", "file_write": "idle_io", "loader": "idle_data"}

_HOST_WORDS = {
    "gc": pl.format("garbage collection ({})", "name"),
    "save": pl.col("name"),
    "file_write": pl.format("{} opened for writing", "name"),
    "loader": pl.lit("waiting for the next batch"),
}


def find_host_events(trace: Trace, frames: Frames, host_marks: pl.DataFrame | None, *, on_cpu: bool) -> pl.DataFrame:
    """Return the events (thread, start_ns, end_ns, cause, evidence, site); thread null: every thread stood still.

    `frames`: those of the trace on the threads of the ops; `host_marks`: those of the bundle. `on_cpu`: waiting for other threads counts.
    """
    patterns = host_threads.FRAME_PATTERNS | ({"idle_sync": host_threads.WAIT_FRAME_PATTERN} if on_cpu else {})
    found = [
        _find_named_events(frames.table, "name", patterns),
        _find_named_events(trace.marks.filter(pl.col("category") == "annotation"), "name", host_threads.MARK_PATTERNS),
        _find_named_events(trace.ops, "name", host_threads.MARK_PATTERNS),
        _find_named_events(trace.marks.filter(pl.col("category") == "loader"), "name", {"idle_data": ""}),
        _find_named_events(find_own_calls(trace), "name", host_threads.OS_PATTERNS),
        find_user_loaders(trace, frames),
    ]
    # Calls that load code or take memory, and the profiler's own overhead records. One on a thread that issues nothing did not stop those
    # that do: it is left out
    calls = _find_named_events(trace.launches, "api", host_threads.CALL_PATTERNS)
    issuing = pl.concat([trace.ops["thread"], trace.launches["thread"]]).drop_nulls().unique()
    overheads = _find_named_events(trace.marks.filter(pl.col("category") == "overhead"), "name", host_threads.OVERHEAD_PATTERNS)
    overheads = overheads.filter(pl.col("thread").is_null() | pl.col("thread").is_in(issuing.implode()))
    done = pl.when(pl.col("evidence").str.contains(r"(?i)compiler|Link")).then(pl.lit("compiled")).otherwise(pl.lit("loaded"))
    words = pl.when(pl.col("cause") == "idle_compile").then(pl.format("kernel code was {} ({})", done, "evidence")).otherwise("evidence")
    # The first use of the device, before anything runs on it
    took = pl.col("end_ns") - pl.col("start_ns")
    first_call = (pl.col("start_ns") == pl.col("start_ns").min()) & (took >= FIRST_CALL_NS)
    first_call &= pl.col("end_ns") <= pl.lit(trace.kernels["start_ns"].min(), dtype=pl.Int64)
    setting_up = trace.launches.filter((match_column("api", host_threads.INIT_CALL) & (took >= INIT_NS)) | first_call)
    # A free of nothing sets up the device or a library (CUDA C++ Programming Guide, Initialization); one of memory waits for what runs
    freed = trace.launches.filter(match_column("api", host_threads.FREE_CALL) & (took >= FIRST_CALL_NS))
    busy = intervals.merge_spans(intervals.build_spans(trace.kernels if freed.height else trace.kernels.clear()))
    ran = intervals.measure_covered(busy, freed["start_ns"].to_numpy(), freed["end_ns"].to_numpy())
    setting_up = pl.concat([setting_up, freed.filter(pl.Series(ran == 0, dtype=pl.Boolean))]).unique("id", maintain_order=True)
    setting_up = setting_up.filter(~match_column("api", kernel_names.KERNEL_LAUNCH) & ~match_column("api", kernel_names.SYNC_CALL))
    setting_up = setting_up.select("thread", "start_ns", "end_ns", cause=pl.lit("idle_init"), evidence=decode_column("api"))
    found += [
        setting_up,
        _find_library_loads(trace),
        pl.DataFrame(find_captures(trace), {"start_ns": pl.Int64, "end_ns": pl.Int64, "thread": pl.Int64}, orient="row").with_columns(
            cause=pl.lit("idle_compile"), evidence=pl.lit("a graph was captured")
        ),
        calls.with_columns(evidence=words),
        overheads.with_columns(evidence=words),
    ]
    found.append(_find_first_launches(trace, pl.concat([calls.select(_LOADED), overheads.select(_LOADED)])))
    found.append(_read_bundle_marks(trace, host_marks))
    events = pl.concat(
        [
            frame.with_columns(pl.lit(None, dtype=pl.String).alias(name) for name in ("site", *CODED) if name not in frame.columns)
            .select(list(EVENT_SCHEMA))
            .cast(EVENT_SCHEMA)  # type: ignore[arg-type]
            for frame in found
        ]
    )
    return events.filter(pl.col("end_ns") > pl.col("start_ns"))


LONG_PAUSE_NS = 1_000_000
"""Time without an issue that no dispatch explains: that of 50 to 200 ops, of 5 to 20 us each (Holistic Trace Analysis)."""

LOOP_PAUSE_NS = 100_000
"""Pause in the loop's own code from which on one op's dispatch does not explain it: that of 5 to 20 ops, of 5 to 20 us each (Holistic Trace
Analysis)."""


def find_own_frames(trace: Trace) -> Frames:
    """Return the frames of `trace` on the thread whose ops they run (some schemas write tid 0 for frames), sorted for nesting."""
    threads = trace.ops["thread"].drop_nulls().to_numpy()
    if not trace.frames.height or not len(threads):
        return Frames(trace.frames)
    main = int(np.bincount(threads[threads >= 0]).argmax())
    target = int(find_frame_threads(trace, np.append(threads, main))[-1])
    if target == main:
        return Frames(trace.frames)
    moved = trace.frames.with_columns(pl.col("thread").replace({target: main}))
    return Frames(moved.sort("thread", "start_ns", pl.col("end_ns"), descending=[False, False, True], maintain_order=True))


def find_first_caller(trace: Trace, pattern: str) -> pl.Series:
    """Find the program's line that first calls a frame whose name matches `pattern`: the same for each op, null where none does."""
    frames = find_own_frames(trace)
    callers = frames.user[mask_names(frames.table["name"], pattern)]
    line = decode_names(frames.table["name"].gather(callers[callers >= 0][:1]))
    return pl.repeat(line.first(), trace.ops.height, dtype=pl.String, eager=True)


def find_collator_line(trace: Trace) -> pl.Series:
    """Find the line with most time of what a DataLoader of torch calls to make a batch of its rows, where that is a package's: the same for
    each op, null where none is."""
    frames = find_own_frames(trace)
    table = frames.table.select(
        "name", took=pl.col("end_ns") - pl.col("start_ns"), parent=pl.Series(frames.nesting.parent)
    ).with_row_index()
    fetching = np.flatnonzero(mask_names(frames.table["name"], r"torch/utils/data/_utils/fetch\.py\(\d+\): fetch$"))
    called = table.filter(pl.col("parent").is_in(fetching)).group_by("parent", maintain_order=True).last()  # after the rows
    called = called.filter(match_column("name", LIBRARY_PATH.pattern))
    lines = table.filter(pl.col("parent").is_in(called["index"].implode())).select(decode_column("name"), "took")
    function = pl.col("name").str.replace(r"\(\d+\): ", ": ")
    lines = lines.filter(function.is_in(called.select(decode_column("name")).select(function).to_series().implode()))
    line = lines.group_by("name").agg(pl.col("took").sum()).sort("took", "name")["name"]
    return pl.repeat(line.last() if len(line) else None, trace.ops.height, dtype=pl.String, eager=True)


def find_own_calls(trace: Trace) -> pl.DataFrame:
    """Return the calls of the operating system (marks) that the program made itself: not within a call of CUDA."""
    calls = trace.marks.filter(pl.col("category") == "os")
    inside = np.zeros(calls.height, dtype=bool)
    for (thread,), rows in calls.with_row_index("row").drop_nulls("thread").group_by("thread"):
        cuda = intervals.build_spans(trace.launches.filter(pl.col("thread") == thread))
        start = rows["start_ns"].to_numpy()
        inside[rows["row"].to_numpy()] = intervals.measure_covered(cuda, start, start + 1) > 0
    return calls.filter(pl.Series(~inside))


def _find_named_events(frame: pl.DataFrame, column: str, patterns: dict[str, str]) -> pl.DataFrame:
    """Return the rows whose name a pattern matches, with the first such cause; each distinct name is matched once."""
    if frame.is_empty():  # compiling the patterns takes longer than all else
        return frame.with_columns(pl.lit(None, dtype=pl.String).alias(name) for name in ("cause", "evidence"))
    names = frame.select(column).unique().with_columns(text=pl.col(column).cast(pl.String))
    names = names.filter(~pl.col("text").str.contains(CALLS_PROGRAM))
    cause = pl.coalesce([pl.when(pl.col("text").str.contains(pattern)).then(pl.lit(word)) for word, pattern in patterns.items()])
    evidence = pl.when(pl.col("text") == _ALL_COMPILING).then(pl.lit("torch.compile at work")).otherwise(format_frame("text"))
    known = names.with_columns(cause.alias("cause"), evidence=evidence).drop_nulls("cause").drop("text")
    return frame.join(known, on=column, how="inner")


def _find_library_loads(trace: Trace) -> pl.DataFrame:
    """Return the calls with which a library finds the driver and loads its code, each until the next, where nothing is issued between.

    cuBLAS and cuDNN bring a CUDA runtime of their own, which makes these calls at its first use (CUDA Driver API, cuGetProcAddress).
    """
    issued = pl.col("id").is_in(trace.kernels["launch"].drop_nulls().unique().implode())
    calls = trace.launches.with_columns(loading=match_column("api", host_threads.LIBRARY_CALL))
    calls = calls.filter(issued | pl.col("loading")) if calls["loading"].any() else calls.clear()
    after = {"next_ns": pl.col("start_ns").shift(-1), "also": pl.col("loading").shift(-1)}
    calls = calls.sort("start_ns").with_columns(column.over("thread").alias(name) for name, column in after.items())
    pauses = calls.filter("loading", "also", pl.col("next_ns") - pl.col("end_ns") < FIRST_CALL_NS)
    return pauses.select("thread", "start_ns", end_ns="next_ns", cause=pl.lit("idle_init"), evidence=decode_column("api"))


def _find_first_launches(trace: Trace, loads: pl.DataFrame) -> pl.DataFrame:
    """Return the first launches of kernels that took far longer than others: the driver loads a kernel's code at its first use.

    Where one of `loads` lies within the call it shows that; else the evidence says how long the call took.
    """
    calls = trace.launches.filter(match_column("api", kernel_names.KERNEL_LAUNCH))
    duration = pl.col("end_ns") - pl.col("start_ns")
    usual = calls.select(duration.median()).item() or 0
    slow = calls.filter(duration > max(LOADING_NS, LOADING_FACTOR * usual)).select("id", "thread", "start_ns", "end_ns")
    kernels = trace.kernels.select("name", "launch", "kind").filter(pl.col("kind") == "kernel").drop_nulls("launch")
    kernels = kernels.select("name", "launch")
    named = kernels.join(slow, left_on="launch", right_on="id", how="semi")["name"].unique()
    first = kernels.filter(pl.col("name").is_in(named.implode())).sort("launch").unique("name", keep="first", maintain_order=True)
    found = slow.join(first, left_on="id", right_on="launch", how="inner").unique("id", keep="first", maintain_order=True)
    shown = loads.filter(pl.col("cause") == "idle_compile").select("thread", load_ns="start_ns").drop_nulls().sort("load_ns")
    found = found.sort("start_ns").join_asof(
        shown, left_on="start_ns", right_on="load_ns", by="thread", strategy="forward", check_sortedness=False
    )
    name = decode_column("name").str.slice(0, 60)
    loaded = pl.col("load_ns") < pl.col("end_ns")
    took = pl.format("first launch of {}: the call itself took {} (the first use of a kernel loads its code)", name, format_ms())
    return found.with_columns(
        cause=pl.lit("idle_compile"),
        evidence=pl.when(loaded).then(pl.format("first launch of {}: its code was loaded", name)).otherwise(took),
        evidence_code=pl.when(loaded)
        .then(pl.lit(NoticeCode.FIRST_LAUNCH_LOADED.value))
        .otherwise(pl.lit(NoticeCode.FIRST_LAUNCH_SLOW.value)),
        evidence_name=name,
        evidence_detail=pl.when(~loaded.fill_null(False)).then(format_ms()),
    )


def format_ms() -> pl.Expr:
    """Return the length of each row such as '19 ms' or '0.4 ms'."""
    length = (pl.col("end_ns") - pl.col("start_ns")) / 1e6
    return pl.format(
        "{} ms", pl.when(length >= 10).then(length.round(0).cast(pl.Int64).cast(pl.String)).otherwise(length.round(1).cast(pl.String))
    )


SLOWEST_WRITE = 5e6
"""Bytes a second that a program writes at least: numbers as text, one by one (heuristic: numpy.savetxt makes 10 to 20 MB/s)."""

OPENING_NS = 2_000_000
"""Time that opening and closing a file takes at most (heuristic: that of a file on a network)."""


def bound_writes(marks: pl.DataFrame | None, records: pl.DataFrame | None) -> pl.DataFrame | None:
    """Return host marks with the column most_ns: what writing a file takes at most by the bytes that its step wrote, where these are not
    known (profiled steps) by the most that any step wrote to one; null: none is known."""
    if marks is None or records is None:
        return marks
    opened = pl.col("kind") == "file_write"
    written = marks.join(records.select("step", "written_bytes").unique("step"), on="step", how="left", maintain_order="left")
    each = pl.col("written_bytes") / opened.sum().over("step")
    return written.with_columns(
        most_ns=pl.when(opened).then(each.fill_null(each.filter(opened).max()) / SLOWEST_WRITE * 1e9 + OPENING_NS).cast(pl.Int64)
    ).drop("written_bytes")


def _read_bundle_marks(trace: Trace, marks: pl.DataFrame | None) -> pl.DataFrame:
    """Return the host marks of a bundle in the trace's time. Of an opened file only the start is known: until the next recorded event, but
    no longer than what it wrote can have taken."""
    if marks is None or trace.meta.unix_base_ns is None:
        return pl.DataFrame(schema=EVENT_SCHEMA)
    start = pl.col("start_unix_ns") - trace.meta.unix_base_ns
    main = find_main_thread(trace)
    elsewhere = pl.col("name").str.ends_with(IN_ANOTHER_THREAD).fill_null(False)
    limit = pl.col("most_ns") if "most_ns" in marks.columns else pl.lit(None, dtype=pl.Int64)
    known = marks.filter(pl.col("kind").is_in(list(_MARK_KINDS)) & ~elsewhere).select(
        pl.when(pl.col("kind") == "gc").then(None).otherwise(pl.lit(main)).alias("thread"),  # a collection holds the interpreter's lock
        start.alias("start_ns"),
        pl.when(pl.col("duration_ns") > 0).then(start + pl.col("duration_ns")).alias("end_ns"),
        pl.col("kind").replace_strict(_MARK_KINDS, default=None, return_dtype=pl.String).alias("cause"),
        pl.coalesce([pl.when(pl.col("kind") == kind).then(words) for kind, words in _HOST_WORDS.items()]).alias("evidence"),
        pl.col("site").str.replace(r"^(.*):(\d+)$", "${1}(${2})"),
        latest=start + limit,
    )
    begins = np.sort(pl.concat([frame.filter(pl.col("thread") == main)["start_ns"] for frame in (trace.ops, trace.launches)]).to_numpy())
    following = np.append(begins, np.iinfo(np.int64).max)[np.searchsorted(begins, known["start_ns"].to_numpy(), side="right")]
    until = pl.Series("until", np.where(following == np.iinfo(np.int64).max, known["start_ns"].to_numpy(), following))
    return known.with_columns(pl.col("end_ns").fill_null(pl.min_horizontal(until, "latest"))).drop("latest")
