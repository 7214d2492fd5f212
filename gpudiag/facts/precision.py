"""Facts about number formats: fp32 and fp64 on slow paths, 16-bit types and fp8 that are not used."""

from __future__ import annotations

import math

import polars as pl

from gpudiag.attribution.names import match_names
from gpudiag.attribution.nesting import find_nearest
from gpudiag.facts import fused_kernels
from gpudiag.facts.fused_kernels import MEMORY_SHARE_OF_PEAK
from gpudiag.facts.registry import fact, fact_of, gpu_only, kernel_share, raise_unknown, require, require_known
from gpudiag.facts.window import Window, cache_by_window, divide_sums, estimate_target_ns
from gpudiag.roofline.kernel_bounds import FAST_NAMES, SLOW_NAMES
from gpudiag.roofline.op_calls import MATRIX_FAMILIES
from gpudiag.trace.kernel_names import HOST_COPY, classify_kernel_names

_IS_MATRIX = pl.col("family").is_in(MATRIX_FAMILIES)
_KNOWN_MATRIX = _IS_MATRIX & pl.col("flops").is_not_null() & pl.col("dtype").is_not_null()


def add_path(window: Window, work: pl.DataFrame) -> pl.DataFrame:
    """Return `work` with a column path: 'fast' | 'slow' for fp32 and fp64 matrix work, null where nothing tells, and for other work.

    fp64 is always slow. fp32: by the engine that its roofline names (kernel_bounds.py), where a kernel's name, the settings or the rate
    told it. TF32 that was merely allowed tells nothing: the library chooses.
    """
    told, allowed = pl.col("engine_by") != "type", (pl.col("engine") == "tf32") & (pl.col("engine_by") == "settings")
    path = (
        pl.when(~_IS_MATRIX)
        .then(None)
        .when(pl.col("dtype") == "fp64")
        .then(pl.lit("slow"))
        .when((pl.col("dtype") == "fp32") & told & ~allowed)
        .then(pl.when(pl.col("engine") == "tf32").then(pl.lit("fast")).otherwise(pl.lit("slow")))
    )
    return work.with_columns(path.alias("path"))


MATRIX_SHARE_OF_PEAK = 0.75
"""What good products reach of the peak: the factor of the gain bounds of rules.md CMP-01 and CMP-02."""


CAST_BYTES = 6
"""Read and written for each element that is cast from fp32 to 16 bit."""

AUTOCAST_FOLLOWERS = ("elementwise", "copy")
"""Families that run in the type of their inputs under autocast; on a GPU norms (batch norm aside), softmax, losses and reductions stay
fp32 (torch/aten/src/ATen/autocast_mode.h: AT_FORALL_FP32)."""


_FP32_OPS = {
    "cpu": r"cdist|_?euclidean_?dist|\w*loss|kl_?div|p?inverse|(?:cholesky|lu_?solve|symeig|svd|qr|triangular_?solve)\w*"
    r"|_?linalg_?(?:cond|cholesky|det|eig|householder|inv|ldl|lstsq|lu|matrix_?(?:exp|rank)|pinv|qr|slogdet|solve|svd|tensor)\w*",
    "gpu": r"|acos|asin|cosh|erfinv|exp|expm1|log(?:10|1p|2)?|pow|reciprocal|rsqrt|sinh|softplus|tan",
}
"""What autocast leaves in fp32, with all that it does within (products of cdist), or what has no 16-bit kernel (decompositions, solves); on
a GPU those of "gpu" too (torch 2.13: ops with a kernel for AutocastCPU or AutocastCUDA). Their gradients are in fp32 as well, products
included: that of an SVD holds four (tests/facts/test_precision.py)."""


@cache_by_window
def find_ops_left_in_fp32(window: Window) -> pl.Series:
    """Mark the ops of the trace that stay fp32 under autocast because of what they are, or belong to."""
    ops, kinds = window.analysis.trace.ops, _FP32_OPS["cpu"] + ("" if window.on_cpu else _FP32_OPS["gpu"])
    named = match_names(ops["name"], rf"(?i)^(?:aten::(?:{kinds})|(?:{kinds})Backward\d+)$").fill_null(False)
    return pl.Series(find_nearest(ops["parent"].fill_null(-1).to_numpy(), named.to_numpy()) >= 0)


_FAMILIES_OF_CLASSES = {"gemm": "gemm", "convolution": "conv", "attention": "attention"}
_NAMED_FP64 = r"(?i)dgemm|d884|dmma|f64f64|[<, ]double[>, ]"
_NAMED_HALF = r"(?i)fp16|bf16|half|hgemm"
"""Of inputs in 16 bit that are multiplied on vector units, such as volta_fp16_sgemm_fp16_128x64_nn."""

LEAST_SHAPED = 0.01
"""Part of the device's time that has to have shapes for them to tell types (heuristic: a trace without shapes may hold a few)."""


def find_typed_work(window: Window) -> pl.DataFrame:
    """Return the kernels with their types and families: Window.work, or what kernel names tell where no shapes of ops were recorded.

    So a recording of Nsight Systems tells fp32 products on vector units (sgemm, ffma) and fp64; what its names do not tell stays null.
    """
    frame = window.kernels
    shaped_ns = int(frame.filter(pl.col("signature").is_not_null())["time_ns"].sum())
    if not frame.height or shaped_ns >= LEAST_SHAPED * int(frame["time_ns"].sum()):
        return window.work(shapes=True)
    names = frame.select(pl.col("name").unique())
    families = pl.Series(classify_kernel_names(names["name"])).replace_strict(_FAMILIES_OF_CLASSES, default="other", return_dtype=pl.String)
    matrix, text = families != "other", pl.col("name")
    fp32 = pl.lit(matrix) & text.str.contains(SLOW_NAMES) & ~text.str.contains(FAST_NAMES) & ~text.str.contains(_NAMED_HALF)
    told = names.with_columns(
        family=families, dtype=pl.when(text.str.contains(_NAMED_FP64)).then(pl.lit("fp64")).when(fp32).then(pl.lit("fp32"))
    )
    require(
        told["dtype"].is_not_null().any(), "no shapes were recorded, and no kernel's name tells its type: record with record_shapes=True"
    )
    of_names = told.with_columns(engine=pl.when(pl.col("dtype") == "fp32").then(pl.lit("fp32")), engine_by=pl.lit("name"))
    return frame.drop("family", "dtype", "engine", "engine_by").join(of_names, on="name", how="left", maintain_order="left")


def find_slow_matrix_work(window: Window) -> pl.DataFrame:
    """Return the fp32 and fp64 matrix kernels on a slow path; raises NotKnownError where most of them cannot be told."""
    window.require_accelerator()
    wide = add_path(window, find_typed_work(window).filter(_IS_MATRIX).filter(pl.col("dtype").is_in(["fp32", "fp64"])))
    slow = wide.filter(pl.col("path") == "slow")
    untold = int(wide.filter(pl.col("path").is_null())["time_ns"].sum())
    require(
        untold <= max(int(slow["time_ns"].sum()), 0.01 * window.wall_ns),
        "neither kernel names nor rates tell whether fp32 matrix work used TF32: record with gpudiag.profile",
    )
    return slow


def find_fp64_work(window: Window) -> pl.DataFrame:
    """Return the kernels of ops whose first floating tensor is fp64: on a GPU the optimizer aside, on a CPU what is only dispatched."""
    meant = pl.col("bound") != "overhead" if window.on_cpu else pl.col("phase").ne_missing("optimizer")
    return find_typed_work(window).filter((pl.col("dtype") == "fp64") & meant)


def find_slow_path_work(window: Window) -> pl.DataFrame:
    """Return the matrix kernels on a slow path and all other kernels in fp64."""
    slow = find_slow_matrix_work(window)
    return pl.concat([slow.drop("path"), find_fp64_work(window)]).unique("id", keep="first", maintain_order=True)


def slow_path_saving_ns(window: Window) -> float:
    """Time that slow matrix work would save at 75 % of the TF32 peak or 85 % of the bandwidth, and other fp64 work with half the bytes.

    Matrix work of unknown shapes: at least its time over the ratio of the peaks, which takes it for as good as it can be today.
    """
    peak = window.device.peaks.get("tf32") or window.device.vector_peak
    faster = measure_speedup(window, ("tf32",), ("fp32",), "fp32")
    matrix = estimate_target_ns(window, peak, compute=MATRIX_SHARE_OF_PEAK, memory=MEMORY_SHARE_OF_PEAK)
    matrix = pl.coalesce(matrix, pl.when((pl.col("dtype") == "fp32") & pl.col("flops").is_null()).then(pl.col("time_ns") / faster))
    halved = pl.coalesce(estimate_target_ns(window, None, compute=1.0, memory=MEMORY_SHARE_OF_PEAK, byte_factor=0.5), pl.col("time_ns") / 2)
    return window.saving_ns(find_slow_path_work(window), pl.when(_IS_MATRIX).then(matrix).otherwise(halved))


def find_fp32_work(window: Window) -> pl.DataFrame:
    """Return the fp32 matrix kernels and the fp32 kernels that follow their inputs' type under autocast, on a GPU those bound by memory.

    Not the optimizer, which stays fp32, nor what is no op of torch. On a CPU norms, softmax and elementary functions (tanh 1.5, gelu 1.2
    times as fast in bf16) follow too, in phases that hold matrix work (averaging weights is none); what is short, reduces or draws random
    numbers gains nothing (measured: tests/benchmarks/RESULTS.md).
    """
    work = window.work(shapes=True).filter((pl.col("dtype") == "fp32") & pl.col("phase").ne_missing("optimizer"))
    follows = (pl.col("bound") == "memory") & (pl.col("family").is_in(AUTOCAST_FOLLOWERS) | pl.col("op_name").str.contains("batch_norm"))
    if window.on_cpu:
        large = (pl.col("bytes_moved") >= fused_kernels.STREAMING_BYTES) & ~pl.col("op_name").str.contains(fused_kernels.RANDOM_OPS)
        beside = pl.col("phase").is_in(work.filter(_IS_MATRIX)["phase"].implode())
        follows = pl.col("family").is_in([*AUTOCAST_FOLLOWERS, "norm", "softmax"]) & large & beside
    between = (pl.col("kind") == "memcpy") & pl.col("name").str.contains(HOST_COPY)  # batches stay as they are
    stays = find_ops_left_in_fp32(window).gather(work["call"]).fill_null(False)
    return work.filter((_IS_MATRIX | (follows & pl.col("op_name").str.starts_with("aten::"))) & ~between & ~stays)


def find_best_peak(window: Window, *types: str) -> float | None:
    """Return the highest peak of the device for one of `types` in FLOP/s; None where it has none."""
    peaks = window.device.peaks
    return max((peaks[name] for name in types if name in peaks), default=None)


def measure_speedup(window: Window, fast: tuple[str, ...], usual: tuple[str, ...], words: str) -> float:
    """Return the best peak of the types `fast` over that of the `usual` ones; 1 where the device has no path for them."""
    peak = find_best_peak(window, *fast)
    slower = require_known(find_best_peak(window, *usual), f"the {words} peak of this device is not known")
    return 1.0 if peak is None else peak / slower


def named_half_saving_ns(window: Window) -> float:
    """Time that fp32 matrix work would save in 16 bit by the ratio of the peaks, and all other kernels by moving half the bytes.

    For recordings without shapes: an upper bound, for norms and losses stay in fp32 under autocast. Without copies and collectives.
    """
    speedup = half_precision_speedup(window)
    work = find_typed_work(window).filter((pl.col("kind") == "kernel") & ~pl.col("collective").fill_null(False))
    products = (_IS_MATRIX & (pl.col("dtype") == "fp32")).fill_null(False)
    return window.saving_ns(work, pl.when(products).then(pl.col("time_ns") / speedup).otherwise(pl.col("time_ns") / 2))


REACH = 8.0
"""Sizes that differ by up to this factor from a measured one may gain as much as that: 64 x 1024 stands beside 512 x 8192 (heuristic)."""


def add_half_gain(window: Window, work: pl.DataFrame) -> pl.DataFrame:
    """Return `work` of a CPU with columns gain and most: how many times as fast calibration found work of its kind in bf16, by its size.

    gain: of the nearest size; most: the best of those within REACH of it. Casts are in it, so that small products have less than 1; what
    was not measured (recurrent layers) has 1. At most what the peaks or half the bytes allow.
    """
    limit = max(2.0, measure_speedup(window, ("bf16",), ("fp32",), "fp32"))
    gains, least = window.device.half_gains, pl.min_horizontal("m", "n", "k")
    others = (pl.col("batch") * pl.col("m") * pl.col("n") * pl.col("k") / least).sqrt()
    of_attention = work.filter(family="attention")["signature"].drop_nulls().unique()
    keys = {row: tensor.shape for row in of_attention if (tensor := window.signature(row).tensor(1)) is not None and len(tensor.shape) > 1}
    length, head = (
        pl.col("signature").replace_strict({row: shape[place] for row, shape in keys.items()}, default=None, return_dtype=pl.Int64)
        for place in (-2, -1)
    )
    sizes = {"gemm": (least, others), "conv": (pl.min_horizontal("n", "k"), pl.max_horizontal("n", "k")), "attention": (length, head)}
    gain = pl.when(_IS_MATRIX).then(1.0).otherwise(next((half.gain for half in gains if half.kind == "add"), 1.0))
    most = [gain]
    for family, (first, second) in sizes.items():
        found, own = [half for half in gains if half.kind == family], pl.col("family") == family
        away = [((first / half.least).log().abs(), (second / half.other).log().abs()) for half in found]
        nearest = pl.concat_list(one**2 + other**2 for one, other in away).list.arg_min() if found else pl.lit(None)
        for row, half in enumerate(found):
            gain = pl.when(own & (nearest == row)).then(half.gain).otherwise(gain)
            most.append(pl.when(own & (pl.max_horizontal(*away[row]) <= math.log(REACH))).then(half.gain))
    return work.with_columns(gain=pl.min_horizontal(gain, limit), most=pl.min_horizontal(pl.max_horizontal(most), limit))


def half_precision_speedup(window: Window) -> float:
    """Peak of the faster 16-bit type over the best fp32 peak (TF32 where the device has it); 1 where it has no 16-bit path.

    CPU: how many times as fast calibration found products and convolutions of the sizes of this run in bf16, weighted by their time.
    """
    speedup = measure_speedup(window, ("bf16", "fp16"), ("fp32", "tf32"), "fp32")
    if not window.on_cpu or speedup == 1:
        return speedup
    require(bool(window.device.half_gains), "what bf16 gives was not measured on this machine: run `gpudiag calibrate`, and record again")
    work = add_half_gain(window, find_fp32_work(window).filter(_IS_MATRIX))
    return float(work["time_ns"].sum()) / float((work["time_ns"] / work["gain"]).sum()) if work.height else 1.0


def half_precision_saving_ns(window: Window) -> float:
    """Time that fp32 work would save in 16 bit.

    GPU: matrix work at 75 % of that peak (or what the device attains) or 85 % of the bandwidth with half the bytes, memory-bound work half
    its time; less the casts of the weights in the forward pass. Where the bandwidth is not known the peak alone bounds the matrix work, and
    nothing else gains. CPU: where calibration found such sizes faster, as far as the peaks and roofs allow; less what it found slower.
    """
    work = find_fp32_work(window)
    if window.on_cpu:
        half_precision_speedup(window)  # raises where nothing was measured
        # an upper bound: what gains may gain what larger sizes did; products that arithmetic binds as far as their roof, for fp32 libraries
        # run narrow ones far below it (n of 7: at 3 GFLOP/s of 103, and bf16 at 10)
        gains, roof = pl.col("gain") > 1, find_best_peak(window, "bf16")
        target = estimate_target_ns(window, roof, compute=MATRIX_SHARE_OF_PEAK, memory=MEMORY_SHARE_OF_PEAK, byte_factor=0.5)
        most = pl.when(_IS_MATRIX & gains).then("most")
        above_ridge = pl.col("flops") * window.bandwidth > pl.col("bytes_moved") * require_known(
            find_best_peak(window, "fp32"), "no fp32 peak"
        )
        narrow = (pl.col("family") == "gemm") & above_ridge & gains
        gain = pl.max_horizontal("gain", most, pl.when(narrow).then(pl.col("time_ns") / target))
        left = add_half_gain(window, work).select((pl.col("time_ns") / gain).sum() / pl.col("time_ns").sum()).item()
        return window.saving_ns(work, pl.col("time_ns") * min(left or 1.0, 1.0))
    half = require_known(find_best_peak(window, "bf16", "fp16"), "this device has no 16-bit matrix path")
    rates = [window.device.attainable_rate(name, MATRIX_SHARE_OF_PEAK) for name in ("bf16", "fp16")]
    best = max((rate for rate in rates if rate is not None), default=half)
    if window.device.bandwidth_byte_per_s is None:
        return window.saving_ns(work.filter(_IS_MATRIX), pl.col("flops") / best * 1e9)
    matrix = estimate_target_ns(window, best, compute=1.0, memory=MEMORY_SHARE_OF_PEAK, byte_factor=0.5)
    rate = fused_kernels.estimate_stream_byte_per_s(window, work.filter(pl.col("bound") == "memory"))
    # The time of autocast's cast of each forward product's weights, which stay fp32: 4 B an element read, 2 B written
    weights = (pl.col("k") * pl.col("n")).fill_null(0)
    cast = (pl.col("phase") == "forward") & (pl.col("batch") == 1)
    matrix = pl.min_horizontal(matrix + pl.when(cast.fill_null(False)).then(CAST_BYTES * weights / rate * 1e9).otherwise(0.0), "time_ns")
    return window.saving_ns(work, pl.when(_IS_MATRIX).then(matrix).otherwise(pl.col("time_ns") / 2))


NO_LARGE_PRODUCT = "no 16-bit product has m, n and k of at least 4096"

LARGE_DIMENSION = 4096
"""Least m, n and k from which on the casts cost less than fp8 gives (heuristic, rules.md CMP-03)."""

FP8_MULTIPLE = 16
"""k and n of an fp8 product are multiples of 16 (torch._scaled_mm; cuBLASLt)."""

CAST_PASSES = 3
"""Sizes of each operand that scaling and casting to fp8 move: read for its maximum, read, written at half the size (rules.md CMP-03)."""


def find_large_products(window: Window) -> pl.DataFrame:
    """Return the 16-bit products that arithmetic binds with m, n and k of at least 4096, n and k multiples of 16."""
    window.require_accelerator()
    work = window.work(shapes=True).filter((pl.col("family") == "gemm") & pl.col("dtype").is_in(["bf16", "fp16"]))
    sizes = pl.min_horizontal("m", "n", "k") >= LARGE_DIMENSION
    return work.filter((pl.col("bound") == "compute") & sizes & (pl.col("n") % FP8_MULTIPLE == 0) & (pl.col("k") % FP8_MULTIPLE == 0))


def fp8_saving_ns(window: Window) -> float:
    """Time that these products would save in fp8: their time over fp8_speedup, and the casts of both operands at 85 % of the bandwidth."""
    speedup = measure_speedup(window.require_accelerator(), ("fp8",), ("bf16", "fp16"), "16-bit")
    operands = (pl.col("m") + pl.col("n")) * pl.col("k") * pl.col("item_bytes")
    casts = CAST_PASSES * operands / (MEMORY_SHARE_OF_PEAK * window.bandwidth) * 1e9
    return window.saving_ns(find_large_products(window), pl.col("time_ns") / speedup + casts)


# fmt: off
FACTS = (
    kernel_share("slow_matrix_share", "Time in fp32 matrix products and convolutions without TF32, and in fp64 ones",
         find_slow_matrix_work),
    fact("tf32_speedup", "ratio", "TF32 peak over fp32 vector peak of the device; 1 where it has no TF32 path.",
         gpu_only(lambda window: measure_speedup(window, ("tf32",), ("fp32",), "fp32"))),
    kernel_share("fp64_work_share", "Time in fp64 ops of all kinds, on a GPU the optimizer aside, on a CPU ops that are only dispatched",
         find_fp64_work),
    fact_of(slow_path_saving_ns, "ns"),
    fact("fp64_convolution_share", "share", "Time in fp64 convolutions over the wall time of the analysed steps.",
         lambda window: window.share_of_wall(find_typed_work(window).filter((pl.col("family") == "conv") & (pl.col("dtype") == "fp64")))),
    fact("fp64_matrix_share", "share", "Time in fp64 matrix products and convolutions over the wall time of the analysed steps.",
         lambda window: window.share_of_wall(find_typed_work(window).filter(_IS_MATRIX).filter(pl.col("dtype") == "fp64"))),
    fact("fp32_matrix_flop_share", "share", "Part of the matrix FLOP (products, convolutions, attention) whose inputs are fp32.",
         lambda window: (float(work.filter(pl.col("dtype") == "fp32")["flops"].sum()) / flop
                         if (flop := float((work := window.work(shapes=True).filter(_KNOWN_MATRIX))["flops"].sum())) > 0
                         else raise_unknown("no matrix work with known FLOP and types was recorded"))),
    fact("fp32_matrix_share", "share", "Time in fp32 products, convolutions and attention, optimizer aside, over the wall time of the "
         "analysed steps.", lambda window: window.share_of_wall(find_fp32_work(window).filter(_IS_MATRIX))),
    kernel_share("fp32_work_share", "Time in fp32 matrix work and the fp32 ops that follow it under autocast", find_fp32_work),
    fact("fp32_computing_share", "share", "Time in fp32 products and convolutions that arithmetic binds, over the wall time of the "
         "analysed steps.",
         lambda window: window.share_of_wall(find_fp32_work(window).filter(_IS_MATRIX & (pl.col("bound") == "compute")))),
    fact("has_bf16_path", "bool", "Whether the device has matrix engines for bf16 (V100 and T4 emulate it, and gain nothing).",
         lambda window: "bf16" in window.device.peaks),
    fact_of(half_precision_speedup, "ratio"),
    fact_of(named_half_saving_ns, "ns"),
    fact_of(half_precision_saving_ns, "ns"),
    fact("bandwidth_known", "bool", "Whether the memory bandwidth of the device is known.",
         lambda window: window.device.bandwidth_byte_per_s is not None),
    fact("fp8_speedup", "ratio", "Peak of fp8 over that of bf16; 1 where the device has no fp8 path (before compute capability 8.9, "
         "gfx942).", gpu_only(lambda window: measure_speedup(window, ("fp8",), ("bf16", "fp16"), "16-bit"))),
    kernel_share("large_product_share", "Time in 16-bit products with m, n and k of at least 4096 that arithmetic binds",
         find_large_products),
    fact("large_product_efficiency", "share", "Roofline time of these products over their time.",
         lambda window: divide_sums(find_large_products(window).drop_nulls("t_roof_ns"), "t_roof_ns", "time_ns", NO_LARGE_PRODUCT)),
    fact_of(fp8_saving_ns, "ns"),
)
# fmt: on
