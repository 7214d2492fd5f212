"""The matrix work that the analysed steps launched: what was counted, what repeats forward work, what could not be counted.

Conventions of the counts (op_costs section 15.1):

* products, convolutions, attention and recurrent layers, 2 FLOP per multiply-add; no element-wise work, no optimizer;
* attention under a causal mask counts half of the pairs, so half of PaLM's 12*L*H*Q*T per token (appendix B of arXiv:2204.02311
  counts all pairs); the embedding look-up counts nothing, the output layer is a product like any other;
* repeated forward work is counted apart: ops inside a checkpointed region's backward, and the scores that a fused attention backward
  forms again. Work that a compiler recomputes inside its own kernels cannot be told from other work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from gpudiag.attribution.names import texts
from gpudiag.roofline.families import MATRIX, family
from gpudiag.trace.kernel_class import OTHER

if TYPE_CHECKING:
    from gpudiag.facts.window import Window

CLASSES = ("gemm", "convolution", "attention", "rnn", "triton_template")
"""Kernel classes (trace.kernel_class) whose work runs on matrix engines."""


def matrix_work(window: Window) -> pl.DataFrame:
    """Return the kernels launched in the analysed steps that do matrix work or may do some, with op_name, repeated, matrix and again.

    matrix: matrix FLOP, null where they are not known; again: the part that repeats forward work. Work goes to the step that launched
    it, whenever it ran (architecture: two accounts).
    """
    kernels = window.analysis.trace.kernels
    within = pl.col("step").is_in(window.steps["id"].implode()) & pl.col("kind").is_in(["kernel", "cpu"])
    asked = ("id", "owner", "op", "matrix_flops", "provenance", "kernel_class")  # all columns of those rows alone that do: others are many
    own = kernels.select(*asked, "step", "kind", "collective").filter(within & ~pl.col("collective").fill_null(False))
    counted = pl.col("matrix_flops") > 0
    guessed = pl.col("provenance").is_in(["generic", "none"]) | pl.col("matrix_flops").is_null()
    found = _with_ops(window, own.select(asked)).filter(counted | (guessed & _may_be_matrix()))
    frame = kernels[found["id"]].hstack(found.select("call", "op_name", "repeated", "family"))
    matrix = pl.when(counted).then(pl.col("matrix_flops"))
    return frame.with_columns(
        matrix.alias("matrix"),
        pl.when("repeated").then(matrix).otherwise(pl.when(counted).then("recompute_flops").fill_null(0.0)).alias("again"),
    )


def known_share(work: pl.DataFrame) -> float | None:
    """Return the part of the kernel time of `work` (rows of matrix_work) whose FLOP are known; None where there is no time."""
    total = int(work["busy_ns"].sum())
    return int(work.filter(pl.col("matrix").is_not_null())["busy_ns"].sum()) / total if total else None


def _with_ops(window: Window, kernels: pl.DataFrame) -> pl.DataFrame:
    ops, frame = window.analysis.trace.ops, kernels.with_columns(pl.coalesce("owner", "op").alias("call"))
    names, repeated = (ops[name].gather(frame["call"]) for name in ("name", "recompute"))  # an op's id is its row
    frame = frame.with_columns(texts(names).alias("op_name"), repeated.alias("repeated"))
    families = {name: family(name) for name in frame["op_name"].drop_nulls().unique().to_list()}
    known = pl.col("op_name").replace_strict(families, default=None, return_dtype=pl.String) if families else pl.lit(None, dtype=pl.String)
    return frame.with_columns(known.alias("family"), pl.col("repeated").fill_null(False))


def _may_be_matrix() -> pl.Expr:
    """Return whether a kernel without a count may do matrix work: by its op's family, else by its own name, else because nothing tells."""
    by_op, kind = pl.col("family").is_in(MATRIX), pl.col("kernel_class")
    unknown = (kind.is_null() | (kind == OTHER)) & (pl.col("family").is_null() | (pl.col("family") == "other"))
    return by_op.fill_null(False) | kind.is_in(CLASSES).fill_null(False) | unknown
