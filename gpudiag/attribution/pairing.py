"""Which forward op each autograd node belongs to, by (sequence number, forward thread).

An op notes the number that the next node will get, and a node takes it and counts on (c10 sequence_number; torch/csrc/autograd/function.h).
So all ops since the last node carry the number of a node, and the last of them to start made it. Numbers count for each thread alone.
A node names its forward thread by autograd's own count of threads, which the trace nowhere else records: the thread whose numbers and
names fit best is taken.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution.names import texts
from gpudiag.attribution.recompute import autograd_nodes

Rows = npt.NDArray[np.int64]

MAX_THREADS = 64
"""Forward threads that are told apart; of more (only broken files) the rest is left unpaired."""

_NUMBER = ["at", "sequence"]
_KEY = ["sequence", "base"]
_LOWEST = -(2**62)
"""Numbers below are broken; subtracting from them could leave the range of the column."""


class Pairs(NamedTuple):
    """Per op row: its forward op (-1: no autograd node, or not found), and whether the names agree."""

    forward: Rows
    named: npt.NDArray[np.bool_]


def pair(ops: pl.DataFrame, makers: Collection[str] = ()) -> Pairs:
    """Return the forward op of every autograd node of `ops` (stage 'link').

    An op of the node's name is preferred (AddmmBackward0: aten::addmm), then an extension's operator that is known to make a node of
    another name (one of `makers`; see `_unnumbered`), then the last op to start under the number. Recorded numbers may be anything: the
    joins are as-of joins, whose work does not grow with repetitions.
    """
    node, bases = pl.Series(autograd_nodes(ops), dtype=pl.Boolean), _bases(ops, makers)
    forward, named = np.full(ops.height, -1, dtype=np.int64), np.zeros(ops.height, dtype=bool)
    table = ops.select("id", "thread", "start_ns", "sequence", "fwd_thread", "name")
    nodes, numbered = (
        table.filter(chosen & table["sequence"].is_not_null()).join(bases, on="name", how="left", maintain_order="left").drop("name")
        for chosen in (node, ~node)
    )
    numbered = numbered.drop("fwd_thread", "maker")
    nodes = nodes.join(_threads(nodes, numbered), on="fwd_thread", how="inner", nulls_equal=True)
    for keys, among in ((_NUMBER, numbered), (_NUMBER, _unnumbered(table, ~node, bases)), ([*_NUMBER, "base"], numbered)):
        found = _last_before(nodes, among, keys)
        forward[found["id"].to_numpy()] = found["row"].to_numpy()
    named[found["id"].to_numpy()] = True
    return Pairs(forward, named)


def _unnumbered(table: pl.DataFrame, others: pl.Series, bases: pl.DataFrame) -> pl.DataFrame:
    """Return those of the `others` of `table` that carry no number though they make a node, with the number that it got.

    An extension whose operator skips the autograd layer makes the node within the call (fbgemm lookups): it took the last number before
    the next numbered op. Of several in a row each took one.
    """
    chosen = others & bool(bases["maker"].any())  # most programs have no such operator, and sorting all takes much memory
    frame = table.filter(chosen).join(bases, on="name", how="left", maintain_order="left").drop("name")
    frame = frame.sort("thread", "start_ns", "id").with_columns(following=pl.col("sequence").backward_fill().over("thread"))
    frame = frame.filter(pl.col("sequence").is_null() & pl.col("maker") & (pl.col("following") > _LOWEST))
    later = pl.len().over("thread", "following") - pl.int_range(pl.len()).over("thread", "following")
    return frame.with_columns(sequence=pl.col("following") - later.cast(pl.Int64))


def _last_before(nodes: pl.DataFrame, others: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    """Return (id, row): for each node the last op with the same `keys` that starts before it."""
    left = nodes.select("id", "start_ns", *keys).sort("start_ns", "id")
    right = others.rename({"thread": "at", "id": "row"}).select(*keys, "start_ns", "row").sort("start_ns", "row")
    return left.join_asof(right, on="start_ns", by=keys, check_sortedness=False).select("id", "row").drop_nulls()


def _bases(ops: pl.DataFrame, makers: Collection[str]) -> pl.DataFrame:
    """Return (name, base, maker) for each distinct name of `ops`.

    base: the name without what differs between an op and its node: namespace, underscores, case, 'Backward0', '_forward'.
    'autograd::engine::evaluate_function: NllLossBackward0', 'NllLossBackward0' and 'aten::nll_loss_forward' all give 'nllloss'.
    maker: one of `makers` that is no operator of torch's own.
    """
    names = ops.select(pl.col("name").unique())
    text = texts(names["name"])
    short = text.str.replace(r"^autograd::engine::evaluate_function: ", "").str.replace(r"^torch::autograd::CppNode<(.*)>$", "${1}")
    short = short.str.replace(r"<.*$", "").str.replace(r"^.*::", "").str.replace(r"Backwards?\d*$", "").str.replace(r"_forward$", "")
    base = short.str.replace_all("_", "").str.to_lowercase().cast(pl.Categorical)
    return names.with_columns(base.alias("base"), (text.is_in(list(makers)) & ~text.str.starts_with("aten::")).alias("maker"))


def _threads(nodes: pl.DataFrame, others: pl.DataFrame) -> pl.DataFrame:
    """Return (fwd_thread, at): the thread that each number of a forward thread stands for.

    By the count of (number, name) that both have, then of numbers alone; two share a thread only where no other is left.
    """
    left, right = _busiest(nodes, "fwd_thread"), _busiest(others, "thread")
    ranked = [*_votes(left, right, _KEY), *_votes(left, right, ["sequence"])]
    chosen: dict[int | None, int] = {}
    for number, thread in ranked:
        if number not in chosen and thread not in chosen.values():
            chosen[number] = thread
    for number, thread in ranked:
        chosen.setdefault(number, thread)
    return pl.DataFrame({"fwd_thread": list(chosen), "at": list(chosen.values())}, schema={"fwd_thread": pl.Int64, "at": pl.Int64})


def _votes(nodes: pl.DataFrame, others: pl.DataFrame, keys: list[str]) -> list[tuple[int | None, int]]:
    """Return the pairs (fwd_thread, thread) that have `keys` in common, most of them first."""
    left = nodes.select("fwd_thread", *keys).unique(maintain_order=True)
    right = others.select("thread", *keys).unique(maintain_order=True)
    votes = left.join(right, on=keys).group_by("fwd_thread", "thread").len()
    return votes.sort("len", "fwd_thread", "thread", descending=[True, False, False]).select("fwd_thread", "thread").rows()


def _busiest(table: pl.DataFrame, column: str) -> pl.DataFrame:
    top = table.group_by(column).len().sort(["len", column], descending=[True, False]).head(MAX_THREADS)
    return table.join(top.select(column), on=column, how="semi", nulls_equal=True)
