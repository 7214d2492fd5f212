"""The op table: one row for each (name, phase, module, signature) with the sums over its calls."""

from __future__ import annotations

import polars as pl

from gpudiag.model.cost import BOUNDS
from gpudiag.model.trace import Trace

BEFORE_WINDOW = "before the window"
"""Phase of work whose launch was not recorded."""


def op_rows(trace: Trace, steps: pl.DataFrame) -> pl.DataFrame:
    """Return the rows, longest first: work launched in the analysed steps, and unlinked work under the phase 'before the window'.

    A kernel without an op stands under its own name. flops, bytes and t_roof_ns are null where they are not known for every kernel.
    """
    frame = _work(trace, steps)
    calls = pl.col("call").n_unique() + pl.col("call").is_null().sum() - pl.col("call").is_null().any().cast(pl.UInt32)
    known = {
        name: pl.when(pl.col(name).is_null().any()).then(None).otherwise(pl.col(name).sum())
        for name in ("flops", "bytes_moved", "t_roof_ns")
    }
    by_bound = [pl.col("busy_ns").filter(pl.col("bound") == bound).sum().alias(f"{bound}_ns") for bound in BOUNDS]
    rows = frame.group_by("op_name", "phase", "module", "signature", "provenance", maintain_order=True).agg(
        calls.alias("count"),
        pl.col("busy_ns").sum().alias("kernel_ns"),
        known["flops"].alias("flops"),
        known["bytes_moved"].alias("bytes"),
        known["t_roof_ns"].alias("t_roof_ns"),
        pl.col("cache_resident").any(),
        *by_bound,
    )
    largest = (
        pl.concat_list([f"{bound}_ns" for bound in BOUNDS]).list.arg_max().replace_strict(dict(enumerate(BOUNDS)), return_dtype=pl.String)
    )
    rows = rows.rename({"op_name": "name"}).with_columns(bound=largest, efficiency=pl.col("t_roof_ns") / pl.col("kernel_ns"))
    return rows.sort("kernel_ns", "name", descending=[True, False], maintain_order=True)


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
