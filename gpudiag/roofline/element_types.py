"""Types and widths of tensor elements that were not recorded: from the names of kernels, and from tensors of the same shape.

Widths from tensors of the same shape: the result of a join is taken by one of the next calls of its thread; parameters of an optimizer
have the shapes, and the dtype, of the gradients that autograd accumulated for them. Both hold as far as all tensors of the shape agree.

Lists of tensors: kernel names hold the dtype as a template argument: aten/src/ATen/native/cuda/Shape.cu (CatArrayBatchedCopy<T, ...>;
torch >= 2.1 copies by width: OpaqueType<bytes>; the vectorised copy has alignment and elements of a vector last) and ForeachFunctors,
MultiTensorApply, FusedAdamMathFunctor.cuh (multi_tensor_apply_kernel<..., XFunctor<T, ...>>). What no name tells (a CPU has none),
`find_list_item_bytes` tells. A call of unknown type keeps 4 bytes an element, as a generic cost.

Types from kernel names, where only sizes were recorded (emit_nvtx under Nsight Systems, PyTorch's profiler in 2020): taken for ops whose
tensors all have one type: matrix products, convolutions, attention, elementwise ops. What the names do not tell, or not with one voice,
stays unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import prod

import msgspec
import numpy as np
import polars as pl

from gpudiag.arrays import Ints
from gpudiag.attribution.names import decode_column, decode_names, match_names
from gpudiag.attribution.nesting import find_nearest
from gpudiag.model.notices import Notice, NoticeCode, make_notice
from gpudiag.model.ops import DTYPES, ITEM_BYTES, Cost, Shape, Signature
from gpudiag.model.trace import Trace, build_table_schema
from gpudiag.roofline.costs.optimizers import ASSUMED_BYTES
from gpudiag.roofline.costs.registry import find_dtype_category
from gpudiag.roofline.inferred_costs import LOOK_AHEAD, find_next_rows
from gpudiag.roofline.op_roles import AttributedOps

_ACCUMULATE = "AccumulateGrad"
_JOIN_OP = r"^aten::_?(cat|stack|concat|concatenate|chunk_cat)$"


def find_join_item_bytes(ops: pl.DataFrame, parsed: Mapping[int, Signature], rows: Ints) -> Ints:
    """Find the bytes per element of the results of the joins `rows` (cat, stack); 0: not known.

    That of the next tensor of their size, else that of all tensors with the shapes of their list.
    """
    signature = ops["signature"].fill_null(-1).to_numpy()
    join = match_names(ops["name"], _JOIN_OP).to_numpy()
    parent = ops["parent"].fill_null(-1).to_numpy()
    looking = find_nearest(parent, join & ~np.append(join, False)[parent])[rows]
    found = np.zeros(len(rows), dtype=np.int64)
    seen: dict[tuple[int, int], int] = {}
    places = np.arange(len(rows))
    for _ in range(2 * LOOK_AHEAD):
        looking = find_next_rows(ops, looking)
        places, looking = places[looking >= 0], looking[looking >= 0]
        pairs = list(zip(signature[rows[places]].tolist(), signature[looking].tolist(), strict=True))
        for pair in set(pairs) - seen.keys():
            listed, taker = parsed[pair[0]].inputs[0].tensors or (), parsed.get(pair[1])
            elements, rank = sum(prod(shape) for shape in listed), max((1, *(len(shape) for shape in listed)))
            inputs = [item for item in taker.inputs if item.is_tensor] if taker is not None else []
            fitting = {item.item_bytes for item in inputs if item.numel == elements and len(item.shape) >= rank}
            seen[pair] = fitting.pop() if len(fitting) == 1 else 0
        widths = np.array([seen[pair] for pair in pairs], dtype=np.int64)
        found[places] = widths
        places, looking = places[widths == 0], looking[widths == 0]
    tables = (_collect_widths(parsed.values(), floating=False),)
    open_rows = found == 0
    of_signature = {row: _find_listed_width(parsed[row], tables) for row in set(signature[rows[open_rows]].tolist())}
    found[open_rows] = [of_signature[row] for row in signature[rows[open_rows]].tolist()]
    return found


def find_list_item_bytes(ops: pl.DataFrame, parsed: Mapping[int, Signature], rows: Ints) -> Ints:
    """Find the bytes per element of the tensor lists of the calls `rows`; 0 where tensors of their shapes differ, or there are none.

    By the gradients that autograd accumulated, else by all floating tensors of the recording.
    """
    name = decode_names(ops["name"])
    accumulated = ops.filter(name.str.ends_with(_ACCUMULATE))["signature"].drop_nulls().unique()
    tables = (
        _collect_widths((parsed[row] for row in accumulated.to_list()), floating=True),
        _collect_widths(parsed.values(), floating=True),
    )
    signature = ops["signature"].gather(rows).to_list()
    of_signature = {row: _find_listed_width(parsed[row], tables) for row in set(signature)}
    return np.array([of_signature[row] for row in signature], dtype=np.int64)


def _collect_widths(signatures: Iterable[Signature], *, floating: bool) -> dict[Shape, set[int]]:
    found: dict[Shape, set[int]] = {}
    for signature in signatures:
        for item in signature.inputs:
            if item.is_tensor and item.shape and (find_dtype_category(item.dtype or "") >= 2 or not floating):
                found.setdefault(item.shape, set()).add(ITEM_BYTES[item.dtype or ""])
    return found


def _find_listed_width(signature: Signature, tables: tuple[dict[Shape, set[int]], ...]) -> int:
    """Find the width of the list's tensors by the first table that knows most of its elements, 0 where none does."""
    listed = signature.inputs[0].tensors or ()
    whole = sum(prod(shape) for shape in listed)
    for table in tables:
        known = [shape for shape in listed if shape in table]
        widths = set().union(*(table[shape] for shape in known))
        if len(widths) == 1 and 2 * sum(prod(shape) for shape in known) >= whole:
            return int(widths.pop())
    return 0


_TYPE = r"(?:[\w:() ]*OpaqueType<(?P<width>\d{1,2})u?>|(?P<type>(?:c10::|signed |unsigned |long |short )?\w+(?:<\w+>)?))[,>]"
_CAT = re.compile(r"\bCatArrayBatchedCopy(?!_vectorized)\w*<" + _TYPE)
_CAT_VECTORS = re.compile(r"\bCatArrayBatchedCopy_vectorized<[^<>]*(?:<[^<>]*>)?[^<>]*,\s*(?P<alignment>\d{1,3}),\s*(?P<elements>\d{1,3})>")
_FOREACH = re.compile(r"\bmulti_tensor_apply_kernel<.*?Functor<" + _TYPE)

_CASTS = re.compile(r"\((?:unsigned )?(?:int|long)\)(?=\d)|<unnamed>::")
"""How another demangler writes OpaqueType<2u>: at::native::<unnamed>::OpaqueType<(unsigned int)2>."""

_JOINS = ("aten::cat", "aten::_cat", "aten::stack", "aten::_stack", "aten::concat", "aten::concatenate", "aten::_chunk_cat")
_LISTS = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")
_MIXED = ("aten::_foreach_copy", "aten::_foreach_mm")
"""The lists of these may differ in dtype, or their cost does not scale with it."""


def parse_item_bytes(kernel: str) -> int | None:
    """Parse the bytes per element of the tensor list that a kernel of this name works on; None where the name does not tell."""
    kernel = _CASTS.sub("", kernel)
    vectors = _CAT_VECTORS.search(kernel)
    if vectors is not None:
        return int(vectors.group("alignment")) // max(int(vectors.group("elements")), 1) or None
    match = _CAT.search(kernel) or _FOREACH.search(kernel)
    if match is None:
        return None
    if match.group("width"):
        return int(match.group("width")) or None
    return ITEM_BYTES.get(DTYPES.get(match.group("type"), ""))


def resolve_list_types(trace: Trace, owners: AttributedOps) -> None:
    """Give the calls of `owners` on tensor lists the bytes at the width of their elements instead of the assumed one."""
    chosen = []
    for call, (name, cost) in enumerate(zip(owners.names, owners.costs, strict=True)):
        of_lists = name in _JOINS or (name.startswith(_LISTS) and not name.startswith(_MIXED))
        if of_lists and isinstance(cost, Cost) and cost.provenance == "derived":
            chosen.append(call)
    frame = pl.DataFrame({"call": owners.call, "owner": owners.owner}).with_columns(decode_names(trace.kernels["name"]))
    frame = frame.filter(pl.col("call").is_in(chosen))
    parsed = owners.parsed
    listed = {row for row, signature in parsed.items() if signature.inputs and signature.inputs[0].tensors}
    frame = frame.with_columns(trace.ops["signature"].gather(frame["owner"])).filter(pl.col("signature").is_in(list(listed)))
    if not frame.height:
        return
    widths = {name: parse_item_bytes(name) for name in frame["name"].unique().to_list()}
    frame = frame.with_columns(width=pl.col("name").replace_strict(widths, default=None, return_dtype=pl.Int64))
    frame = frame.sort("width", nulls_last=True, maintain_order=True).unique("owner", keep="first", maintain_order=True)
    joins = [call for call in chosen if owners.names[call] in _JOINS]
    silent = frame.filter(pl.col("width").is_null())
    if silent.height:
        rows = silent["owner"].to_numpy()
        taken = np.where(
            silent["call"].is_in(joins), find_join_item_bytes(trace.ops, parsed, rows), find_list_item_bytes(trace.ops, parsed, rows)
        )
        told = silent.select("owner", told=pl.Series(taken, dtype=pl.Int64).replace(0, None))
        frame = frame.join(told, on="owner", how="left", maintain_order="left").with_columns(pl.coalesce("width", "told").alias("width"))
    # A cost of its own for each call and width that is another one (null: not known)
    of_owner = np.full(int(owners.owner.max(initial=-1)) + 2, -1, dtype=np.int64)  # row -1 is the last
    others = frame.filter(pl.col("width").ne_missing(ASSUMED_BYTES))
    for (row, width), members in others.group_by("call", "width", maintain_order=True):
        call, cost = int(str(row)), owners.costs[int(str(row))]
        if not isinstance(cost, Cost):
            continue
        if width is None:
            rescaled = msgspec.structs.replace(cost, provenance="generic")
        else:
            rescaled = msgspec.structs.replace(cost, bytes=cost.bytes * int(str(width)) // ASSUMED_BYTES)
        of_owner[members["owner"].to_numpy()] = owners.add(rescaled, owners.names[call])
    owners.call = np.where(of_owner[owners.owner] >= 0, of_owner[owners.owner], owners.call)


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

_FLOAT_WEIGHTS = r"^aten::((cudnn|native|miopen)_batch_norm|native_layer_norm|native_group_norm)(_backward)?$"
"""Their weights may be fp32 beside inputs of 16 bits, never the other way round."""


def infer_named_types(trace: Trace) -> tuple[Trace, tuple[Notice, ...]]:
    """Return `trace` (stage 'link') with types in the signatures of ops whose kernels' names tell them, and a notice that says so.

    The same trace where types were recorded.
    """
    if not trace.signatures.height or trace.signatures["dtypes"].null_count() < trace.signatures.height:
        return trace, ()
    # (op, signature, dtype) of the ops all of whose kernels that tell a type tell the same one
    kernels = trace.kernels.select("kind", "op", "name", "busy_ns").filter((pl.col("kind") == "kernel") & pl.col("op").is_not_null())
    name = decode_column("name").str.replace(_PARAMETERS, ">")
    dtype = pl.coalesce(*(pl.when(name.str.contains(pattern)).then(pl.lit(word)) for pattern, word in _WORDS))
    typed_names = kernels.select(pl.col("name").unique()).with_columns(dtype=dtype)
    told = kernels.join(typed_names, on="name", how="inner").drop_nulls("dtype")
    told = told.group_by("op").agg(pl.col("dtype").first(), several=pl.col("dtype").n_unique() > 1)
    ops = trace.ops.select(pl.col("id").alias("op"), "signature", decode_column("name").alias("op_name"))
    told = told.join(ops, on="op", how="inner").filter(~pl.col("several") & (pl.col("dtype") != "") & pl.col("signature").is_not_null())
    alike = pl.col("op_name").str.contains(_ONE_TYPE) | (pl.col("op_name").str.contains(_FLOAT_WEIGHTS) & (pl.col("dtype") == "float"))
    told = told.filter(alike).select("op", "signature", "dtype").sort("op")
    pairs = told.select("signature", "dtype").unique(maintain_order=True)
    pairs = pairs.with_columns(new=pl.int_range(pl.len(), dtype=pl.Int64) + trace.signatures.height)
    told = told.join(pairs, on=["signature", "dtype"], how="left", maintain_order="left")
    rows = trace.ops["signature"].scatter(told["op"].to_numpy(), told["new"]) if told.height else trace.ops["signature"]
    # what has no sizes may be a plain value and gets no type
    shapes = trace.signatures["shapes"].gather(pairs["signature"])
    dtypes = [_repeat_type(text, dtype) for text, dtype in zip(shapes.to_list(), pairs["dtype"].to_list(), strict=True)]
    blank = [pl.lit(None, dtype=pl.String).alias(name) for name in ("strides", "args")]
    added = pl.DataFrame({"id": pairs["new"], "shapes": shapes, "dtypes": pl.Series(dtypes, dtype=pl.String)}).with_columns(blank)
    added = added.select(list(build_table_schema("signatures")))
    typed = msgspec.structs.replace(
        trace,
        ops=trace.ops.with_columns(rows.alias("signature")),
        signatures=pl.concat([trace.signatures, added]),
    )
    lengths = kernels["busy_ns"].to_numpy()
    share = float(lengths[np.isin(kernels["op"].to_numpy(), told["op"].to_numpy())].sum() / max(lengths.sum(), 1))
    return typed, (make_notice(NoticeCode.TYPES_FROM_NAMES, share=share),)


def _repeat_type(shapes: str, dtype: str) -> str | None:
    try:
        sizes = msgspec.json.decode(shapes, type=list[list[int]])
    except msgspec.DecodeError:
        return None
    return msgspec.json.encode([dtype if shape else "" for shape in sizes]).decode()
