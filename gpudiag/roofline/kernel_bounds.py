"""Roofline time and bound of every kernel, work above its roofline; and the engine that matrix work ran on, and
so which peak it is judged against: TF32 is no type of a tensor, names and settings have to tell.

The order of decision; the first that tells wins, and `engine_by` keeps which it was:

1. name: kernel names that only one engine has (`sgemm`, `simt`, `ffma`: vector units; `s1688`, `tensorop`, `nvjet`: matrix units).
2. settings: those found when the run was recorded (TF32 allowed for matrix products, for cuDNN).
3. rate: faster than 105 % of the vector peak cannot have run on vector units.
4. type: the engine of the inputs' type (fp16, bf16: matrix units, fp32 accumulation; fp32: vector units, on AMD the fp32 matrix path).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.attribution.names import decode_column, mask_names, match_column
from gpudiag.attribution.nesting import null_missing
from gpudiag.model.bundle import Settings
from gpudiag.model.finding import Missing
from gpudiag.model.hardware import Device
from gpudiag.model.notices import Notice, NoticeCode, make_notice
from gpudiag.model.ops import HOST_BOUND_BELOW_NS, INEFFICIENT_BELOW, OVER_ROOF_ABOVE, SHORT_KERNEL_NS, Cost
from gpudiag.model.trace import Trace, build_table_schema
from gpudiag.roofline.launch_geometry import count_waves
from gpudiag.roofline.op_roles import AttributedOps
from gpudiag.trace import kernel_names
from gpudiag.units import format_share

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


ABOVE_ROOFLINE_CAUSES = {
    "cache": "part of its data was in the last-level cache",
    "inner_cache": "part of its data was in the caches of the cores, not only in the last-level cache",
    "algorithm": "a fast convolution algorithm multiplies less than is counted",
    "unexplained": "a wrong peak or a wrong count, such as an expanded input without recorded strides",
}

_CACHES = 2.5
"""A call that moves more than this many caches is not explained by one: most of it has to come from DRAM."""

_SHOWN = 3
_SMALLEST = 0.0001
"""A share of time below this would read 0.00 %."""


def mark_above_roofline(frame: pl.DataFrame, device: Device | None) -> pl.DataFrame:
    """Return `frame` with `over_roof` (efficiency above OVER_ROOF_ABOVE) and `over_cause`, a key of ABOVE_ROOFLINE_CAUSES.

    cache: what the last-level cache can spare it of DRAM explains the rate. inner_cache: it was judged against the last-level cache
    already, and what the caches of the cores can spare it of that explains the rate.
    """
    outer, inner = (device.cache_bytes, device.inner_cache_bytes) if device else (None, None)
    dram, cache = (device.bandwidth_byte_per_s, device.cache_bandwidth_byte_per_s) if device else (None, None)
    by_dram = ~pl.col("cache_resident") & ~pl.col("host_copy")
    by_outer = pl.col("cache_resident") & (pl.col("call_bytes") > pl.lit(inner, dtype=pl.Float64))
    fast = pl.col("algorithm") & (pl.col("compute_ns") >= pl.col("memory_ns"))
    helped = ((by_dram & _is_helped_by_cache(outer, dram), "cache"), (by_outer & _is_helped_by_cache(inner, cache), "inner_cache"))
    cause = kernel_names.choose_first([(fast, "algorithm"), *helped], "unexplained")
    frame = frame.with_columns(over_roof=(pl.col("efficiency") > OVER_ROOF_ABOVE).fill_null(False))
    return frame.with_columns(over_cause=pl.when("over_roof").then(cause))


def _is_helped_by_cache(cache_bytes: float | None, rate: float | None) -> pl.Expr:
    """Return whether a call stays below its roof where a cache of `cache_bytes` spares it the way to what gives `rate` byte/s.

    It may have been read from the cache as much as that holds, and as much again may not have been written back yet.
    """
    size = pl.lit(cache_bytes, dtype=pl.Float64)
    moved = pl.coalesce("call_bytes", "bytes_moved")
    least = (moved - 2 * size) / pl.lit(rate, dtype=pl.Float64) * 1e9 * pl.col("part").fill_null(1.0)
    below = pl.max_horizontal("compute_ns", least) <= OVER_ROOF_ABOVE * pl.col("busy_ns")
    return (below & least.is_not_null() & (moved <= _CACHES * size)).fill_null(False)


def list_above_roofline_notices(rows: pl.DataFrame, work: str = "kernel") -> tuple[Notice, ...]:
    """Return one notice on the op rows above their roof (share of the `work` time, the worst ops, why); nothing where there is none."""
    over = rows.filter(pl.col("over_roof").is_not_null())
    if not over.height:
        return ()
    share = int(over["kernel_ns"].sum()) / int(rows["kernel_ns"].sum())
    said = format_share(share, 2) if share >= _SMALLEST else f"under {format_share(_SMALLEST, 2)}"
    # the ops with most time missing to their roof, one word for all rows of an op, gathered by cause
    missing = (pl.col("t_roof_ns") - pl.col("kernel_ns")).sum()
    ops = over.group_by("name", "over_roof_cause").agg(missing.alias("missing"), pl.len().alias("rows"), pl.col("over_roof").max())
    told: dict[str, list[str]] = {}
    ranked = ops.sort("missing", "name", descending=[True, False]).head(_SHOWN)
    for name, cause, rows, ratio in ranked.select("name", "over_roof_cause", "rows", "over_roof").iter_rows():
        most = format_share(ratio)
        told.setdefault(cause, []).append(f"{name} {most}" if rows == 1 else f"{name} up to {most} ({rows} rows)")
    worst = "; ".join(f"{', '.join(names)}: {ABOVE_ROOFLINE_CAUSES[cause]}" for cause, names in told.items())
    return (make_notice(NoticeCode.ABOVE_ROOFLINE, share=share, said=said, work=work, worst=worst),)


def classify_kernels(
    trace: Trace, owners: AttributedOps, idle: pl.DataFrame, device: Device | None, settings: Settings | None = None
) -> Trace:
    """Return `trace` at stage 'cost': owner, cost, engine, roofline time and bound of every kernel.

    The cost of a call is spread over its kernels by their time, so that each has the efficiency of the call. `settings`: those found
    when the run was recorded; None for a plain trace.
    """
    frame = _add_cost(trace.kernels, owners)
    frame = _add_roofline(add_engine(frame, device, settings), device)
    frame = frame.with_columns(efficiency=pl.when(pl.col("busy_ns") > 0).then(pl.col("t_roof_ns") / pl.col("busy_ns")))
    frame = mark_above_roofline(frame, device).with_columns(waves=count_waves(device))
    # Find the columns `latency` (rule a) and `starved` (rule b) of the overhead bound
    floor = device.launch_floor_ns if device and device.launch_floor_ns else 0.0
    short = pl.col("busy_ns") < max(SHORT_KERNEL_NS, 2 * floor)
    # A product that its FLOPs bind has no other work: beyond the roof of a short one a CPU is setting it up (oneDNN), however long
    set_up = (pl.col("kind") == "cpu") & (pl.col("call_matrix") > 0) & (pl.col("compute_ns") > pl.col("memory_ns"))
    short |= (set_up & (pl.col("t_roof_ns") < INEFFICIENT_BELOW * SHORT_KERNEL_NS)).fill_null(False)
    small = (pl.col("grid") < pl.lit(device.sm_count if device else None, dtype=pl.Int64)).fill_null(False)
    latency = (pl.col("zero") | ((pl.col("efficiency") < INEFFICIENT_BELOW) & (short | small))).fill_null(False)
    # waits for the host in which it neither loaded data, synchronised, allocated nor compiled
    waits = idle.filter((pl.col("kind") == "host_wait") & pl.col("kernel").is_not_null())
    calls = trace.launches.filter(match_column("api", kernel_names.SYNC_CALL) | match_column("api", kernel_names.ALLOCATION_CALL))
    named = match_column("name", kernel_names.LOADER_MARK) | match_column("name", kernel_names.COMPILE_MARK)
    reasons = [intervals.build_spans(table) for table in (calls, trace.marks.filter(named), trace.ops.filter(named))]
    merged = intervals.merge_spans(np.concatenate(reasons))
    busy = intervals.measure_covered(merged, waits["start_ns"].to_numpy(), waits["end_ns"].to_numpy())
    waits = waits.select("kernel", (pl.col("end_ns") - pl.col("start_ns")).alias("wait_ns")).filter(pl.Series(busy == 0))
    waited = frame.select("id").join(waits, left_on="id", right_on="kernel", how="left", maintain_order="left")["wait_ns"]
    starved = (pl.col("busy_ns") < HOST_BOUND_BELOW_NS) & (waited.fill_null(0) > pl.col("busy_ns"))
    chain = (
        ("collective", "communication"),
        ("host_copy", "copy"),
        ("moves", "memory"),
        (latency | starved, "overhead"),
        (pl.col("t_roof_ns").is_null(), "unknown"),
        (pl.col("compute_ns") > pl.col("memory_ns"), "compute"),
    )
    bound = kernel_names.choose_first(chain, "memory").alias("bound")
    frame = frame.with_columns(latency.alias("latency"), starved.alias("starved"), bound)
    return msgspec.structs.replace(trace, kernels=frame.select(list(build_table_schema("kernels", "cost"))))


def estimate_attainable_ns(device: Device | None, share: float) -> pl.Expr:
    """Estimate the time of kernels at `share` of their roof, no shorter than the device's best products take for their FLOP."""
    if device is None or not device.attained:
        return pl.col("t_roof_ns") / share
    rate = pl.col("engine").cast(pl.String).replace_strict(device.attained, default=None, return_dtype=pl.Float64)
    best = pl.when(pl.col("t_roof_ns").is_not_null()).then(pl.col("flops") / rate * 1e9)
    return pl.max_horizontal(pl.col("t_roof_ns") / share, best)


def _add_cost(kernels: pl.DataFrame, owners: AttributedOps) -> pl.DataFrame:
    known = [(row, cost) for row, cost in enumerate(owners.costs) if isinstance(cost, Cost)]
    costs = pl.DataFrame(
        [
            (row, owners.names[row], float(cost.matrix_flops), float(cost.recompute_flops), float(cost.vector_flops),
             float(cost.special), float(cost.draws), float(cost.bytes), cost.dtype, cost.provenance)
            for row, cost in known
        ],
        schema={
            "call": pl.Int64, "call_name": pl.String, "call_matrix": pl.Float64, "call_again": pl.Float64, "call_vector": pl.Float64,
            "call_special": pl.Float64, "call_draws": pl.Float64, "call_bytes": pl.Float64, "dtype": pl.String, "provenance": pl.String,
        },
        orient="row",
    )  # fmt: skip
    frame = kernels.with_columns(null_missing(owners.owner, "owner"), null_missing(owners.call, "call"))
    frame = frame.join(costs, on="call", how="left", maintain_order="left").with_columns(pl.col("provenance").fill_null("none"))
    total = pl.col("busy_ns").sum().over("owner")
    part = (
        pl.when(pl.col("owner").is_null())
        .then(None)
        .when(total == 0)
        .then(1.0 / pl.len().over("owner"))
        .otherwise(pl.col("busy_ns") / total)
    )
    frame = frame.with_columns(part.alias("part"), total.alias("call_ns"))
    frame = frame.with_columns(
        ((pl.col("call_matrix") + pl.col("call_vector")) * pl.col("part")).alias("flops"),
        (pl.col("call_matrix") * pl.col("part")).alias("matrix_flops"),
        (pl.col("call_again") * pl.col("part")).alias("recompute_flops"),
        (pl.col("call_bytes") * pl.col("part")).alias("bytes_moved"),
    )
    frame = frame.with_columns(zero=((pl.col("flops") == 0) & (pl.col("bytes_moved") == 0)).fill_null(False))
    # the recorded bytes of copies and memsets: a copy within the device reads and writes each byte
    peer = _is_named_copy(frame, kernel_names.PEER_COPY)
    frame = frame.with_columns(
        peer_copy=peer, host_copy=peer | _is_named_copy(frame, kernel_names.HOST_COPY), moves=pl.col("kind").is_in(["memcpy", "memset"])
    )
    both_ways = pl.when((pl.col("kind") == "memcpy") & ~pl.col("host_copy")).then(2.0).otherwise(1.0)
    return frame.with_columns(
        pl.when("moves").then(pl.col("bytes") * both_ways).otherwise("bytes_moved").alias("bytes_moved"),
        pl.when(pl.col("moves") & pl.col("bytes").is_not_null()).then(0.0).otherwise("flops").alias("flops"),
        pl.when(pl.col("moves") & pl.col("bytes").is_not_null()).then(pl.lit("exact")).otherwise("provenance").alias("provenance"),
    )


def _is_named_copy(frame: pl.DataFrame, pattern: str) -> pl.Expr:
    """Return whether a row is a copy whose name matches `pattern` and does not say that it stays on the device."""
    named = mask_names(frame["name"], pattern) & ~mask_names(frame["name"], r"(?i)DtoD|DeviceToDevice|D2D")
    return (pl.col("kind") == "memcpy") & pl.lit(pl.Series(named))


def _build_literal(value: float | None) -> pl.Expr:
    return pl.lit(value, dtype=pl.Float64)


def _add_roofline(frame: pl.DataFrame, device: Device | None) -> pl.DataFrame:
    """Return `frame` with compute_ns, memory_ns, cache_resident and t_roof_ns = max of both (null where a needed peak is not known)."""
    known = device.peaks if device else {}
    peak = pl.col("engine").replace_strict(known, default=None, return_dtype=pl.Float64) if known else _build_literal(None)
    matrix = pl.when(pl.col("call_matrix") == 0).then(0.0).otherwise(pl.col("call_matrix") * pl.col("part") / peak * 1e9)
    rate = _build_literal(device.vector_peak if device else None)
    vector = pl.when(pl.col("call_vector") == 0).then(0.0).otherwise(pl.col("call_vector") * pl.col("part") / rate * 1e9)
    special = pl.col("call_special") * pl.col("part") / _build_literal(device.special_per_s if device else None) * 1e9
    drawn = pl.col("call_draws") * pl.col("part") / _build_literal(device.draws_per_s if device else None) * 1e9
    frame = frame.with_columns(
        compute_ns=pl.when("moves").then(0.0).otherwise(pl.max_horizontal(matrix, vector, special, drawn)),
        compute_known=pl.col("moves") | (matrix.is_not_null() & vector.is_not_null()),
    )
    dram = _build_literal(device.bandwidth_byte_per_s if device else None)
    inner = pl.col("call_bytes") <= _build_literal(device.inner_cache_bytes if device else None)
    outer = _build_literal(device.cache_bandwidth_byte_per_s if device else None)
    cache = pl.when(inner).then(pl.coalesce(_build_literal(device.inner_cache_byte_per_s if device else None), outer)).otherwise(outer)
    host = _build_literal(device.pcie_byte_per_s if device else None)
    link = pl.when("peer_copy").then(pl.coalesce(_build_literal(device.link_byte_per_s if device else None), host)).otherwise(host)
    by_dram = pl.col("bytes_moved") / pl.when("host_copy").then(link).otherwise(dram) * 1e9
    fits = pl.col("call_bytes") <= _build_literal(device.cache_bytes if device else None)
    resident = (fits & (by_dram > pl.col("compute_ns")) & cache.is_not_null() & ~pl.col("moves")).fill_null(False)
    frame = frame.with_columns(
        cache_resident=resident, memory_ns=pl.when(resident).then(pl.col("bytes_moved") / cache * 1e9).otherwise(by_dram)
    )
    frame = frame.with_columns(pl.when(pl.col("bytes_moved") == 0).then(0.0).otherwise("memory_ns").alias("memory_ns"))
    both_known = pl.col("memory_ns").is_not_null() & pl.col("compute_known")
    return frame.with_columns(t_roof_ns=pl.when(both_known).then(pl.max_horizontal("compute_ns", "memory_ns")))
