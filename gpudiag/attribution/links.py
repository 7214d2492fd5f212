"""Links kernel -> launch -> op -> step, by correlation id and by enclosure in time, and the phase of each op; what is unknown stays null.

A number of autograd's own says that an op ran forward with gradients on; an autograd node is backward, and so is all else on a thread of
the engine. Without either (inference, no_grad) nothing but forward is left. Recomputed forward work stays backward: ops.recompute has it.
"""

from __future__ import annotations

import msgspec
import numpy as np
import polars as pl

from gpudiag.arrays import Bools
from gpudiag.attribution import intervals
from gpudiag.attribution.autograd import find_autograd_nodes, find_recomputed
from gpudiag.attribution.device import build_cpu_kernels
from gpudiag.attribution.names import mask_names, match_column
from gpudiag.attribution.nesting import Nesting, find_innermost, find_nearest, nest, null_missing
from gpudiag.attribution.step_patterns import OPTIMIZER_OP, TO_DEVICE, find_optimizer_frames, find_training_thread
from gpudiag.attribution.steps import assign_steps
from gpudiag.model.trace import Trace, build_table_schema
from gpudiag.trace import kernel_names
from gpudiag.trace.kernel_names import classify_kernel_names

PHASES = ("data", "optimizer", "backward", "forward", "other")

# Words that trainers put into annotations (torchrec, fairscale, Megatron, user code): taken where nothing firmer is known.
_DATA_WORDS = r"(?i)copy_batch|load_batch|next_batch|get_batch|data_?load|batch_to_(gpu|device)|to_device"
OPTIMIZER_WORDS = (
    r"(?i)^\W*(optimizer|optim|zero_grad)\w*\W*$|(?:^|[\W_])opt(?:im(?:izer)?)?[_ .]?(?:step|update)(?:$|[\W\d_])"
    r"|^\W*(?:(?:weights?|param(?:eter)?s?)[_ ]update|update[_ ](?:weights|param(?:eter)?s))\b"
)
BACKWARD_WORDS = r"(?i)(?:^|[\W_])(?:backward|bwd|bprop|backprop(?:agation)?)(?:$|[\W\d_]|pass)"
FORWARD_WORDS = r"(?i)(?:^|[\W_])(?:forward|fwd|fprop)(?:$|[\W\d_]|pass)"

BATCH_SHARE = 0.01
"""Copies to the device below this share of the largest one are constants and indices of the model, and no batch."""

_STEP_MARK = r"^Optimizer\.step#"
_ZERO_MARK = r"^Optimizer\.zero_grad#"
_PIN = r"^aten::_?pin_memory$"
_MOVE = r"^aten::(to|_to_copy|copy_|pin_memory|_pin_memory|empty_strided|detach|record_stream)$"
_PRODUCT = r"^aten::(linear|matmul|addmm|b?mm|baddbmm|_?conv\w*|embedding\w*|_?scaled_dot_product\w*|lstm|gru|rnn\w*)$"
# Autograd functions of AOTAutograd; whatever was compiled runs inside (torch/_functorch/_aot_autograd/runtime_wrappers.py).
_COMPILED_BACKWARD = r"^CompiledFunctionBackward|^CompiledBackward"
_COMPILED = r"^CompiledFunction$|^Torch-Compiled Region"


def find_phases(trace: Trace, nesting: Nesting) -> pl.Series:
    """Find the column `phase` for the ops. Kernels have that of the op that launched them.

    data: inside the loader, pinned, or a copy to the device by itself; optimizer: inside a mark of the optimizer (zero_grad too), but not
    of its closure, or, where no mark exists, one of its fused or foreach ops; backward: under an autograd node or on a thread of the
    engine; forward: with an autograd number and not between two passes, or everything in a trace without training; other: none of these,
    where the trace could have told.
    """
    nodes = find_autograd_nodes(trace.ops) | mask_names(trace.ops["name"], _COMPILED_BACKWARD)
    node = _mark_descendants(nodes, nesting)
    compiled = _mark_descendants(mask_names(trace.ops["name"], _COMPILED), nesting)
    numbered = _mark_descendants(trace.ops["sequence"].is_not_null().to_numpy(), nesting) | compiled
    # The ops on threads that run autograd nodes and, outside them, nothing with a number: all there is the engine's (reducers)
    threads = trace.ops["thread"].fill_null(-1).to_numpy()
    engine = np.setdiff1d(threads[node], threads[numbered & ~node])
    backward = node | np.isin(threads, engine[engine != find_training_thread(trace)])
    # Find the ops of the optimizer: in its marks, else its step() in frames, else fused and foreach ops outside the backward pass
    marked = _find_in_marks(trace, kernel_names.OPTIMIZER_MARK, nesting)
    if not marked.any():
        marked = _find_inside(find_optimizer_frames(trace), nesting)
    if not marked.any() and node.any():
        silent = trace.ops["sequence"].is_null().to_numpy() & ~node
        marked = _mark_descendants(silent & mask_names(trace.ops["name"], OPTIMIZER_OP), nesting)
    # Find the forward and backward ops that a step() runs itself: LBFGS evaluates the model in its closure, other optimizers do not. A
    # node that begins inside the mark shows it. A node around the mark does not: there the step runs in a hook of the backward pass. The
    # numbered ops of a mark without nodes are the update itself, written without no_grad
    steps = trace.marks.filter((pl.col("category") == "annotation") & match_column("name", _STEP_MARK))
    steps = steps.filter(pl.col("thread") == find_training_thread(trace)).sort("start_ns")
    starts = np.sort(trace.ops["start_ns"].to_numpy()[nodes])
    first, last = (np.searchsorted(starts, steps[name].to_numpy()) for name in ("start_ns", "end_ns"))
    inside = _find_inside(steps.filter(pl.Series(last > first, dtype=pl.Boolean)), nesting)
    own = _mark_descendants(nodes & inside, nesting)
    optimizer = (marked | (_find_in_marks(trace, OPTIMIZER_WORDS, nesting) & ~node)) & ~(
        own | (numbered & inside & ~_find_in_marks(trace, _ZERO_MARK, nesting))
    )
    moved = _find_in_marks(trace, _DATA_WORDS, nesting) | _find_batch_moves(trace, nesting)
    data = _find_in_marks(trace, kernel_names.LOADER_MARK, nesting) | (moved & ~backward & ~optimizer)
    words = [_find_in_marks(trace, pattern, nesting) for pattern in (BACKWARD_WORDS, FORWARD_WORDS)]
    trains = bool(node.any() or optimizer.any())
    between = _find_between_passes(trace, nodes, nesting) & numbered & ~compiled
    chosen = np.select([data, optimizer, backward, between, numbered, *words], [0, 1, 2, 4, 3, 2, 3], 4 if trains else 3)
    return pl.Series(PHASES, dtype=pl.String).gather(pl.Series(chosen, dtype=pl.Int64)).alias("phase")


def _mark_descendants(seed: Bools, nesting: Nesting) -> Bools:
    below: Bools = find_nearest(nesting.parent, seed) >= 0
    return below


def _find_between_passes(trace: Trace, nodes: Bools, nesting: Nesting) -> Bools:
    """Find the ops with the number of a pass's first node that come before the pass: they prepare its batch, or follow the last pass.

    With gradients on an op carries the next number whether it makes a node or not (at::sequence_number::peek in torch's dispatcher). A pass
    begins with the first product, whose weights may be frozen, at the latest with the last op of that number, which makes the node.
    """
    ops = trace.ops.select("thread", "start_ns", "sequence", "name").with_columns(top=pl.Series(nesting.parent < 0, dtype=pl.Boolean))
    made = ops.filter(pl.Series(nodes, dtype=pl.Boolean)).drop_nulls("sequence").sort("thread", "start_ns")
    first = made.filter((pl.col("sequence").shift(-1) > pl.col("sequence")).over("thread").fill_null(True))["sequence"]
    found = ops.filter(~pl.Series(nodes, dtype=pl.Boolean) & pl.col("sequence").is_in(first.unique().implode())).drop_nulls("thread")
    start = pl.col("start_ns")
    begins = pl.min_horizontal(start.filter("top").max(), start.filter(match_column("name", f"{_PRODUCT}|{_COMPILED}")).min())
    return _find_inside(found.group_by("thread", "sequence").agg(start.min(), end_ns=begins).filter(pl.col("end_ns") > start), nesting)


def _find_batch_moves(trace: Trace, nesting: Nesting) -> Bools:
    """Find the ops that pin memory, and those at the top of their thread that copy a batch from the host to the device and do no more."""
    pins = _mark_descendants(mask_names(trace.ops["name"], _PIN), nesting)
    top = nesting.parent < 0
    root = find_nearest(nesting.parent, top)
    copies = trace.kernels.filter((pl.col("kind") == "memcpy") & match_column("name", TO_DEVICE))
    # large enough for a batch; all of them where sizes are not recorded
    copies = copies.filter((pl.col("bytes") >= BATCH_SHARE * pl.col("bytes").max()).fill_null(True))
    calls = trace.launches.filter(pl.col("correlation") > 0).join(copies, on="correlation", how="semi")
    rows = find_innermost(nesting, calls["thread"].fill_null(-2).to_numpy(), calls["start_ns"].to_numpy())
    copied = np.zeros(len(root), dtype=bool)
    copied[root[rows[rows >= 0]]] = True
    chosen: Bools = copied & top & mask_names(trace.ops["name"], _MOVE)
    return pins | chosen[root]


def _find_in_marks(trace: Trace, pattern: str, nesting: Nesting) -> Bools:
    named = match_column("name", pattern) & (pl.col("category") == "annotation")
    return _find_inside(trace.marks.filter(named & pl.col("thread").is_not_null()), nesting)


def _find_inside(spans: pl.DataFrame, nesting: Nesting) -> Bools:
    found = np.zeros(len(nesting.start_ns), dtype=bool)
    for (thread,), rows in spans.partition_by("thread", as_dict=True).items():
        own = slice(*np.searchsorted(nesting.thread, [thread, thread + 1]))
        times = nesting.start_ns[own]
        found[own] = intervals.measure_covered(intervals.build_spans(rows), times, times + 1) > 0
    return found


def link_kernels(trace: Trace, steps: pl.DataFrame, *, on_cpu: bool) -> tuple[Trace, Nesting]:
    """Return `trace` at stage 'link' and the nesting of its ops. `on_cpu`: the ops themselves become the kernels."""
    nesting = nest(trace.ops)
    ops = trace.ops.with_columns(
        null_missing(nesting.parent, "parent"),
        assign_steps(steps, nesting.start_ns),
        find_phases(trace, nesting),
        pl.lit(None, dtype=pl.String).alias("module"),
        find_recomputed(trace.ops, nesting.parent),
    )
    threads = trace.launches["thread"].fill_null(-2).to_numpy()
    launches = trace.launches.with_columns(null_missing(find_innermost(nesting, threads, trace.launches["start_ns"].to_numpy()), "op"))
    kernels = build_cpu_kernels(ops, trace.marks, nesting) if on_cpu else _link_device_work(trace, launches, ops, steps)
    return msgspec.structs.replace(trace, ops=ops, launches=launches, kernels=kernels), nesting


def _link_device_work(trace: Trace, launches: pl.DataFrame, ops: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    calls = (
        launches.filter(pl.col("correlation") > 0)
        .unique("correlation", keep="first", maintain_order=True)
        .select(
            "correlation",
            pl.col("id").alias("launch"),
            "op",
            pl.col("start_ns").alias("launch_start_ns"),
            match_column("api", kernel_names.GRAPH_LAUNCH).alias("replay"),
        )
    )
    frame = trace.kernels.join(calls, on="correlation", how="left", maintain_order="left")
    launched = assign_steps(steps, frame["launch_start_ns"].fill_null(-1).to_numpy())
    # A collective by its name, or because its record carries a collective's fields, or inside torch's wrapper around every collective
    recorded = trace.collectives["kernel"].drop_nulls().implode()
    wrappers = ops.filter(pl.col("name") == "record_param_comms")["id"].implode()
    collective = match_column("name", kernel_names.COLLECTIVE) | pl.col("id").is_in(recorded) | pl.col("op").is_in(wrappers)
    frame = frame.with_columns(
        (pl.col("end_ns") - pl.col("start_ns")).alias("busy_ns"),
        pl.when(pl.col("launch_start_ns").is_null()).then(None).otherwise(launched).alias("step"),
        pl.col("replay").fill_null(False),
        pl.lit(False).alias("mapped"),
        pl.when(pl.col("kind") == "kernel").then(classify_kernel_names(frame["name"])).alias("kernel_class"),
        ((pl.col("kind") == "kernel") & collective).fill_null(False).alias("collective"),
    )
    return frame.select(list(build_table_schema("kernels", "link")))
