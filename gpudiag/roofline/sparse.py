"""Costs of calls on sparse gradients: how many rows the operand holds is read from the calls inside, which record dense tensors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl

from gpudiag.attribution.names import among, text
from gpudiag.model.cost import Cost
from gpudiag.model.signature import Signature
from gpudiag.roofline.costs.registry import attempt
from gpudiag.roofline.costs.sparse import ON_ROWS, Held, represented, rows_inside, sparse_cost
from gpudiag.roofline.grades import Known, Rows

_DEEPEST = 3
"""Calls of one name that lie around each other: aten::add_ around aten::add, aten::sparse_mask around two of aten::mul."""

_CASTS = ["aten::to"]
"""What each operand passes before it is used; it tells the rows also where they are as many as those of the table."""


def sparse_costs(ops: pl.DataFrame, parsed: Mapping[int, Signature]) -> Known | None:
    """Return the costs of the calls of `ops` (stage 'link') on sparse tensors whose rows the calls inside tell; None: there are none."""
    sizes = {row: size for row, signature in parsed.items() if (size := represented(signature)) is not None}
    if not sizes:
        return None
    wanted = (ops["signature"].is_in(list(sizes)) & among(ops["name"], ON_ROWS)).fill_null(False)
    frame = ops.select("id", "parent", "signature", text("name")).with_columns(wanted.alias("wanted"))
    held = _with_outer(frame, _held(frame, parsed, sizes))
    found, of_op = list[Cost](), np.full(ops.height, -1, dtype=np.int64)
    rows = held.join(frame.select("id", "name", "signature"), on="id", how="inner", maintain_order="left")
    for (name, signature, *counts), members in rows.group_by("name", "signature", "first", "largest", "smallest", maintain_order=True):
        cost = attempt(sparse_cost, str(name), parsed[signature], Held(*counts))
        if isinstance(cost, Cost):
            of_op[members["id"].to_numpy()] = len(found)
            found.append(cost)
    return Known(tuple(found), of_op) if found else None


def merged(first: Known | None, second: Known | None) -> Known | None:
    """Return both together; where both tell a cost the first holds."""
    if first is None or second is None:
        return first or second
    later = np.where(second.of_op >= 0, second.of_op + len(first.costs), -1)
    of_op: Rows = np.where(first.of_op >= 0, first.of_op, later)
    return Known((*first.costs, *second.costs), of_op)


def _held(frame: pl.DataFrame, parsed: Mapping[int, Signature], sizes: Mapping[int, tuple[int, ...]]) -> pl.DataFrame:
    """Return (id, first, largest, smallest): the rows told directly inside each wanted call that is told any."""
    outer = frame.filter("wanted").select(pl.col("id").alias("call"), pl.col("signature").alias("own"))
    inner = frame.filter(pl.col("signature").is_not_null()).select("id", "parent", "signature", "name")
    inner = inner.join(outer, left_on="parent", right_on="call", how="inner").sort("id")
    pairs = inner.select("own", "signature", "name").unique(maintain_order=True)
    told = [rows_inside(sizes[own], name, parsed[row]) for own, row, name in pairs.iter_rows()]
    pairs = pairs.with_columns(
        pl.Series("rows", [rows for rows, _ in told], dtype=pl.Int64),
        pl.Series("whole", [sizes[own][0] if whole else None for own, (_, whole) in zip(pairs["own"], told, strict=True)], dtype=pl.Int64),
    )
    inner = inner.join(pairs, on=["own", "signature", "name"], how="left", maintain_order="left")
    counts = inner.group_by("parent", maintain_order=True).agg(
        pl.col("rows").drop_nulls(), pl.col("whole").filter(pl.col("name").is_in(_CASTS)).drop_nulls().head(1)
    )
    counts = counts.with_columns(pl.when(pl.col("rows").list.len() > 0).then("rows").otherwise("whole").alias("rows"))
    return counts.select(
        pl.col("parent").alias("id"),
        pl.col("rows").list.first().alias("first"),
        pl.col("rows").list.max().alias("largest"),
        pl.col("rows").list.min().alias("smallest"),
    ).drop_nulls()


def _with_outer(frame: pl.DataFrame, held: pl.DataFrame) -> pl.DataFrame:
    """Return `held` with the wanted calls around those that are told nothing themselves (each passes its operands on)."""
    outer = frame.filter("wanted").select(pl.col("id").alias("parent"))
    above = frame.select("id", "parent")
    for _ in range(_DEEPEST):
        more = held.join(above, on="id").join(outer, on="parent", how="semi").drop("id").rename({"parent": "id"})
        more = more.unique("id", keep="first", maintain_order=True).join(held, on="id", how="anti").select(held.columns)
        if not more.height:
            break
        held = pl.concat([held, more])
    return held
