"""The op table: one row for each (name, phase, module, signature) with the sums over its calls."""

from __future__ import annotations

import polars as pl

from gpudiag.model.cost import BOUNDS, Provenance
from gpudiag.model.trace import Trace

BEFORE_WINDOW = "before the window"
"""Phase of work whose launch was not recorded."""

_PROVENANCES: tuple[Provenance, ...] = ("exact", "derived", "generic", "none")


def op_rows(trace: Trace, steps: pl.DataFrame) -> pl.DataFrame:
    """Return the rows, longest first: work launched in the analysed steps, and unlinked work under the phase 'before the window'.

    A kernel without an op stands under its own name. flops, bytes and t_roof_ns are null where they are not known for every kernel
    (a copy or memset of unknown size beside kernels of the same row adds nothing). provenance: that of the most kernel time.
    """
    frame = _work(trace, steps)
    calls = pl.col("call").n_unique() + pl.col("call").is_null().sum() - pl.col("call").is_null().any().cast(pl.UInt32)
    rows = frame.group_by("op_name", "phase", "module", "signature", maintain_order=True).agg(
        calls.alias("count"),
        pl.col("busy_ns").sum().alias("kernel_ns"),
        _known_sum("flops").alias("flops"),
        _known_sum("bytes_moved").alias("bytes"),
        _known_sum("t_roof_ns").alias("t_roof_ns"),
        pl.col("cache_resident").any(),
        *[pl.col("busy_ns").filter(pl.col("bound") == bound).sum().alias(f"{bound}_ns") for bound in BOUNDS],
        *[pl.col("busy_ns").filter(pl.col("provenance") == word).sum().alias(f"by_{word}") for word in _PROVENANCES],
    )
    rows = rows.rename({"op_name": "name"}).with_columns(
        bound=_largest({f"{bound}_ns": bound for bound in BOUNDS}), provenance=_largest({f"by_{word}": word for word in _PROVENANCES})
    )
    rows = rows.drop([f"by_{word}" for word in _PROVENANCES]).with_columns(
        efficiency=pl.when(pl.col("kernel_ns") > 0).then(pl.col("t_roof_ns") / pl.col("kernel_ns"))
    )
    return rows.sort("kernel_ns", "name", descending=[True, False], maintain_order=True)


def _known_sum(name: str) -> pl.Expr:
    """Return the sum of a column over a group, null where it is not known for every kernel that is more than a copy or memset."""
    moves = pl.col("kind").is_in(["memcpy", "memset"])
    unknown = (pl.col(name).is_null() & ~(moves & (~moves).any())).any()
    return pl.when(unknown).then(None).otherwise(pl.col(name).sum())


def _largest(words: dict[str, str]) -> pl.Expr:
    """Return the word of the column with the largest value, the first of equals."""
    names = dict(enumerate(words.values()))
    return pl.concat_list(list(words)).list.arg_max().replace_strict(names, return_dtype=pl.String)


def _work(trace: Trace, steps: pl.DataFrame) -> pl.DataFrame:
    analysed = steps.filter(pl.col("analysed"))["id"].implode()
    unlinked = (pl.col("kind") != "cpu") & pl.col("launch").is_null()
    frame = trace.kernels.filter(pl.col("step").is_in(analysed) | unlinked)
    frame = frame.with_columns(pl.coalesce("owner", "op").alias("call"), unlinked.alias("unlinked"))
    ops = trace.ops.select(pl.col("id").alias("call"), pl.col("name").cast(pl.String).alias("op_name"), "phase", "module", "signature")
    frame = frame.join(ops, on="call", how="left", maintain_order="left")
    return frame.with_columns(
        pl.coalesce("op_name", pl.col("name").cast(pl.String)).alias("op_name"),
        pl.when("unlinked").then(pl.lit(BEFORE_WINDOW)).otherwise("phase").alias("phase"),
    )
