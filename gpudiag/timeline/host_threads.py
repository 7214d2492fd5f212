"""The host threads: which issue the device's work, when each was active, and what names of frames, marks and calls say about a wait.

Frames are 'file.py(line): function' or '<built-in ...>' (torch/csrc/autograd/profiler_python.cpp).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from functools import cached_property

import numpy as np
import polars as pl

from gpudiag.arrays import Ints
from gpudiag.attribution import intervals
from gpudiag.attribution.autograd import find_autograd_nodes
from gpudiag.attribution.call_sites import DEMO, RECORDER, Frames
from gpudiag.attribution.intervals import fill_pauses, find_most_held
from gpudiag.attribution.names import decode_column, mask_names, match_column
from gpudiag.attribution.nesting import Nesting, Rows, find_self_spans, nest
from gpudiag.model.trace import Trace
from gpudiag.trace import kernel_names
from gpudiag.trace.table_store import release_memory

# Kineto's names of CUPTI's overhead records (CUpti_ActivityOverheadKind). The work of the driver and of lazy loading is the run's own.
OVERHEAD_PATTERNS: dict[str, str] = {
    "idle_compile": r"(?i)driver.?compiler|lazy.?function.?loading|module.?loading",
    # and the rows of Nsight Systems' table PROFILER_OVERHEAD: its own set-up, and what it adds to loading a shared library
    "idle_profiler": r"(?i)flush|instrumentation|resource|buffer.?request|activity|uvm|overhead|unknown"
    r"|profiling|^dlopen|^(?:TLS|chunk) alloc",
}

# Starting, stopping and stepping a torch profiler. record_function stands in torch/autograd/profiler.py too: it is the user's.
_PROFILER = (
    rf"(^|/)torch/profiler/[\w/]+\.py\(\d+\): |{RECORDER}"
    r"|built-in method _(?:prepare|enable|disable|toggle)\w*_(?:profiler|dynamic)|built-in method _kineto_step"
)

# Not compiled_fn and the like, nor compile_wrapper (torch/_dynamo/eval_frame.py): they run what was compiled before.
_COMPILES = r"_?compile(?:_(?:[a-vx-z]\w*|with\w*))?"

# torch.compile at work (not: compiled code at run time), Triton's compiler, autotuners that time candidates, code that is loaded.
_COMPILE = (
    r"(^|/)torch/_dynamo/(?:convert_frame|symbolic_convert|output_graph|bytecode_\w+)\.py\("
    rf"|(^|/)torch/_(?:dynamo|inductor|functorch)/[\w/]+\.py\(\d+\): (?:{_COMPILES}|codegen\w*|create_aot_dispatcher_function"
    r"|aot_(?:function|module)_simplified|fx_codegen_and_compile|precompile\w*|_precompile\w*|benchmark_all_configs|autotune_to_one_config)$"
    r"|(^|/)torch/utils/cpp_extension\.py\(|(^|/)torch/fx/experimental/\w*symbolic_shapes\.py\("
    r"|(^|/)triton/compiler/|(^|/)triton/runtime/\w+\.py\(\d+\): (?:compile|_do_compile|_init_handles|_bench|benchmark|warmup)$"
    r"|built-in (?:method|function) (?:load_binary|compile)\b"
)

_LOADER = (
    r"(^|/)torch/utils/data/dataloader\.py\(\d+\): (?:__next__|__iter__|_next_data|_get_data|_get_iterator)$"
    r"|(?i:data_?loader|dataloading|nvidia/dali|webdataset|ffcv)[\w/]*\.py\(\d+\): (?:__next__|__iter__|_fetch\w*|next)$"
)

_IO = (
    r"(^|/)torch/serialization\.py\(\d+\): |(^|/)torch/distributed/checkpoint/|(^|/)safetensors/"
    r"|(^|/)torch/utils/tensorboard/|(^|/)(?:tensorboardX?|wandb|mlflow|comet_ml|neptune|aim|tqdm|loguru)/"
    r"|(^|/)logging/(?:__init__|handlers)\.py\(|(^|/)(?:shutil|tempfile|csv|zipfile)\.py\(|(^|/)json/__init__\.py\(\d+\): (?:dump|load)$"
    r"|built-in (?:method|function) (?:open|print|input|write|writelines|pwrite|flush|fsync|fdatasync|truncate|rename|replace|remove|unlink"
    r"|mkdir|rmdir|makedirs|copyfile|sendfile|readinto|readline|readlines|dump|write_record\w*|write_end_of_file)\b"
    r"|built-in (?:method|function) (?:read|close|seek)\b[^>]*(?:posix|_io|PyTorchFile)"
    r"|PyTorchFileWriter|built-in method tofile|(^|/)numpy/lib/_?npyio\w*\.py\(|(^|/)PIL/Image\.py\(\d+\): (?:open|save)$"
)

_ALLOCATION = r"(^|/)torch/cuda/memory\.py\(\d+\): (?:empty_cache|caching_allocator_\w+)$|built-in \w+ _\w+_emptyCache"

FRAME_PATTERNS: dict[str, str] = {
    "idle_profiler": _PROFILER,
    "idle_gc": r"built-in function collect>",
    "idle_compile": _COMPILE,
    "idle_data": _LOADER,
    "idle_io": _IO,
    "idle_allocation": _ALLOCATION,
}

# On a CPU-only run: waiting for another thread or process. On a GPU run the host is then busy elsewhere: cause launch.
WAIT_FRAME_PATTERN = (
    r"built-in (?:method|function) (?:acquire|wait|join|poll|select|recv\w*|get|__enter__)\b[^>]*"
    r"(?:lock|Lock|Condition|Semaphore|select|poll|socket|Queue|Work|Future|Store|ProcessGroup)"
    r"|(^|/)threading\.py\(\d+\): (?:wait|join|acquire|_wait_for_tstate_lock)$|(^|/)queue\.py\(\d+\): get$"
    r"|(^|/)multiprocessing/(?:connection|queues|pool|synchronize)\.py\(\d+\): (?:wait|get|recv|poll|_poll|join|acquire)$"
    r"|(^|/)concurrent/futures/\w+\.py\(\d+\): (?:result|wait)$|(^|/)torch/distributed/distributed_c10d\.py\(\d+\): (?:barrier|wait)$"
)

MARK_PATTERNS: dict[str, str] = {"idle_compile": kernel_names.COMPILE_MARK, "idle_data": kernel_names.LOADER_MARK}

# Calls of the operating system, as Nsight Systems names them (OSRT_API); what waits for others or sleeps has no cause of its own.
OS_PATTERNS: dict[str, str] = {
    "idle_io": (
        r"^(?:f?open(?:64|at|at64)?|f?close|f?read(?:v|ahead)?|pread(?:64|v)?|fgets|getline|f?writev?|pwrite(?:64|v)?|f(?:data)?sync|fflush"
        r"|sendfile(?:64)?|copy_file_range|[fl]?stat(?:64)?|rename|unlink)$"
    ),
}

# cuModuleLoadData, cuLibraryLoadData, hipModuleLoad, cuLinkComplete...: device code is loaded or compiled by the driver; with lazy loading
# that is put off to the call that asks for a kernel (cuModuleGetFunction, cuFuncLoad, cuKernelGetFunction).
CALL_PATTERNS: dict[str, str] = {
    "idle_compile": r"(?i)^(cu|hip|cuda)(Module|Library|Link|Kernel)(Load|Create|Complete|Add|GetFunction|GetKernel)|^cuFuncLoad$",
    "idle_allocation": kernel_names.ALLOCATION_CALL + r"|^(cuda|hip)Host(Register|Unregister)|^(cuda|hip)MemPoolTrimTo",
}

# What asks for a device, a context or a stream: long at its first use alone.
INIT_CALL = r"^(cuda|hip|cu)(Init|SetDevice|GetDevice|DeviceGet|DevicePrimaryCtx|CtxCreate|StreamCreate|RuntimeGetVersion|DriverGetVersion)"

FREE_CALL = r"^(cuda|hip)Free(_v\d+)?$"

# What a CUDA library calls at its first use, and a program in its loop does not.
LIBRARY_CALL = r"^cuInit$|^cuGetProcAddress|^cuModuleGetLoadingMode$|^cuLibrary(LoadData|GetKernel|GetModule)|^cudaGetDriverEntryPoint"

# Frames in which a thread only waits for its partner: backward() waits for the autograd thread.
BACKWARD_CALL = r"run_backward"

STREAM_WAIT_CALL = r"(?i)^(cuda|hip|cu)StreamWaitEvent"


CLOSE_NS = 200_000
"""A pause between two recorded events of a thread up to this long is Python at work between them: some thousand bytecodes of the
interpreter at about 50 ns each, with the profiler on."""

CLOSE_FACTOR = 10
"""Or up to this many times the median pause of the trace, where that is longer ..."""

CLOSE_MOST_NS = 1_000_000
"""... but never longer than this: in a millisecond a thread may as well have slept."""

NOBODY = -1

_NOTHING = (intervals.NO_SPANS, np.empty(0, dtype=np.int64))

MAX_THREADS = 256
"""Threads that are asked one by one what they did, the busiest first: training issues from a handful, only a broken file has more."""


def find_main_thread(trace: Trace) -> int:
    """Return the thread that runs the training loop: that of the step marks where it has ops, else the one with the most ops or calls."""
    counts = pl.concat([trace.ops["thread"], trace.launches["thread"]]).drop_nulls().value_counts().sort("count", "thread")
    busy = counts["thread"].to_list()
    marks = trace.marks.filter(match_column("name", kernel_names.STEP_MARK))["thread"].drop_nulls().unique()
    stepping = [thread for thread in busy if thread in set(marks.to_list())]
    return int((stepping or busy or [NOBODY])[-1])


def find_responsible_threads(trace: Trace) -> tuple[int, ...]:
    """Return the main thread and the threads of autograd, MAX_THREADS at most: while one of them works, the others may wait for it."""
    main = find_main_thread(trace)
    nodes = trace.ops["thread"].filter(pl.Series(find_autograd_nodes(trace.ops), dtype=pl.Boolean)).drop_nulls().value_counts()
    busiest = nodes.filter(pl.col("thread") != main).sort("count", "thread", descending=[True, False])["thread"]
    return (main, *busiest.head(MAX_THREADS).sort().to_list())


class HostActivity:
    """What is recorded of the host threads: pieces of time in which each op, call or frame was the innermost one."""

    def __init__(self, trace: Trace, frames: Frames, within: intervals.Spans | None = None) -> None:
        """`within`: what frames held is asked for no time outside these spans. Lets go of what `frames` found: it is large."""
        self.crew = find_responsible_threads(trace)
        self._calls = trace.launches
        self._recorded: dict[tuple[int, ...], intervals.Spans] = {}
        self._marks = trace.marks.filter(match_column("name", f"{kernel_names.LOADER_MARK}|{kernel_names.OPTIMIZER_MARK}"))
        # The record_function ranges that say where in the program a thread is: no steps, and none that holds half of the recording
        name, length = decode_column("name"), pl.col("end_ns") - pl.col("start_ns")
        ranges = trace.marks.filter((pl.col("category") == "annotation") & ~name.str.contains(kernel_names.STEP_MARK) & (length > 0))
        shown = [frame for frame in (trace.ops, trace.launches, ranges) if frame.height]
        begin, end = [frame["start_ns"].min() for frame in shown], [frame["end_ns"].max() for frame in shown]
        extent = max(end, default=0) - min(begin, default=0)  # type: ignore[type-var, operator]
        self.ranges = ranges.filter(2 * length < extent)
        self.frames = frames.table
        self.user = np.where(mask_names(self.frames["name"], BACKWARD_CALL), -1, frames.user)  # the lines of the forward's ops are told
        self.leaves = _split_by_thread(frames.nesting, within)
        frames.forget()
        release_memory()
        self.ops = _split_by_thread(nest(trace.ops))
        """By thread (spans, rows of ops, rows of frames): which op or frame was the innermost, when; nothing for other threads."""
        self._codes = self.frames["name"].to_physical().to_numpy()

    def forget(self) -> None:
        """Let go of what the threads did: nothing is asked of it any more."""
        self._recorded, self.user = {}, self.user[:0].copy()
        self.ops.clear()
        self.leaves.clear()

    def held_frames(self, thread: int, start: Ints, end: Ints) -> tuple[Ints, Ints]:
        """Return the codes (see words) of the innermost frame and of the user's own one that hold most of each [start, end), -1: none."""
        spans, leaves = self.leaves[thread]
        user = self.user[leaves]
        leaf = find_most_held(start, end, spans, self.codes(leaves))[0]
        return leaf, find_most_held(start, end, spans[user >= 0], self.codes(user[user >= 0]))[0]

    def codes(self, rows: Rows) -> Ints:
        """Return the codes (see words) of these rows of frames."""
        found: Ints = self._codes[rows].astype(np.int64)
        return found

    def words(self) -> pl.DataFrame:
        """Return the distinct names of frames: code, text, and `told`, the name as people say it; null for frames of the recorder."""
        names = self.frames.select(pl.col("name").unique()).with_columns(code=pl.col("name").to_physical().cast(pl.Int64))
        ours = pl.col("text").str.contains(RECORDER) & ~pl.col("text").str.contains(DEMO)
        ours |= pl.col("text").str.contains(BACKWARD_CALL)  # the op that comes next says more
        return names.select("code", text=decode_column("name")).with_columns(told=pl.when(~ours).then(format_frame("text")))

    def active(self, threads: tuple[int, ...]) -> intervals.Spans:
        """Return when one of `threads` was in an op, a call, a range of the user's, a frame that is no mere wait, or between close ones."""
        recorded = fill_pauses(self._merge_recorded(threads), self.close_ns)
        framed = [
            intervals.merge_spans(spans[(~mask_names(self.frames["name"].gather(rows), BACKWARD_CALL))])
            for spans, rows in (self.leaves[thread] for thread in threads)
        ]
        ranges = intervals.build_spans(self.ranges.filter(pl.col("thread").is_in(list(threads))))
        return intervals.merge_spans(np.concatenate([recorded, ranges, *framed]))

    def _merge_recorded(self, threads: tuple[int, ...]) -> intervals.Spans:
        if threads not in self._recorded:
            ops = [intervals.merge_spans(self.ops[thread][0]) for thread in threads]  # far fewer spans: pieces of nested ops touch
            within = pl.col("thread").is_in(list(threads))
            rest = (intervals.build_spans(self._calls.filter(within)), intervals.build_spans(self._marks.filter(within)))
            self._recorded[threads] = intervals.merge_spans(np.concatenate([*ops, *rest]))
        return self._recorded[threads]

    @cached_property
    def close_ns(self) -> int:
        """Return how long a pause between two events may be and still count as Python at work, by the pauses of this trace."""
        spans = self._merge_recorded(self.crew)
        pauses = spans[1:, 0] - spans[:-1, 1]
        usual = float(np.median(pauses)) if len(pauses) else 0.0
        return int(min(max(CLOSE_FACTOR * usual, CLOSE_NS), CLOSE_MOST_NS))


def format_frame(column: str) -> pl.Expr:
    """Return the name of a frame as people say it: '<built-in function sleep>' is 'sleep()', 'a/b.py(3): f' is 'f() of b.py'.

    What records a training is called gpudiag's: nobody knows it for a part of the program.
    """
    name = pl.col(column)
    builtin = name.str.extract(r"^<built-in (?:function|method) ([\w.]+)")
    function, file = name.str.extract(r"\((?:\d+|\?)\): (.+)$"), name.str.extract(r"([^/]+)\((?:\d+|\?)\): ")
    own = name.str.contains(RECORDER) & ~name.str.contains(DEMO)
    said = pl.format("{}() of {}", function, pl.when(own).then(pl.format("gpudiag's {}", file)).otherwise(file))
    return pl.coalesce(pl.format("{}()", builtin), said, name)


def _split_by_thread(nesting: Nesting, within: intervals.Spans | None = None) -> defaultdict[int, tuple[intervals.Spans, Ints]]:
    rows, spans = find_self_spans(nesting, within)
    threads = nesting.thread[rows]
    begins = np.flatnonzero(threads[1:] != threads[:-1]) + 1  # find_self_spans keeps threads together
    pieces = itertools.pairwise([0, *begins.tolist(), len(rows)]) if len(rows) else ()
    return defaultdict(lambda: _NOTHING, {int(threads[first]): (spans[first:last], rows[first:last]) for first, last in pieces})
