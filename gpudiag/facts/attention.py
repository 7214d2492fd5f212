"""Facts about attention written as two matrix products with a softmax between them (MEM-03)."""

from __future__ import annotations

import math

import msgspec
import polars as pl

from gpudiag.facts.once import once
from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window
from gpudiag.model.signature import Input, Signature, parse_signature
from gpudiag.roofline import families

CAUSAL_PART = 0.5
"""Part of the scores that a causal mask leaves to compute (Dao et al. 2022, FlashAttention: blocks above the diagonal are skipped)."""

MATRIX_SHARE_OF_PEAK = 0.6
MEMORY_SHARE_OF_PEAK = 0.85
"""What a fused attention kernel reaches (rules.md MEM-03, gain bound)."""

Score = tuple[int, int, int]
"""Size of a score matrix [.., Sq, Sk]: (elements, Sq, Sk). Folding batch and heads does not change it."""

_PRODUCTS = ("bmm", "baddbmm", "matmul")


class _Parts(msgspec.Struct, frozen=True):
    """The score matrices that a call touches, and the bytes of its other tensors."""

    scores: frozenset[Score]
    other_bytes: int


def _score_of(shape: tuple[int, ...]) -> Score | None:
    return (math.prod(shape), shape[-2], shape[-1]) if len(shape) >= 3 else None


def _product_output(name: str, signature: Signature) -> Input | None:
    """Return the output of a batched product, None where this is none."""
    first = 1 if families.base_name(name) == "baddbmm" else 0
    a, b = signature.tensor(first), signature.tensor(first + 1)
    if families.base_name(name) not in _PRODUCTS or a is None or b is None or len(a.shape) < 3 or len(b.shape) < 3:
        return None
    return Input(dtype=a.dtype, shape=(*a.shape[:-1], b.shape[-1]))


def _tensors(name: str, signature: Signature) -> list[Input]:
    output = _product_output(name, signature)
    return [item for item in signature.inputs if item.is_tensor] + ([output] if output else [])


def _signatures(window: Window) -> dict[tuple[str, int], Signature]:
    """Return the parsed inputs of every distinct (op, signature) that worked on tensors of rank 3 or more."""
    rows = window.work(shapes=True).select("op_name", "signature", "family").unique().drop_nulls()
    wanted = rows.filter(pl.col("family").is_in(["gemm", "softmax", "elementwise", "copy"])).sort("op_name", "signature")
    texts = window.analysis.trace.signatures
    return {
        (name, row): parse_signature(*(texts[column][row] for column in ("shapes", "dtypes", "strides", "args")))
        for name, row, _ in wanted.iter_rows()
    }


def _proven_scores(window: Window, parsed: dict[tuple[str, int], Signature]) -> frozenset[Score]:
    """Return the score matrices of softmax calls with a batched product that makes one before, and one that reads it after."""
    made, read, normalised = set(), set(), set()
    for (name, _), signature in parsed.items():
        inputs = {score for item in signature.inputs if item.is_tensor and (score := _score_of(item.shape))}
        if families.family(name) == "softmax" or families.base_name(name) == "exp":  # softmax may be written by hand
            normalised |= inputs
        output = _product_output(name, signature)
        if output is not None:
            read |= inputs
            if (score := _score_of(output.shape)) is not None:
                made.add(score)
    return frozenset(made & read & normalised)


def _parts(name: str, signature: Signature, proven: frozenset[Score]) -> _Parts:
    tensors = _tensors(name, signature)
    touched = frozenset(score for item in tensors if (score := _score_of(item.shape)) in proven and score is not None)
    transposed = frozenset((n, sk, sq) for n, sq, sk in proven)
    others = [item for item in tensors if _score_of(item.shape) not in proven | transposed]
    return _Parts(touched, sum(item.numel * item.item_bytes for item in others))


@once
def unfused_attention(window: Window) -> pl.DataFrame:
    """Return the kernels of attention that is not fused, with columns other_bytes (of q, k, v, output per call) and length (Sk).

    A score matrix [.., Sq, Sk] counts where a batched product makes one of that size, a softmax normalises one and a batched
    product reads one; its kernels are the products, softmaxes, element-wise ops and copies that touch a tensor of that size.
    """
    parsed = _signatures(window)
    proven = _proven_scores(window, parsed)
    rows = []
    for (name, row), signature in parsed.items():
        parts = _parts(name, signature, proven)
        if parts.scores:
            other = parts.other_bytes if families.family(name) == "gemm" else 0
            rows.append((name, row, other, max(score[2] for score in parts.scores)))
    columns = {"op_name": pl.String, "signature": pl.Int64, "other_bytes": pl.Int64, "length": pl.Int64}
    found = pl.DataFrame(rows, schema=columns, orient="row")
    return window.kernels.join(found, on=["op_name", "signature"], how="inner")


@fact("unfused_attention_share", unit="share")
def unfused_attention_share(window: Window) -> float:
    """Time in attention that writes its score matrix out (product, softmax, product) over the wall time of the analysed steps."""
    return window.share_of_wall(unfused_attention(window))


@fact("unfused_attention_ns", unit="ns")
def unfused_attention_ns(window: Window) -> int:
    """Summed time in attention that writes its score matrix out."""
    return int(unfused_attention(window)["time_ns"].sum())


@fact("unfused_attention_length", unit="count")
def unfused_attention_length(window: Window) -> int:
    """Longest key sequence of unfused attention; 0 where there is none."""
    lengths = unfused_attention(window)["length"]
    return int(lengths.max()) if len(lengths) else 0  # type: ignore[arg-type]


@fact("unfused_attention_saving_ns", unit="ns")
def unfused_attention_saving_ns(window: Window) -> float:
    """Time that unfused attention would save in a fused kernel.

    That one runs at 60 % of the matrix peak or 85 % of the bandwidth and does not move the score matrix. On a CPU it still does the
    products and the exponentials, at the rates that they reach now, though a causal mask lets it skip half of them.
    """
    work = unfused_attention(window)
    require(work.height > 0, "no unfused attention")
    products = work.filter(pl.col("family") == "gemm")
    dtype = products["dtype"].drop_nulls().mode().sort()
    peak = window.device.matrix_peak(str(dtype[0])) if len(dtype) else None
    if peak is None or products["flops"].null_count() == products.height:
        raise NotKnownError("the FLOP of the attention products or the peak for their type are not known")
    per_call = products.group_by("call").agg(pl.col("other_bytes").first())
    by_flop = float(products["flops"].sum()) / (MATRIX_SHARE_OF_PEAK * peak) * 1e9
    by_bytes = float(per_call["other_bytes"].sum()) / (MEMORY_SHARE_OF_PEAK * window.bandwidth) * 1e9
    floor_ns = max(by_flop, by_bytes, _kept_on_cpu_ns(work) if window.on_cpu else 0.0)
    return window.saving_ns(work, pl.col("time_ns") * floor_ns / float(work["time_ns"].sum()))


def _kept_on_cpu_ns(work: pl.DataFrame) -> float:
    """Return what a fused kernel of a CPU needs at least of the time of `work`: half of its products and of its softmax forward."""
    kept = (pl.col("family") == "gemm") | pl.col("op_name").str.contains(r"^aten::_(safe_)?softmax$")
    return CAUSAL_PART * float(work.filter(kept)["time_ns"].sum())
