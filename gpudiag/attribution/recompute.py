"""Forward work that is repeated inside the backward pass: activation checkpointing, with and without re-entrant autograd.

An op carries a sequence number of its own only where it passed the autograd layer with grad mode on (c10 Dispatcher.h, runRecordFunction).
The engine runs a node with grad mode off, except under create_graph=True, where it is on for all that the node does
(torch/csrc/autograd/engine.cpp, AutoGradMode). So a node whose own ops carry no number, but which holds ops that do, repeats a forward.
Where a custom function turns grad mode on first (reversible layers), no op is without a number; but it then runs the engine within its
own node, which nothing else does. What a compiler recomputes inside its own kernels leaves no such mark and is not found. Non-reentrant
checkpointing stops within the last op that it needs (_StopRecomputationError): on a GPU that op launches nothing, on a CPU it counts
although it did no work.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution.names import contains, texts
from gpudiag.attribution.nesting import Rows, nearest

Mask = npt.NDArray[np.bool_]

_NODE = r"^autograd::engine::evaluate_function|^torch::autograd::|^[A-Za-z0-9_]+Backward\d*$"
_ACCUMULATE = r"AccumulateGrad$"
_ENGINE_CALL = r"^autograd::engine::evaluate_function"
_CHECKPOINT = r"(?i)checkpoint\w*backward"

WITHOUT_INPUT = (
    r"^aten::(empty|zeros|ones|full|arange|range|linspace|logspace|eye|rand|randn|randint|randperm|scalar_tensor|tensor"
    r"|tril_indices|triu_indices|hann_window|_?resize|set_|result_type|item|_local_scalar_dense)"
)
"""Ops without a tensor argument never pass the autograd layer: that they carry no number says nothing about grad mode."""


def autograd_nodes(ops: pl.DataFrame) -> Mask:
    """Return which `ops` are autograd nodes: by name, or because they carry the number of a forward thread (torch 1.8 on)."""
    named = contains(ops["name"], _NODE)
    found: Mask = (named | (ops["fwd_thread"] > 0).fill_null(False)).to_numpy()
    return found


def recomputed(ops: pl.DataFrame, parent: Rows) -> pl.Series:
    """Return the column `recompute` of `ops`; `parent`: row of the enclosing op, -1 at the top."""
    node = autograd_nodes(ops)
    around = nearest(parent, node)
    inside = (around >= 0) & ~node
    numbered = ops["sequence"].is_not_null().to_numpy()
    name = texts(ops["name"])
    direct = inside & (parent == around)
    silent = direct & ~numbered & (name.str.starts_with("aten::") & ~name.str.contains(WITHOUT_INPUT)).to_numpy()
    repeats = name.str.contains(_CHECKPOINT).to_numpy()
    repeats[around[silent]] = True
    engine = name.str.contains(_ENGINE_CALL).to_numpy() & (parent >= 0)
    nested = np.append(around, -1)[parent[engine]]
    repeats[nested[nested >= 0]] = True
    repeats &= ~name.str.contains(_ACCUMULATE).to_numpy()
    seed = inside & numbered
    seed[seed] = repeats[around[seed]]
    return pl.Series("recompute", nearest(parent, seed) >= 0, dtype=pl.Boolean)
