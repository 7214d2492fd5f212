"""Types of tensors from the names of the kernels that worked on them, where only sizes were recorded (emit_nvtx under Nsight Systems).

Taken for ops whose tensors all have one type: matrix products, convolutions, attention, elementwise ops. What the names do not tell, or not
with one voice, stays unknown.
"""

from __future__ import annotations

import msgspec
import numpy as np
import polars as pl

from gpudiag.attribution.names import text
from gpudiag.model import tables
from gpudiag.model.trace import Trace
from gpudiag.units import format_share

# Template arguments (c10::BFloat16, cutlass::half_t, __nv_bfloat16, float), and the words of libraries: cuBLAS and CUTLASS
# (bf16_s16816gemm, h1688 = fp16 accumulation, sgemm, dgemm, s1688 without a type = TF32 on fp32), xmma (bf16bf16_bf16f32_f32: inputs
# first), nvjet (one letter each for input, sum and output: t bf16, h fp16, s fp32). The first that matches wins: a kernel on 16-bit data
# also names the fp32 in which it sums.
_WORDS = (
    (r"(?i)e4m3|e5m2|float8|fp8|i8i8|nvjet_(sm\d+_)?q|complex", ""),
    (r"(?i)bf16|bfloat16|nvjet_(sm\d+_)?t[a-z]t", "c10::BFloat16"),
    (r"(?i)half|fp16|[^bt]f16|hgemm|h(884|1688|16816)|nvjet_(sm\d+_)?h[a-z]h", "c10::Half"),
    (r"\bdouble\b|dgemm|d884|f64f64|dmma", "double"),
    (r"\bfloat\b|sgemm|s1688|f32f32|scudnn|nvjet_(sm\d+_)?s[a-z]s", "float"),
)
_PARAMETERS = r">\(.*$"
"""What follows the template arguments are types of C++ parameters, which need not be those of the data."""

_ONE_TYPE = (
    r"^aten::(addmm|_addmm_activation|mm|bmm|baddbmm|addbmm|mv|addmv|dot|matmul|linear"
    r"|_?convolution(_backward|_overrideable)?|cudnn_convolution\w*|_conv_depthwise2d|conv_depthwise3d"
    r"|_scaled_dot_product_(flash|efficient|cudnn|fused)\w*|_(flash|efficient|cudnn)_attention\w*"
    r"|(add|sub|rsub|mul|div|neg|abs|exp|log|sqrt|rsqrt|pow|relu|gelu|silu|tanh|sigmoid|leaky_relu|hardtanh|clamp|clamp_min)_?"
    r"|(threshold|gelu|silu|tanh|sigmoid|leaky_relu|hardtanh)_backward|_(log_)?softmax(_backward_data)?)$"
)


def with_named_types(trace: Trace) -> tuple[Trace, tuple[str, ...]]:
    """Return `trace` (stage 'link') with types in the signatures of ops whose kernels' names tell them, and a warning that says so.

    The same trace where PyTorch's profiler recorded it, with types.
    """
    if trace.meta.recorder == "torch" or not trace.signatures.height or trace.signatures["dtypes"].null_count() < trace.signatures.height:
        return trace, ()
    told = _told(trace)
    pairs = told.select("signature", "dtype").unique(maintain_order=True)
    pairs = pairs.with_columns(new=pl.int_range(pl.len(), dtype=pl.Int64) + trace.signatures.height)
    told = told.join(pairs, on=["signature", "dtype"], how="left", maintain_order="left")
    rows = trace.ops["signature"].scatter(told["op"].to_numpy(), told["new"]) if told.height else trace.ops["signature"]
    typed = msgspec.structs.replace(
        trace,
        ops=trace.ops.with_columns(rows.alias("signature")),
        signatures=pl.concat([trace.signatures, _typed(trace.signatures, pairs)]),
    )
    return typed, (_words(trace, told),)


def _told(trace: Trace) -> pl.DataFrame:
    """Return (op, signature, dtype) of the ops all of whose kernels that tell a type tell the same one."""
    kernels = trace.kernels.select("kind", "op", "name").filter((pl.col("kind") == "kernel") & pl.col("op").is_not_null()).drop("kind")
    names = kernels.select(pl.col("name").unique())
    name = text("name").str.replace(_PARAMETERS, ">")
    dtype = pl.coalesce(*(pl.when(name.str.contains(pattern)).then(pl.lit(word)) for pattern, word in _WORDS))
    kernels = kernels.join(names.with_columns(dtype=dtype), on="name", how="inner").drop_nulls("dtype")
    found = kernels.group_by("op").agg(pl.col("dtype").first(), several=pl.col("dtype").n_unique() > 1)
    ops = trace.ops.select(pl.col("id").alias("op"), "signature", text("name").alias("op_name"))
    found = found.join(ops, on="op", how="inner").filter(~pl.col("several") & (pl.col("dtype") != "") & pl.col("signature").is_not_null())
    return found.filter(pl.col("op_name").str.contains(_ONE_TYPE)).select("op", "signature", "dtype").sort("op")


def _typed(signatures: pl.DataFrame, pairs: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of `pairs` as signatures; what has no sizes may be a plain value and gets no type."""
    shapes = signatures["shapes"].gather(pairs["signature"])
    dtypes = [_types(text, dtype) for text, dtype in zip(shapes.to_list(), pairs["dtype"].to_list(), strict=True)]
    blank = [pl.lit(None, dtype=pl.String).alias(name) for name in ("strides", "args")]
    frame = pl.DataFrame({"id": pairs["new"], "shapes": shapes, "dtypes": pl.Series(dtypes, dtype=pl.String)}).with_columns(blank)
    return frame.select(list(tables.schema("signatures")))


def _types(shapes: str, dtype: str) -> str | None:
    try:
        sizes = msgspec.json.decode(shapes, type=list[list[int]])
    except msgspec.DecodeError:
        return None
    return msgspec.json.encode([dtype if shape else "" for shape in sizes]).decode()


def _words(trace: Trace, told: pl.DataFrame) -> str:
    kernels = trace.kernels.select("kind", "op", "busy_ns").filter((pl.col("kind") == "kernel") & pl.col("op").is_not_null())
    lengths = kernels["busy_ns"].to_numpy()
    share = float(lengths[np.isin(kernels["op"].to_numpy(), told["op"].to_numpy())].sum() / max(lengths.sum(), 1))
    return (
        f"the recording holds sizes of tensors, but no types: for {format_share(share)} of the kernel time of its ops they were taken from "
        "the names of the kernels, the other ops are not modelled; torch.profiler and gpudiag.profile record both"
    )
