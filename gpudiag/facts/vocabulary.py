"""Facts about cross-entropy over a large vocabulary (MEM-04)."""

from __future__ import annotations

import polars as pl

from gpudiag.facts import attained
from gpudiag.facts.memory import peak_memory_bytes
from gpudiag.facts.once import once
from gpudiag.facts.registry import NotKnownError, fact
from gpudiag.facts.window import Window
from gpudiag.model.signature import parse_signature

LARGE_VOCABULARY = 16_384
"""Classes from which on the loss is worth a kernel of its own (rules.md MEM-04: V >= 16k)."""

_NORMALISED = ("aten::_log_softmax", "aten::_log_softmax_backward_data")
_NODES = r"LogSoftmaxBackward0|NllLossBackward0"
_FAMILIES = ("softmax", "elementwise", "copy", "fill", "reduction", "other")

FUSED_PASSES = 2
"""Sizes of the logits that a fused loss moves: read once, the gradient written once (op_costs.md section 5)."""


def _classes(window: Window, name: str, row: int) -> int | None:
    """Return the number of classes of a log-softmax over the last dimension; None for another dimension."""
    texts = window.analysis.trace.signatures.row(row, named=True)
    signature = parse_signature(texts["shapes"], texts["dtypes"], texts["strides"], texts["args"])
    x, dim = signature.tensor(0), signature.value(2 if name.endswith("_data") else 1)
    if x is None or len(x.shape) < 2 or dim not in (None, -1, len(x.shape) - 1):
        return None
    return x.shape[-1]


@once
def vocabulary_work(window: Window) -> pl.DataFrame:
    """Return the kernels of losses over at least 16k classes: log-softmax, and what else handles a tensor of the size of its logits.

    Casts, scalings and zeros of that size count with them, matrix products do not; the optimizer neither.
    """
    work = window.work(shapes=True)
    calls = work.filter(pl.col("op_name").is_in(_NORMALISED)).select("op_name", "signature", "numel").unique().drop_nulls()
    sizes = [numel for name, row, numel in calls.iter_rows() if (_classes(window, name, row) or 0) >= LARGE_VOCABULARY]
    if not sizes:
        return work.clear()
    same = pl.col("numel").is_in(sizes) & pl.col("family").is_in(_FAMILIES) & pl.col("phase").ne_missing("optimizer")
    return work.filter(same.fill_null(False) | pl.col("op_name").str.contains(_NODES).fill_null(False))


def _logits(window: Window) -> pl.DataFrame:
    """Return the forward log-softmax calls over large vocabularies; raises NotKnownError where there is none."""
    found = vocabulary_work(window).filter(pl.col("op_name") == _NORMALISED[0])
    if not found.height:
        raise NotKnownError("no loss over 16,384 or more classes was computed")
    return found.unique("call")


@fact("vocabulary_loss_share", unit="share")
def vocabulary_loss_share(window: Window) -> float:
    """Time of cross-entropy over 16k or more classes (log-softmax, casts, zeros and copies of that size) over the wall time."""
    return window.share_of_wall(vocabulary_work(window))


@fact("vocabulary_loss_ns", unit="ns")
def vocabulary_loss_ns(window: Window) -> int:
    """Time of cross-entropy over 16k or more classes."""
    return int(vocabulary_work(window)["time_ns"].sum())


@fact("vocabulary_logits_bytes", unit="B")
def vocabulary_logits_bytes(window: Window) -> int:
    """Bytes of the largest logits that a loss over 16k or more classes normalises, in the type that it does so."""
    found = _logits(window)
    return int((found["numel"] * found["item_bytes"]).max())  # type: ignore[arg-type]


@fact("vocabulary_memory_share", unit="share")
def vocabulary_memory_share(window: Window) -> float:
    """Logits and their gradient, twice vocabulary_logits_bytes, over the peak of the memory in use."""
    return 2 * float(vocabulary_logits_bytes(window)) / float(peak_memory_bytes(window))


@fact("vocabulary_saving_ns", unit="ns")
def vocabulary_saving_ns(window: Window) -> float:
    """Time that the loss would save as one fused kernel that reads the logits and writes their gradient (2 passes of 6).

    At 85 % of the bandwidth; on a CPU at the best rate that its own ops reach.
    """
    found = _logits(window)
    fused = FUSED_PASSES * float((found["numel"] * found["item_bytes"]).sum())
    return attained.fused_saving_ns(window, vocabulary_work(window), fused)
