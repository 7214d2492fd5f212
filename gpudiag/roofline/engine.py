"""Which engine matrix work ran on, and so which peak it is judged against: TF32 is no type of a tensor, names and settings have to tell.

The order of decision; the first that tells wins, and `engine_by` keeps which it was:

1. name: kernel names that only one engine has (`sgemm`, `simt`, `ffma`: vector units; `s1688`, `tensorop`, `nvjet`: matrix units).
2. settings: those found when the run was recorded (TF32 allowed for matrix products, for cuDNN).
3. rate: faster than 105 % of the vector peak cannot have run on vector units.
4. type: the engine of the inputs' type (fp16, bf16: matrix units, fp32 accumulation; fp32: vector units, on AMD the fp32 matrix path).
"""

from __future__ import annotations

from collections.abc import Iterable

import polars as pl

from gpudiag.attribution.names import decode_column
from gpudiag.model.bundle import Settings
from gpudiag.model.finding import Missing
from gpudiag.model.hardware import Device
from gpudiag.model.notices import Notice, NoticeCode, make_notice
from gpudiag.model.ops import Cost

# Kernel names by library and version. A name that says neither decides nothing. For fp32 work, "fast" is TF32.
# cuBLAS, cuDNN, CUTLASS name the instruction: s1688 = fp32 accumulation, 16x8x8 (HMMA); nvjet (cuBLAS >= 12.6, Hopper on) is wgmma
# alone, which has no IEEE fp32; xmma names say input, compute and output type; PyTorch's memory-efficient attention on sm_80 and above
# multiplies fp32 on tensor cores (OpMultiplyAddFastF32, aten/src/ATen/native/transformers/cuda/mem_eff_attention/gemm_kernel_utils.h).
# Tensile (hipBLASLt, rocBLAS) writes the F32 math mode into the type word: S_MX = xf32 (Tensile/Common/DataType.py, F32XdlMathOp).
FAST_NAMES = (
    r"(?i)tf32|xf32|s1688|tensorop|s16816|xmma_.*f32f32_tf32|hmma|nvjet|wgmma|fmha_cutlass[FB]_f32_\w*sm(8|9|1[0-2])|Cijk_\w+?_S_MX_"
)
SLOW_NAMES = (
    r"(?i)sgemm|_simt_|simt_sgemm|scudnn|dgemm|implicit_convolve_sgemm|ffma|f32f32_f32f32_f32"
    r"|(dgrad|wgrad)(_alg\d|2d_alg\d_\d)?_engine|convolve_common_engine"
)

_VECTOR_ONLY = r"(?i)gemvx?(::|NSP|2T|2N|_)|gemmSN_|gemmk1_|depthwise|grouped_direct"
"""Vector units in every type, also where TF32 is allowed: matrix-vector products, direct grouped convolutions."""

_DOUBLE_FAST = r"(?i)d884|dmma|f64f64_f64f64"
"""fp64 tensor cores (DMMA: 8x8x4; A100 whitepaper), in CUTLASS and xmma names."""

_HALF_ACCUMULATION = r"(?i)(^|[^a-z])h(884|1688|16816)|nvjet_(sm\d+_)?hhh"
"""fp16 accumulation, which GeForce boards do at twice the rate of fp32 accumulation (device table: fp16_fp16acc)."""

TENSOR_CORE_ABOVE = 1.05
"""Above this multiple of the vector peak the work cannot have run on vector units (5 % for clock differences)."""

_MATRIX_INSTRUCTION = r"_MI\d"
"""Part of the name of a Tensile kernel (Cijk_...) that uses matrix instructions (MI16x16x4...); others do plain FMA on vector units."""

FAST_ALGORITHM = r"(?i)winograd|Sp3AsmConv|fft2d|_fft_|fft_conv"
"""Convolution by fewer multiplications than counted (Winograd: Lavin & Gray, arXiv:1509.09308, 2.25 to 4 times fewer; FFT).

MIOpen's Sp3AsmConv kernels are Winograd too. A rate tells nothing of the engine then.
"""

_CUDNN = r"(?i)conv(olution|\d|_)|rnn|lstm|gru"
"""Ops (and autograd nodes) whose TF32 is allowed by cudnn_allow_tf32; all others by cuda_matmul_allow_tf32."""

_WORDS = {"vector": "fp32", "fp64 vector": "fp64"}
"""Keys of Device.peaks that no type stands for."""


def add_engine(frame: pl.DataFrame, device: Device | None, settings: Settings | None = None) -> pl.DataFrame:
    """Return `frame` with `engine` (key of the device's peaks, null where none holds), `engine_by` and `algorithm`.

    Needs name, owner, dtype ('' or null: no matrix work), call_matrix, call_ns and call_name. `algorithm`: the call holds a kernel of a
    fast convolution algorithm.
    """
    name = decode_column("name")
    fast = name.str.contains(FAST_NAMES)
    flags = {
        "fast": fast,
        "slow": (name.str.contains(SLOW_NAMES) | name.str.contains(_VECTOR_ONLY)) & ~fast,
        "plain_tensile": name.str.starts_with("Cijk_") & ~name.str.contains(_MATRIX_INSTRUCTION),
        "double_fast": name.str.contains(_DOUBLE_FAST),
        "half_sum": name.str.contains(_HALF_ACCUMULATION),
        "algorithm": name.str.contains(FAST_ALGORITHM),
    }
    names = frame.select(pl.col("name").unique()).with_columns(**flags)
    frame = frame.join(names, on="name", how="left", maintain_order="left").with_columns(pl.col(list(flags)).any().over("owner"))
    if device is None:
        return frame.with_columns(pl.lit(None, dtype=pl.String).alias(name) for name in ("engine", "engine_by"))
    # 'type|what told it' by type of the inputs, or the type alone decides
    dtype = pl.col("dtype")
    half = pl.when(pl.col("fast")).then(dtype + "|name").when(pl.col("slow")).then(pl.lit("vector|name"))
    half_sum = pl.lit("fp16_fp16acc" in device.peaks) & pl.col("half_sum") & (dtype == "fp16")
    slow_double = (pl.col("slow") | pl.col("plain_tensile")) & ~pl.col("double_fast")
    double = pl.when("double_fast").then(pl.lit("fp64|name")).when(slow_double).then(pl.lit("fp64 vector|name"))
    by_name = pl.when(dtype == "fp32").then(_decide_fp32(device, settings or Settings())).when(half_sum).then(pl.lit("fp16_fp16acc|name"))
    by_name = by_name.when(dtype.is_in(["fp16", "bf16"])).then(half).when(dtype == "fp64").then(double)
    decision = pl.coalesce(by_name, pl.concat_str("dtype", pl.lit("|type")))
    frame = frame.with_columns(decision=pl.when(pl.col("dtype") != "").then(decision))
    parts = pl.col("decision").str.split("|").list
    words = frame["decision"].str.split("|").list.first().drop_nulls().unique().to_list()
    engines: dict[str, str | None] = {"": None} if not words else {}
    for word in words:
        engines[word] = device.matrix_engine(word) if word not in _WORDS else _WORDS[word] if _WORDS[word] in device.peaks else None
    frame = frame.with_columns(engine=parts.first().replace_strict(engines, default=None, return_dtype=pl.String))
    return frame.with_columns(engine_by=pl.when(pl.col("engine").is_not_null()).then(parts.last()))


def _decide_fp32(device: Device, settings: Settings) -> pl.Expr:
    """Return the decision for fp32 inputs.

    On AMD settings decide nothing: xf32 needs HIPBLASLT_ALLOW_TF32 beside them (PyTorch's notes on HIP semantics).
    """
    slow = (pl.col("slow") | pl.col("plain_tensile")) & ~pl.col("fast")
    if device.kind == "cpu":
        # 'medium' lets oneDNN multiply in bf16 (torch.set_float32_matmul_precision); it does so only where that is faster.
        narrow = settings.float32_matmul_precision == "medium" and device.peaks.get("bf16", 0.0) > device.peaks.get("fp32", 0.0)
        return pl.lit("bf16|settings" if narrow else None, dtype=pl.String)
    if "tf32" not in device.peaks:
        return pl.when(slow).then(pl.lit("vector|name"))
    plain = pl.lit(device.matrix_peak("fp32"), dtype=pl.Float64)
    too_fast = (pl.col("call_matrix") / pl.col("call_ns") * 1e9 > TENSOR_CORE_ABOVE * plain) & ~pl.col("algorithm")
    allowed = pl.lit(None, dtype=pl.Boolean)  # whether the settings allow TF32 for the call
    if device.vendor != "amd":
        product = settings.cuda_matmul_allow_tf32
        if product is None and settings.float32_matmul_precision is not None:
            product = settings.float32_matmul_precision != "highest"
        by_cudnn = pl.when(pl.col("call_name").str.contains(_CUDNN)).then(pl.lit(settings.cudnn_allow_tf32, dtype=pl.Boolean))
        allowed = by_cudnn.otherwise(pl.lit(product, dtype=pl.Boolean))
    return (
        pl.when("fast")
        .then(pl.lit("tf32|name"))
        .when(slow)
        .then(pl.lit("vector|name"))
        .when(allowed)
        .then(pl.lit("tf32|settings"))
        .when(too_fast)  # also where the settings forbid it: they are those at the end of the recording
        .then(pl.lit("tf32|rate"))
        .when(~allowed)
        .then(pl.lit("vector|settings"))
    )


def list_engine_notices(costs: Iterable[Cost | Missing], device: Device | None) -> tuple[Notice, ...]:
    """Return a notice for each type of matrix work in `costs` that `device` has no matrix path for: what it is judged against instead."""
    if device is None or not device.peaks:
        return ()
    found = []
    for dtype in sorted({cost.dtype for cost in costs if isinstance(cost, Cost)} - {""}):
        engine = device.matrix_engine(dtype)
        if engine is None:
            found.append(make_notice(NoticeCode.NO_ENGINE_PEAK, dtype=dtype, device=device.name))
        elif engine not in (dtype, f"{dtype}_tensor"):
            path = "vector units at the fp32 rate" if engine == "fp32" else f"{engine} path"
            found.append(make_notice(NoticeCode.ENGINE_SUBSTITUTED, device=device.name, dtype=dtype, path=path))
    return tuple(found)
