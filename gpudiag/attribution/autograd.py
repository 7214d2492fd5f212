"""What autograd ran: its nodes, the forward op of each, and forward work that is repeated in the backward pass (activation checkpointing).

Repeated forward work: an op carries a sequence number of its own only where it passed the autograd layer with grad mode on (c10
Dispatcher.h, runRecordFunction). The engine runs a node with grad mode off, except under create_graph=True, where it is on for all that
the node does (torch/csrc/autograd/engine.cpp, AutoGradMode). So a node whose own ops carry no number, but which holds ops that do,
repeats a forward. Where a custom function turns grad mode on first (reversible layers), no op is without a number; but it then runs the
engine within its own node, which nothing else does. What a compiler recomputes inside its own kernels leaves no such mark and is not
found. Non-reentrant checkpointing stops within the last op that it needs (_StopRecomputationError): on a GPU that op launches nothing, on
a CPU it counts although it did no work.

The forward op of a node: an op notes the number that the next node will get, and a node takes it and counts on (c10 sequence_number;
torch/csrc/autograd/function.h). So all ops since the last node carry the number of a node, and the last of them to start made it. Numbers
count for each thread alone. A node names its forward thread by autograd's own count of threads, which the trace nowhere else records: the
thread whose numbers and names fit best is taken.

The op that a repeated one repeats, for threads that recorded no shapes: autograd runs a repeated forward within the node that needs it.
That node is paired with its forward op: the custom function whose region is repeated (re-entrant checkpointing), or the last op of the
region that keeps a tensor, with which the repetition ends (torch/utils/checkpoint.py, _StopRecomputationError). So the place in the
forward is known, and the ops must have the same names in the same order there; else nothing is said.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import polars as pl

from gpudiag.arrays import Bools, Ints, split_groups
from gpudiag.attribution.names import decode_names, match_column, match_names
from gpudiag.attribution.nesting import Rows, find_nearest

_NODE = r"^autograd::engine::evaluate_function|^torch::autograd::|^[A-Za-z0-9_]+Backward\d*$"
_ACCUMULATE = r"AccumulateGrad$"
_ENGINE_CALL = r"^autograd::engine::evaluate_function"
_CHECKPOINT = r"(?i)checkpoint\w*backward"

WITHOUT_INPUT = (
    r"^aten::(empty|zeros|ones|full|arange|range|linspace|logspace|eye|rand|randn|randint|randperm|scalar_tensor|tensor"
    r"|tril_indices|triu_indices|hann_window|_?resize|set_|result_type|item|_local_scalar_dense)"
)
"""Ops without a tensor argument never pass the autograd layer: that they carry no number says nothing about grad mode."""


def find_autograd_nodes(ops: pl.DataFrame) -> Bools:
    """Find which `ops` are autograd nodes: by name, or because they carry the number of a forward thread (torch 1.8 on)."""
    named = match_names(ops["name"], _NODE)
    found: Bools = (named | (ops["fwd_thread"] > 0).fill_null(False)).to_numpy()
    return found


def find_recomputed(ops: pl.DataFrame, parent: Rows) -> pl.Series:
    """Find the column `recompute` of `ops`; `parent`: row of the enclosing op, -1 at the top."""
    node = find_autograd_nodes(ops)
    around = find_nearest(parent, node)
    inside = (around >= 0) & ~node
    numbered = ops["sequence"].is_not_null().to_numpy()
    name = decode_names(ops["name"])
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
    return pl.Series("recompute", find_nearest(parent, seed) >= 0, dtype=pl.Boolean)


MAX_THREADS = 64
"""Forward threads that are told apart; of more (only broken files) the rest is left unpaired."""

_NUMBER = ["at", "sequence"]
_KEY = ["sequence", "base"]
_LOWEST = -(2**62)
"""Numbers below are broken; subtracting from them could leave the range of the column."""


class ForwardPairs(NamedTuple):
    """Per op row: its forward op (-1: no autograd node, or not found), and whether the names agree."""

    forward: Ints
    named: Bools


def pair_forward_ops(ops: pl.DataFrame, makers: Collection[str] = ()) -> ForwardPairs:
    """Return the forward op of every autograd node of `ops` (stage 'link').

    An op of the node's name is preferred (AddmmBackward0: aten::addmm), then an extension's operator known to make a node of
    another name (one of `makers`), then the last op to start under the number. Recorded numbers may be anything:
    the joins are as-of joins, whose work does not grow with repetitions.
    """
    node, bases = pl.Series(find_autograd_nodes(ops), dtype=pl.Boolean), _find_base_names(ops, makers)
    forward, named = np.full(ops.height, -1, dtype=np.int64), np.zeros(ops.height, dtype=bool)
    table = ops.select("id", "thread", "start_ns", "sequence", "fwd_thread", "name")
    # a write to a part of a tensor makes two nodes: its own, then CopySlices around it (VariableTypeUtils.h, rebase_history)
    table = table.with_columns(pl.col("sequence") - match_column("name", "CopySlices$").fill_null(False).cast(pl.Int64))
    nodes, numbered = (
        table.filter(chosen & table["sequence"].is_not_null()).join(bases, on="name", how="left", maintain_order="left").drop("name")
        for chosen in (node, ~node)
    )
    numbered = numbered.drop("fwd_thread", "maker")
    nodes = nodes.join(_match_threads(nodes, numbered), on="fwd_thread", how="inner", nulls_equal=True)
    # ops without a number that make a node all the same: an extension whose operator skips the autograd layer makes it within the call
    # (fbgemm lookups), so that it took the last number before the next numbered op. Of several in a row each took one
    chosen = ~node & bool(bases["maker"].any())  # most programs have no such operator, and sorting all takes much memory
    makes = table.filter(chosen).join(bases, on="name", how="left", maintain_order="left").drop("name")
    makes = makes.sort("thread", "start_ns", "id").with_columns(following=pl.col("sequence").backward_fill().over("thread"))
    makes = makes.filter(pl.col("sequence").is_null() & pl.col("maker") & (pl.col("following") > _LOWEST))
    later = pl.len().over("thread", "following") - pl.int_range(pl.len()).over("thread", "following")
    makes = makes.with_columns(sequence=pl.col("following") - later.cast(pl.Int64))
    for keys, among in ((_NUMBER, numbered), (_NUMBER, makes), ([*_NUMBER, "base"], numbered)):
        # for each node the last op with the same keys that starts before it
        left = nodes.select("id", "start_ns", *keys).sort("start_ns", "id")
        right = among.rename({"thread": "at", "id": "row"}).select(*keys, "start_ns", "row").sort("start_ns", "row")
        found = left.join_asof(right, on="start_ns", by=keys, check_sortedness=False).select("id", "row").drop_nulls()
        forward[found["id"].to_numpy()] = found["row"].to_numpy()
    named[found["id"].to_numpy()] = True
    return ForwardPairs(forward, named)


def _find_base_names(ops: pl.DataFrame, makers: Collection[str]) -> pl.DataFrame:
    """Return (name, base, maker) for each distinct name of `ops`.

    base: the name without what differs between an op and its node: namespace, underscores, case, 'Backward0', '_forward'.
    'autograd::engine::evaluate_function: NllLossBackward0', 'NllLossBackward0' and 'aten::nll_loss_forward' all give 'nllloss'.
    maker: one of `makers` that is no operator of torch's own.
    """
    names = ops.select(pl.col("name").unique())
    text = decode_names(names["name"])
    short = text.str.replace(r"^autograd::engine::evaluate_function: ", "").str.replace(r"^torch::autograd::CppNode<(.*)>$", "${1}")
    short = short.str.replace(r"<.*$", "").str.replace(r"^.*::", "").str.replace(r"Backwards?\d*$", "").str.replace(r"_forward$", "")
    base = short.str.replace_all("_", "").str.to_lowercase().cast(pl.Categorical)
    return names.with_columns(base.alias("base"), (text.is_in(list(makers)) & ~text.str.starts_with("aten::")).alias("maker"))


def _match_threads(nodes: pl.DataFrame, others: pl.DataFrame) -> pl.DataFrame:
    """Return (fwd_thread, at): the thread that each number of a forward thread stands for.

    By the count of (number, name) that both have, then of numbers alone; two share a thread only where no other is left.
    """
    left, right = (  # of the most frequent threads
        table.join(
            table.group_by(column).len().sort(["len", column], descending=[True, False]).head(MAX_THREADS).select(column),
            on=column,
            how="semi",
            nulls_equal=True,
        )
        for table, column in ((nodes, "fwd_thread"), (others, "thread"))
    )
    ranked: list[tuple[int | None, int]] = []
    for keys in (_KEY, ["sequence"]):
        own, other = (
            table.select(column, *keys).unique(maintain_order=True) for table, column in ((left, "fwd_thread"), (right, "thread"))
        )
        votes = own.join(other, on=keys).group_by("fwd_thread", "thread").len()
        votes = votes.sort("len", "fwd_thread", "thread", descending=[True, False, False])
        ranked += votes.select("fwd_thread", "thread").rows()
    chosen: dict[int | None, int] = {}
    for number, thread in ranked:
        if number not in chosen and thread not in chosen.values():
            chosen[number] = thread
    for number, thread in ranked:
        chosen.setdefault(number, thread)
    return pl.DataFrame({"fwd_thread": list(chosen), "at": list(chosen.values())}, schema={"fwd_thread": pl.Int64, "at": pl.Int64})


_LATER = 8
"""Ops that a repetition may hold behind the op of its node: those that ran before the last tensor was kept."""


def find_repeated_forward(ops: pl.DataFrame, pairs: ForwardPairs, compared: Bools) -> Ints:
    """Find for each repeated op of `ops` the row of the forward op that it repeats, -1 where that is not known.

    `compared`: the ops whose names must agree, and which are answered for (those that do work in either grad mode).
    """
    found = np.full(ops.height, -1, dtype=np.int64)
    parent, again = ops["parent"].fill_null(-1).to_numpy(), ops["recompute"].to_numpy()
    around = find_nearest(parent, find_autograd_nodes(ops))
    compared = compared & ~match_names(ops["name"], WITHOUT_INPUT).to_numpy()  # these are not known to be repeated
    rows = np.flatnonzero(again & compared & (around >= 0))
    forward = np.flatnonzero(~again & compared & (around < 0))
    if not len(rows) or not len(forward):
        return found
    names, threads = ops["name"].to_physical().to_numpy(), ops["thread"].fill_null(-1).to_numpy()
    starts, ends = ops["start_ns"].to_numpy(), ops["end_ns"]
    for node, places in split_groups(around[rows]):
        origin, block = int(pairs.forward[node]), rows[places]
        if origin >= 0:
            thread = [threads[origin], threads[origin] + 1]
            first, last = np.searchsorted(threads, thread)
            # the first row behind all ops inside the origin: rows stand by thread and start
            after = max(int(first + np.searchsorted(starts[first:last], ends[origin], side="left")), origin + 1)
            window = _find_window(forward[slice(*np.searchsorted(threads[forward], thread))], names, names[block], origin, after)
            found[block] = window if len(window) else -1
    return found


def _find_window(forward: Ints, names: Ints, wanted: Ints, origin: int, after: int) -> Ints:
    """Find the rows of `forward` that the names `wanted` repeat: all from `origin` to before `after`, or those that end with it.

    Empty where the names differ.
    """
    begin, end = np.searchsorted(forward, [origin, after])
    if end - begin >= len(wanted):
        ends = [end] if end - begin == len(wanted) else []
    else:
        ends = [end + later for later in range(_LATER) if end + later <= len(forward)]
    for stop in ends:
        window = forward[max(stop - len(wanted), 0) : stop]
        if len(window) == len(wanted) and np.array_equal(names[window], wanted):
            return window
    return forward[:0]
