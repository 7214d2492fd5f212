"""Facts about work that has a fused kernel of its own: attention and the loss over a large vocabulary; how fast one fused pass runs."""

from __future__ import annotations

import math
from collections.abc import Callable

import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.attribution.names import match_column
from gpudiag.facts.hardware_state import read_memory
from gpudiag.facts.input_pipeline import drop_loading
from gpudiag.facts.registry import NotKnownError, fact, fact_of, kernel_time, require
from gpudiag.facts.window import Window, cache_by_window
from gpudiag.model.ops import Input, Signature
from gpudiag.roofline import op_calls

MEMORY_SHARE_OF_PEAK = 0.85
"""Share of the bandwidth that kernels usually reach (the factor of the gain bounds of rules.md, MEM).

No bound of what fusing gives: the best reach 97 % (tests/benchmarks/RESULTS.md).
"""

NARROWEST_BYTES = pl.min_horizontal(
    "item_bytes", pl.when(pl.col("copy_kind") == "cast").then(pl.col("bytes_moved") / pl.col("numel") - pl.col("item_bytes"))
).cast(pl.Float64)
"""Bytes of an element of a call's tensor: of a cast, which reads one type and writes another, those of the narrower."""

STREAMING_BYTES = 1_000_000
"""Calls that move less take longer to be issued than to stream (1 MB in 20 us at 50 GB/s): their rate says nothing of memory."""

MINOR_SHARE = 0.1
"""Share of the time of the work below which a kind of op does not set the rate: a handful of calls may be fast by chance."""

TRANSCENDENTAL = (
    "cos", "sin", "tan", "tanh", "exp", "expm1", "exp2", "log", "log1p", "log2", "pow", "sigmoid", "erf", "erfinv", "gelu",
    "gelu_backward", "silu", "silu_backward", "mish", "mish_backward", "softplus", "softplus_backward", "elu", "celu", "selu", "atan2",
    "sinh", "cosh", "asin", "acos", "atan", "logit", "log_sigmoid_forward",
)  # fmt: skip
"""Element-wise ops that compute for long on a CPU: fusing saves their traffic, not their arithmetic."""

MULTIPLIED_POWERS = (-2, -1, -0.5, 0.5, 1, 2, 3)
"""Exponents for which torch multiplies, divides or takes a root (ATen/native/cpu/PowKernel.cpp)."""

RANDOM_OPS = (
    r"^aten::(bernoulli|normal|uniform|random|randperm|exponential|log_normal|cauchy|geometric|poisson|binomial|multinomial"
    r"|_standard_gamma|_sample_dirichlet|native_dropout|_fused_dropout)_?$"
)
"""Ops that draw random numbers (native_functions.yaml; rand, randn, randint and dropout call them)."""


def estimate_stream_byte_per_s(window: Window, work: pl.DataFrame) -> float:
    """Return the rate in byte/s at which one fused pass over the data of `work` would run.

    GPU: 85 % of the bandwidth. CPU: the best rate that a kind of op of `work` reaches in this run: fresh results are page faults, and
    other processes use the same memory, so that the peak of a quiet machine promises too much; 85 % of the bandwidth where none is large.
    """
    peak = MEMORY_SHARE_OF_PEAK * window.bandwidth
    if not window.on_cpu:
        return peak
    large = work.filter(pl.col("bytes_moved") >= STREAMING_BYTES)
    sums = large.group_by("op_name").agg(pl.col("bytes_moved").sum(), pl.col("time_ns").sum())
    rates = sums.filter(pl.col("time_ns") >= MINOR_SHARE * pl.col("time_ns").sum()).select(pl.col("bytes_moved") / pl.col("time_ns") * 1e9)
    return float(rates.to_series().max()) if rates.height else peak  # type: ignore[arg-type]


def estimate_streaming_saving_ns(window: Window, find: Callable[[Window], pl.DataFrame]) -> float:
    """Return the time in ns saved where the kernels that `find` returns move their bytes at 85 % of the bandwidth."""
    floor = pl.col("bytes_moved") / (MEMORY_SHARE_OF_PEAK * window.bandwidth) * 1e9
    return window.saving_ns(find(window), floor)


def estimate_fused_saving_ns(window: Window, work: pl.DataFrame, fused_bytes: float) -> float:
    """Return the time in ns that the kernels `work` would save at most as fused passes that move `fused_bytes` in all.

    At the whole bandwidth of a GPU (see estimate_stream_byte_per_s for a CPU). What the host takes between them is not in it (see
    measure_gaps_within_ns).
    """
    total = float(work["time_ns"].sum())
    if not total:
        return 0.0
    rate = estimate_stream_byte_per_s(window, work) if window.on_cpu else window.bandwidth
    floor = fused_bytes / rate * 1e9 + estimate_arithmetic_ns(window, work, rate)
    return window.saving_ns(work, pl.col("time_ns") * min(floor / total, 1.0))


def estimate_arithmetic_ns(window: Window, work: pl.DataFrame, rate: float) -> float:
    """Return what transcendental ops on a CPU take beyond streaming their bytes at `rate`: arithmetic that stays when they are fused."""
    if not window.on_cpu:
        return 0.0
    work = work.filter(pl.col("op_name").is_in([f"aten::{name}{end}" for name in TRANSCENDENTAL for end in ("", "_")]))
    power = pl.col("op_name").str.starts_with("aten::pow")
    rows = work.filter(power)["signature"].drop_nulls().unique()
    multiplied = [row for row in rows if window.signature(row).value(1) in MULTIPLIED_POWERS]
    work = work.filter(~(power & pl.col("signature").is_in(multiplied).fill_null(False)))
    sums = work.group_by("op_name").agg(pl.col("bytes_moved").sum(), pl.col("time_ns").sum())
    return float((sums["time_ns"] - sums["bytes_moved"] / rate * 1e9).clip(lower_bound=0).sum())


def measure_gaps_within_ns(window: Window, within: spans.Spans) -> int:
    """Return how long in ns the device waited for Python and the framework inside the time spans `within`."""
    return int(spans.measure_overlap(window.idle_spans("idle_launch"), spans.merge_spans(within)))


def measure_host_part_within(window: Window, within: spans.Spans) -> float:
    """Return which part, 0..1, of all waits for Python and the framework lies inside the time spans `within`; 0 where there are none."""
    waits = window.analysis.breakdown.buckets_ns.idle_launch
    return min(measure_gaps_within_ns(window, within) / waits, 1.0) if waits else 0.0


def find_group_spans(work: pl.DataFrame, keys: list[str]) -> spans.Spans:
    """Return the time from the first start to the last end of each group of rows of `work`."""
    return spans.build_spans(work.group_by(keys).agg(pl.col("start_ns").min(), pl.col("end_ns").max()).sort("start_ns"))


CAUSAL_PART = 0.5
"""Part of the scores that a causal mask leaves to compute (Dao et al. 2022, FlashAttention: blocks above the diagonal are skipped)."""

MATRIX_SHARE_OF_PEAK = 0.6

Score = tuple[int, int, int]
"""Size of a score matrix [.., Sq, Sk]: (elements, Sq, Sk). Folding batch and heads does not change it."""

_PRODUCTS = ("bmm", "baddbmm", "matmul")


def _score_shape(shape: tuple[int, ...]) -> Score | None:
    return (math.prod(shape), shape[-2], shape[-1]) if len(shape) >= 3 else None


def _product_output(name: str, signature: Signature) -> Input | None:
    first = 1 if op_calls.find_base_name(name) == "baddbmm" else 0
    a, b = signature.tensor(first), signature.tensor(first + 1)
    if op_calls.find_base_name(name) not in _PRODUCTS or a is None or b is None or len(a.shape) < 3 or len(b.shape) < 3:
        return None
    return Input(dtype=a.dtype, shape=(*a.shape[:-1], b.shape[-1]))


@cache_by_window
def find_unfused_attention(window: Window) -> pl.DataFrame:
    """Return the kernels of attention that is not fused, with columns other_bytes (of q, k, v, output per call) and length (Sk).

    A score matrix [.., Sq, Sk] counts where a batched product makes one of that size, a softmax normalises one and a batched
    product reads one; its kernels are the products, softmaxes, element-wise ops and copies that touch a tensor of that size.
    """
    calls = window.work(shapes=True).select("op_name", "signature", "family").unique().drop_nulls()
    calls = calls.filter(pl.col("family").is_in(["gemm", "softmax", "elementwise", "copy"])).sort("op_name", "signature")
    parsed = {(name, row): window.signature(row) for name, row, _ in calls.iter_rows()}
    made, read, normalised = set(), set(), set()
    for (name, _), signature in parsed.items():
        inputs = {score for item in signature.inputs if item.is_tensor and (score := _score_shape(item.shape))}
        if op_calls.find_family(name) == "softmax" or op_calls.find_base_name(name) == "exp":  # softmax may be written by hand
            normalised |= inputs
        output = _product_output(name, signature)
        if output is not None:
            read |= inputs
            if (score := _score_shape(output.shape)) is not None:
                made.add(score)
    proven = made & read & normalised
    either_way = proven | {(n, sk, sq) for n, sq, sk in proven}
    rows = []
    for (name, row), signature in parsed.items():
        output = _product_output(name, signature)
        tensors = [item for item in signature.inputs if item.is_tensor] + ([output] if output else [])
        touched = {score for item in tensors if (score := _score_shape(item.shape)) is not None and score in proven}
        if touched:
            others = (item for item in tensors if _score_shape(item.shape) not in either_way)
            other_bytes = sum(item.numel * item.item_bytes for item in others) if op_calls.find_family(name) == "gemm" else 0
            rows.append((name, row, other_bytes, max(length for _, _, length in touched)))
    columns = {"op_name": pl.String, "signature": pl.Int64, "other_bytes": pl.Int64, "length": pl.Int64}
    return window.kernels.join(pl.DataFrame(rows, schema=columns, orient="row"), on=["op_name", "signature"], how="inner")


def unfused_attention_saving_ns(window: Window) -> float:
    """Time that unfused attention would save in a fused kernel.

    That one runs at 60 % of the matrix peak or 85 % of the bandwidth and does not move the score matrix. On a CPU it still does the
    products and the exponentials, at the rates that they reach now, though a causal mask lets it skip half of them.
    """
    work = find_unfused_attention(window)
    require(work.height > 0, "no unfused attention")
    products = work.filter(pl.col("family") == "gemm")
    dtype = products["dtype"].drop_nulls().mode().sort()
    peak = window.device.matrix_peak(str(dtype[0])) if len(dtype) else None
    if peak is None or products["flops"].null_count() == products.height:
        raise NotKnownError("the FLOP of the attention products or the peak for their type are not known")
    per_call = products.group_by("call").agg(pl.col("other_bytes").first())
    by_flop = float(products["flops"].sum()) / (MATRIX_SHARE_OF_PEAK * peak) * 1e9
    by_bytes = float(per_call["other_bytes"].sum()) / (MEMORY_SHARE_OF_PEAK * window.bandwidth) * 1e9
    floor_ns = max(by_flop, by_bytes)
    if window.on_cpu:
        kept = (pl.col("family") == "gemm") | pl.col("op_name").str.contains(r"^aten::_(safe_)?softmax$")
        floor_ns = max(floor_ns, CAUSAL_PART * float(work.filter(kept)["time_ns"].sum()))
    return window.saving_ns(work, pl.col("time_ns") * floor_ns / float(work["time_ns"].sum()))


def _find_square_mask(signature: Signature) -> int | None:
    """Return S where attention reads one mask [S, S] for all samples and heads (of dimensions that are expanded, the stride is 0)."""
    query, *others = [item for item in signature.inputs if item.is_tensor] or [Input()]
    for item in others:
        own = [size for size, stride in zip(item.shape, item.strides or item.shape, strict=False) if stride]
        square = len(own) > 1 and own[-1] == own[-2] and math.prod(own) == own[-1] ** 2
        if square and own[-1] in query.shape[:-1] and own[-1] != query.shape[-1]:
            return own[-1]
    return None


@cache_by_window
def find_masked_attention(window: Window) -> pl.DataFrame:
    """Return the kernels of fused attention that read a mask [S, S] for all samples and heads, with column length (S)."""
    work = window.work(shapes=True).filter(pl.col("op_name").str.contains(r"^aten::_(scaled_dot_product|efficient|cudnn).*attention"))
    masks = {row: _find_square_mask(window.signature(row)) for row in work["signature"].drop_nulls().unique()}
    length = pl.col("signature").replace_strict(masks or {0: None}, default=None, return_dtype=pl.Int64)
    return work.with_columns(length=length).drop_nulls("length")


def masks_triangle(window: Window) -> bool:
    """Whether the mask of masked_attention_ns is causal, as the recording shows: tril or triu, not both, cut a matrix of its size."""
    lengths = set(find_masked_attention(window)["length"])
    cuts = window.recorded_ops.filter(match_column("name", r"^aten::tri[lu]_?$")).drop_nulls("signature")
    pairs = cuts.select(pl.col("name").cast(pl.String).str.strip_chars_end("_"), "signature").unique().iter_rows()
    return len({name for name, row in pairs if (x := window.signature(row).tensor(0)) and {*x.shape[-2:]} <= lengths}) == 1


def masked_attention_saving_ns(window: Window) -> float:
    """Time that attention with such a mask would save with is_causal=True: half; on a GPU at 60 % of the roofline of the other half."""
    floor = CAUSAL_PART * pl.col("time_ns")
    best = CAUSAL_PART / MATRIX_SHARE_OF_PEAK * pl.col("t_roof_ns")
    return window.saving_ns(find_masked_attention(window), floor if window.on_cpu else pl.min_horizontal(floor, best))


@cache_by_window
def find_random_work(window: Window) -> pl.DataFrame:
    """Return the kernels that draw random numbers."""
    return window.work().filter(pl.col("op_name").str.contains(RANDOM_OPS).fill_null(False))


def find_drawn_outside(window: Window) -> pl.DataFrame:
    """Return the random numbers that are drawn in neither pass, optimizer nor loader: indices, noise, inputs."""
    return drop_loading(window, find_random_work(window).filter(pl.col("phase") == "other"))


def without_drawing_ns(window: Window) -> float:
    """Time of the random numbers outside the passes, where that is most of them: what other numbers in the passes save is not known."""
    drawn, outside = find_random_work(window), find_drawn_outside(window)
    require(2 * outside["time_ns"].sum() > drawn["time_ns"].sum(), "most random numbers are drawn in the passes, where they are needed")
    return window.saving_ns(outside, pl.lit(0))


def attention_drops(window: Window) -> bool:
    """Whether unfused attention drops scores: as many random numbers are drawn as a score matrix has elements.

    On a CPU scaled_dot_product_attention has no fused kernel with dropout (ATen: use_flash_attention_cpp), and composes the same ops.
    """
    scores = find_unfused_attention(window).filter(pl.col("family") == "softmax")["numel"]
    return bool(find_random_work(window)["numel"].is_in(scores.implode()).any())


LARGE_VOCABULARY = 16_384
"""Classes from which on the loss is worth a kernel of its own (rules.md MEM-04: V >= 16k)."""

_NORMALISED = ("aten::_log_softmax", "aten::_log_softmax_backward_data")
_NODES = r"LogSoftmaxBackward0|NllLossBackward0"
_FAMILIES = ("softmax", "elementwise", "copy", "fill", "reduction", "other")

NO_LARGE_LOSS = "no loss over 16,384 or more classes was computed"

FUSED_PASSES = 2
"""Sizes of the logits that a fused loss moves: read once, the gradient written once (op_costs.md section 5)."""


@cache_by_window
def find_vocabulary_work(window: Window) -> pl.DataFrame:
    """Return the kernels of losses over at least 16k classes: log-softmax, and what else handles a tensor of the size of its logits.

    Casts, scalings and zeros of that size count with them, matrix products do not; the optimizer neither.
    """
    work = window.work(shapes=True)
    calls = work.filter(pl.col("op_name").is_in(_NORMALISED)).select("op_name", "signature", "numel").unique().drop_nulls()
    sizes = []
    for name, row, numel in calls.iter_rows():
        signature = window.signature(row)
        x, dim = signature.tensor(0), signature.value(2 if name.endswith("_data") else 1)
        over_last = x is not None and len(x.shape) >= 2 and dim in (None, -1, len(x.shape) - 1)
        if x is not None and over_last and x.shape[-1] >= LARGE_VOCABULARY:
            sizes.append(numel)
    if not sizes:
        return work.clear()
    same = pl.col("numel").is_in(sizes) & pl.col("family").is_in(_FAMILIES) & pl.col("phase").ne_missing("optimizer")
    return work.filter(same.fill_null(False) | pl.col("op_name").str.contains(_NODES).fill_null(False))


def _measure_logits(window: Window) -> pl.Series:
    found = find_vocabulary_work(window).filter(pl.col("op_name") == _NORMALISED[0]).unique("call")
    require(found.height > 0, NO_LARGE_LOSS)
    return found["numel"] * found["item_bytes"]


def vocabulary_saving_ns(window: Window) -> float:
    """Time that the loss would save as one fused kernel that reads the logits and writes their gradient (2 passes of 6).

    At the whole bandwidth, in the type before a cast; on a CPU at the best rate that its own ops reach.
    """
    work = find_vocabulary_work(window)
    logits = work.filter(pl.col("op_name") == _NORMALISED[0]).unique("call")["numel"]
    require(logits.len() > 0, NO_LARGE_LOSS)
    narrowest = work.filter(pl.col("numel").is_in(logits.implode())).select(NARROWEST_BYTES.min()).item()
    fused = FUSED_PASSES * float(logits.sum()) * (narrowest or 4.0)
    return estimate_fused_saving_ns(window, work, fused)


def find_longest(find: Callable[[Window], pl.DataFrame]) -> Callable[[Window], int]:
    """Return what tells the longest sequence (column length) of the attention that `find` returns; 0 where there is none."""
    return lambda window: max(find(window)["length"].to_list(), default=0)


# fmt: off
FACTS = (
    *kernel_time("unfused_attention", "Time in attention that writes its score matrix out (product, softmax, product)",
         find_unfused_attention),
    fact("unfused_attention_length", "count", "Longest key sequence of unfused attention; 0 where there is none.",
         find_longest(find_unfused_attention)),
    fact_of(unfused_attention_saving_ns, "ns"),
    fact_of(attention_drops, "bool"),
    *kernel_time("masked_attention", "Time in fused attention that reads one mask [S, S] for all samples and heads, forward and backward",
         find_masked_attention),
    fact("masked_attention_length", "count", "The longest such S; 0 where there is none.", find_longest(find_masked_attention)),
    fact_of(masks_triangle, "bool"),
    fact_of(masked_attention_saving_ns, "ns"),
    *kernel_time("random_number", "Time of drawing random numbers: dropout, noise, permutations", find_random_work),
    fact("drawn_outside_share", "share", "The part of random_number_share that lies in no pass: indices, noise, inputs of the loop's own "
         "code.", lambda window: window.share_of_wall(find_drawn_outside(window))),
    fact_of(without_drawing_ns, "ns"),
    *kernel_time("vocabulary_loss", "Time of cross-entropy over 16k or more classes (log-softmax, casts, zeros and copies of that size)",
         find_vocabulary_work),
    fact("vocabulary_logits_bytes", "B", "Bytes of the largest logits that a loss over 16k or more classes normalises, in the type that "
         "it does so.", lambda window: int(max(_measure_logits(window)))),
    fact("vocabulary_memory_share", "share", "Logits and their gradient, twice vocabulary_logits_bytes, over the peak of the memory in "
         "use.", lambda window: 2 * int(max(_measure_logits(window))) / read_memory(window).peak_bytes),
    fact_of(vocabulary_saving_ns, "ns"),
)
# fmt: on
