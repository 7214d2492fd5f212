"""The phase of each op: data, forward, backward, optimizer or other; null only where the recording tells nothing.

A number of autograd's own says that an op ran forward with gradients on; an autograd node is backward, and so is all else on a thread of
the engine. Without either (inference, no_grad) nothing but forward is left. Recomputed forward work stays backward: ops.recompute has it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.attribution.names import matches, matching
from gpudiag.attribution.nesting import Nesting, innermost, nearest
from gpudiag.attribution.recompute import autograd_nodes
from gpudiag.attribution.step_work import OPTIMIZER_OP, TO_DEVICE, optimizer_frames, training_thread
from gpudiag.model.trace import Trace
from gpudiag.trace import kernel_names

Mask = npt.NDArray[np.bool_]

WORDS = ("data", "optimizer", "backward", "forward", "other")

# Words that trainers put into annotations (torchrec, fairscale, Megatron, user code): taken where nothing firmer is known.
_DATA_WORDS = r"(?i)copy_batch|load_batch|next_batch|get_batch|data_?load|batch_to_(gpu|device)|to_device"
_OPTIMIZER_WORDS = r"(?i)^\W*(optimizer|optim|zero_grad)\w*\W*$|optimizer[_ .]?step"
_BACKWARD_WORDS = r"(?i)^\W*(backward|bwd)\b"
_FORWARD_WORDS = r"(?i)^\W*(forward|fwd)\b|\.forward$"

BATCH_SHARE = 0.01
"""Copies to the device below this share of the largest one are constants and indices of the model, and no batch."""

_STEP_MARK = r"^Optimizer\.step#"
_ZERO_MARK = r"^Optimizer\.zero_grad#"
_PIN = r"^aten::_?pin_memory$"
_MOVE = r"^aten::(to|_to_copy|copy_|pin_memory|_pin_memory|empty_strided|detach|record_stream)$"
# Autograd functions of AOTAutograd; whatever was compiled runs inside (torch/_functorch/_aot_autograd/runtime_wrappers.py).
_COMPILED_BACKWARD = r"^CompiledFunctionBackward|^CompiledBackward"
_COMPILED = r"^CompiledFunction$|^Torch-Compiled Region"


def phases(trace: Trace, nesting: Nesting) -> pl.Series:
    """Return the column `phase` for the ops. Kernels have that of the op that launched them.

    data: inside the loader, pinned, or a copy to the device by itself; optimizer: inside a mark of the optimizer (zero_grad too), but not
    of its closure, or, where no mark exists, one of its fused or foreach ops; backward: under an autograd node or on a thread of the
    engine; forward: with an autograd number, or everything in a trace without training; other: none of these, where the trace could have
    told.
    """
    node = _with_descendants(_nodes(trace), nesting)
    numbered = _with_descendants(trace.ops["sequence"].is_not_null().to_numpy() | _named(trace, _COMPILED), nesting)
    backward = node | _engine_threads(trace, node, numbered)
    optimizer = _optimizer(trace, node, nesting) & ~_in_closure(trace, numbered, nesting)
    moved = _in_marks(trace, _DATA_WORDS, nesting) | _moves(trace, nesting)
    data = _in_marks(trace, kernel_names.LOADER_MARK, nesting) | (moved & ~backward & ~optimizer)
    words = [_in_marks(trace, pattern, nesting) for pattern in (_BACKWARD_WORDS, _FORWARD_WORDS)]
    trains = bool(node.any() or optimizer.any())
    chosen = np.select([data, optimizer, backward, numbered, *words], [0, 1, 2, 3, 2, 3], 4 if trains else 3)
    return pl.Series(WORDS, dtype=pl.String).gather(pl.Series(chosen, dtype=pl.Int64)).alias("phase")


def _nodes(trace: Trace) -> Mask:
    return autograd_nodes(trace.ops) | _named(trace, _COMPILED_BACKWARD)


def _named(trace: Trace, pattern: str) -> Mask:
    return matching(trace.ops["name"], pattern)


def _with_descendants(seed: Mask, nesting: Nesting) -> Mask:
    """Return `seed` and every op below one of its rows."""
    below: Mask = nearest(nesting.parent, seed) >= 0
    return below


def _engine_threads(trace: Trace, node: Mask, numbered: Mask) -> Mask:
    """Return the ops on threads that run autograd nodes and, outside them, nothing with a number: all there is the engine's (reducers)."""
    threads = trace.ops["thread"].fill_null(-1).to_numpy()
    engine = np.setdiff1d(threads[node], threads[numbered & ~node])
    return np.isin(threads, engine[engine != training_thread(trace)])


def _optimizer(trace: Trace, node: Mask, nesting: Nesting) -> Mask:
    """Return the ops of the optimizer: in its marks, else its step() in frames, else fused and foreach ops outside the backward pass."""
    marked = _in_marks(trace, kernel_names.OPTIMIZER_MARK, nesting)
    if not marked.any():
        marked = _inside(optimizer_frames(trace), nesting)
    if not marked.any() and node.any():
        silent = trace.ops["sequence"].is_null().to_numpy() & ~node
        marked = _with_descendants(silent & _named(trace, OPTIMIZER_OP), nesting)
    return marked | (_in_marks(trace, _OPTIMIZER_WORDS, nesting) & ~node)


def _in_closure(trace: Trace, numbered: Mask, nesting: Nesting) -> Mask:
    """Return the forward and backward ops that a step() runs itself: LBFGS evaluates the model in its closure, other optimizers do not.

    A node that begins inside the mark shows it. A node around the mark does not: there the step runs in a hook of the backward pass. The
    numbered ops of a mark without nodes are the update itself, written without no_grad.
    """
    steps = trace.marks.filter((pl.col("category") == "annotation") & matches("name", _STEP_MARK))
    steps = steps.filter(pl.col("thread") == training_thread(trace)).sort("start_ns")
    nodes = _nodes(trace)
    starts = np.sort(trace.ops["start_ns"].to_numpy()[nodes])
    first, last = (np.searchsorted(starts, steps[name].to_numpy()) for name in ("start_ns", "end_ns"))
    inside = _inside(steps.filter(pl.Series(last > first, dtype=pl.Boolean)), nesting)
    own = _with_descendants(nodes & inside, nesting)
    return own | (numbered & inside & ~_in_marks(trace, _ZERO_MARK, nesting))


def _moves(trace: Trace, nesting: Nesting) -> Mask:
    """Return the ops that pin memory, and those at the top of their thread that copy a batch from the host to the device and do no more."""
    pins = _with_descendants(_named(trace, _PIN), nesting)
    top = nesting.parent < 0
    root = nearest(nesting.parent, top)
    calls = trace.launches.filter(pl.col("correlation") > 0).join(_batch_copies(trace), on="correlation", how="semi")
    rows = innermost(nesting, calls["thread"].fill_null(-2).to_numpy(), calls["start_ns"].to_numpy())
    copied = np.zeros(len(root), dtype=bool)
    copied[root[rows[rows >= 0]]] = True
    chosen: Mask = copied & top & _named(trace, _MOVE)
    return pins | chosen[root]


def _batch_copies(trace: Trace) -> pl.DataFrame:
    """Return (correlation) of the copies to the device that are large enough for a batch; all of them where sizes are not recorded."""
    copies = trace.kernels.filter((pl.col("kind") == "memcpy") & matches("name", TO_DEVICE))
    return copies.filter((pl.col("bytes") >= BATCH_SHARE * pl.col("bytes").max()).fill_null(True)).select("correlation")


def _in_marks(trace: Trace, pattern: str, nesting: Nesting) -> Mask:
    """Return which ops begin inside an annotation that matches `pattern` on their own thread."""
    named = matches("name", pattern) & (pl.col("category") == "annotation")
    return _inside(trace.marks.filter(named & pl.col("thread").is_not_null()), nesting)


def _inside(spans: pl.DataFrame, nesting: Nesting) -> Mask:
    """Return which ops begin inside one of `spans` on their own thread."""
    found = np.zeros(len(nesting.start_ns), dtype=bool)
    for (thread,), rows in spans.group_by("thread"):
        own = slice(*np.searchsorted(nesting.thread, [thread, thread + 1]))
        times = nesting.start_ns[own]
        found[own] = intervals.covered(intervals.of(rows), times, times + 1) > 0
    return found
