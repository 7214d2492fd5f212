"""Generic costs that the kernels themselves contradict: sizes of the inputs say nothing about a call that ran matrix products."""

from __future__ import annotations

import polars as pl

from gpudiag.model.cost import Cost
from gpudiag.model.finding import Missing
from gpudiag.model.trace import Trace
from gpudiag.roofline.owners import Owners

MATRIX_CLASSES = ("gemm", "convolution", "attention", "rnn", "triton_template")


def without_hidden_products(trace: Trace, owners: Owners) -> Owners:
    """Return `owners` with Missing for calls with a `generic` cost whose kernels are mostly matrix products.

    A custom op holds its weights where no argument shows them (vllm::moe_forward): one FLOP an element and the bytes of the arguments
    would then be a fraction of a per mille of what it did.
    """
    generic = [call for call, cost in enumerate(owners.costs) if isinstance(cost, Cost) and cost.provenance == "generic"]
    frame = trace.kernels.select("busy_ns", pl.col("kernel_class").is_in(MATRIX_CLASSES).fill_null(False).alias("product"))
    frame = frame.with_columns(pl.Series("call", owners.call)).filter(pl.col("call").is_in(generic))
    times = frame.group_by("call").agg((pl.col("busy_ns") * pl.col("product")).sum().alias("product_ns"), pl.col("busy_ns").sum())
    hidden = times.filter(pl.col("product_ns") * 2 > pl.col("busy_ns"))["call"].to_list()
    if not hidden:
        return owners
    costs = list(owners.costs)
    for call in hidden:
        costs[call] = Missing(f"{owners.names[call]} has no formula and ran matrix kernels: the sizes of its inputs do not tell their work")
    return owners._replace(costs=tuple(costs))
