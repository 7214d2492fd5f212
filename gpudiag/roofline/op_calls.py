"""What the rules need to know of a call beyond its cost: op family, dtype, GEMM dimensions, copy kind. Once per distinct signature."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import msgspec
import polars as pl

from gpudiag.model.ops import ITEM_BYTES, Signature, parse_signature
from gpudiag.roofline.costs.elementwise import POINTWISE, find_result_dtype
from gpudiag.roofline.costs.registry import broadcast_shapes

_NAMES = {
    "gemm": """
        mm addmm bmm baddbmm linear matmul _addmm_activation _scaled_mm _int_mm addbmm
    """,
    "conv": """
        convolution _convolution convolution_overrideable cudnn_convolution cudnn_convolution_transpose cudnn_convolution_relu
        cudnn_convolution_add_relu miopen_convolution miopen_convolution_transpose miopen_depthwise_convolution
        mkldnn_convolution thnn_conv2d _slow_conv2d_forward slow_conv3d _conv_depthwise2d conv_depthwise3d convolution_backward
        convolution_backward_overrideable cudnn_convolution_backward cudnn_convolution_backward_input
        cudnn_convolution_backward_weight miopen_convolution_backward miopen_convolution_backward_input
        miopen_convolution_backward_weight mkldnn_convolution_backward _slow_conv2d_backward
    """,
    "elementwise": """
        add sub rsub mul div true_divide neg abs sign pow sqrt rsqrt exp exp2 expm1 log log1p log2 sin cos tan tanh sigmoid relu
        leaky_relu elu selu celu gelu silu mish hardtanh hardswish hardsigmoid hardshrink softplus softshrink threshold erf erfc
        erfinv clamp clamp_min clamp_max where masked_fill maximum minimum fmod remainder floor ceil round trunc reciprocal
        square addcmul addcdiv lerp bitwise_and bitwise_or bitwise_not bitwise_xor logical_and logical_or logical_not
        logical_xor eq ne lt le gt ge isnan isinf isfinite native_dropout bernoulli nan_to_num atan2 sinh cosh asin acos atan
        tanh_backward sigmoid_backward threshold_backward leaky_relu_backward elu_backward gelu_backward silu_backward
        mish_backward hardtanh_backward hardswish_backward softplus_backward native_dropout_backward masked_scale _fused_dropout
        softshrink_backward hardsigmoid_backward logit xlogy log_sigmoid_forward log_sigmoid_backward
    """,
    "softmax": """
        _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data _safe_softmax _masked_softmax
    """,
    "norm": """
        native_layer_norm native_layer_norm_backward native_batch_norm native_batch_norm_backward cudnn_batch_norm
        cudnn_batch_norm_backward miopen_batch_norm miopen_batch_norm_backward _batch_norm_with_update batch_norm_backward
        native_group_norm native_group_norm_backward _fused_rms_norm _fused_rms_norm_backward batch_norm_stats batch_norm_elemt
    """,
    "reduction": """
        sum mean prod amax amin max min argmax argmin var std var_mean std_mean norm linalg_vector_norm any all cumsum cumprod
        logsumexp count_nonzero nansum
    """,
    "copy": """
        copy_ _to_copy clone contiguous cat stack constant_pad_nd pad repeat _reshape_copy narrow_copy roll flip
    """,
    "fill": """
        fill zero full zeros ones arange normal uniform zeros_like ones_like
    """,
}

_BY_NAME = {name if name.startswith("_") else name.rstrip("_"): family for family, names in _NAMES.items() for name in names.split()}

_MOST_NAMES = 4096
"""Operators that are remembered: a trace names some hundred, each in thousands of rows; a broken file any number."""

MATRIX_FAMILIES = ("gemm", "conv", "attention")
"""Families whose work runs on matrix engines."""

FUSABLE_FAMILIES = ("elementwise", "norm", "softmax", "reduction", "copy")
"""Families that torch.compile fuses (rule OVH-03)."""

_ATTENTION_PREFIXES = ("_scaled_dot_product_", "_flash_attention", "_efficient_attention", "_cudnn_attention", "_fused_attention")
_ATTENTION_WRAPPERS = ("_scaled_dot_product_attention_math",)  # its children carry the work


@lru_cache(maxsize=_MOST_NAMES)
def find_base_name(name: str) -> str:
    """Strip an operator of its namespace and in-place mark: 'aten::mul_' -> 'mul'; '' for no ATen operator."""
    if not name.startswith("aten::"):
        return ""
    short = name[len("aten::") :]
    return short if short.startswith("_") else short.rstrip("_")


@lru_cache(maxsize=_MOST_NAMES)
def find_family(name: str) -> str:
    """Find the family of an operator, 'other' where it has none.

    gemm | conv | attention | elementwise | softmax | norm | reduction | copy | fill | optimizer | other.
    """
    short = find_base_name(name)
    if short in _BY_NAME:
        return _BY_NAME[short]
    if short.startswith(("_fused_adam", "_fused_sgd", "_fused_adagrad", "_foreach_")):
        return "optimizer"
    if name.startswith("flash_attn::"):
        return "attention"
    if short.startswith(_ATTENTION_PREFIXES) and not short.startswith(_ATTENTION_WRAPPERS):
        return "attention"
    return "other"


FLOATING_DTYPES = ("fp64", "fp32", "fp16", "bf16", "fp8", "fp4")


class Call(msgspec.Struct, frozen=True):
    """One distinct (operator, signature). None: not recorded, or does not apply to this operator."""

    op_name: str
    signature: int | None
    family: str
    dtype: str | None = None
    """Type of the first floating (else first) tensor."""
    item_bytes: int | None = None
    numel: int | None = None
    """Elements of the largest tensor: the output of an element-wise op."""
    batch: int | None = None
    m: int | None = None
    n: int | None = None
    k: int | None = None
    """GEMM dimensions; for a convolution n and k are the output and the input channels of one group, m is None."""
    copy_kind: str | None = None
    """layout (other strides) | cast (other dtype) | plain; None: no copy, or strides were not recorded."""
    zeroed_bytes: int | None = None
    operands: str | None = None
    """Size and type of each tensor that is read, as ';1024 fp32;': an op that makes none of them does not feed this one."""
    result: str | None = None
    """The same of the result of an element-wise op or cast."""
    shapes: str = ""
    """Shapes as text for messages."""


CALL_SCHEMA: dict[str, pl.DataType] = {
    field.name: pl.Int64() if field.type in (int | None, int) else pl.String() for field in msgspec.structs.fields(Call)
}

_INT64_MAX = 2**63 - 1


def build_call_table(pairs: Iterable[tuple[str, int | None]], signatures: pl.DataFrame) -> pl.DataFrame:
    """Build one row (fields of Call) per (operator name, signature row) of `pairs`."""
    rows = []
    for name, row in pairs:
        if row is None or not 0 <= row < signatures.height:
            rows.append(msgspec.structs.asdict(Call(name, row, find_family(name))))
            continue
        texts = signatures.row(row, named=True)
        signature = parse_signature(texts["shapes"], texts["dtypes"], texts["strides"], texts["args"])
        fields = msgspec.structs.asdict(describe_signature(name, row, signature))
        for field in ("numel", "batch", "m", "n", "k", "zeroed_bytes"):  # sizes of a hostile or broken trace: no int64 column holds them
            if fields[field] is not None and abs(fields[field]) > _INT64_MAX:
                fields[field] = None
        rows.append(fields)
    return pl.DataFrame(rows, schema=CALL_SCHEMA, orient="row")


def describe_signature(name: str, row: int | None, signature: Signature) -> Call:
    """Return the description of operator `name` called with `signature`."""
    tensors = [item for item in signature.inputs if item.is_tensor]
    group = find_family(name)
    lead = next((item for item in tensors if item.dtype in FLOATING_DTYPES), tensors[0] if tensors else None)
    batch, m, n, k = find_matrix_dimensions(name, signature) or (None, None, None, None)
    short, first, zeroed = find_base_name(name), signature.tensor(0), None
    if short == "zero" and first is not None:
        zeroed = first.numel * first.item_bytes
    elif short == "_foreach_zero_" and signature.inputs:  # tensor lists carry no dtype: fp32, the default of gradients
        zeroed = sum(math.prod(shape) for shape in signature.inputs[0].tensors or ()) * 4 if signature.inputs[0].tensors else None
    made = find_result(name, signature)
    return Call(
        op_name=name,
        signature=row,
        family=group,
        dtype=lead.dtype if lead else None,
        item_bytes=ITEM_BYTES.get(lead.dtype or "") if lead else None,
        numel=max((*(item.numel for item in tensors), *([made[0]] if made else ())), default=None),  # operands may be spread over more
        batch=batch,
        m=m,
        n=n,
        k=k,
        copy_kind=find_copy_kind(name, signature),
        zeroed_bytes=zeroed,
        operands=_format_sizes([(item.numel, item.dtype) for item in (tensors[1:] if short == "copy" else tensors)]),
        result=_format_sizes([made]) if made else None,
        shapes=" x ".join("[" + ", ".join(map(str, item.shape)) + "]" for item in tensors[:4]),
    )


def _format_sizes(tensors: Iterable[tuple[int, str | None]]) -> str:
    return "".join(f";{numel} {dtype}" for numel, dtype in tensors) + ";"


def find_result(name: str, signature: Signature) -> tuple[int, str] | None:
    """Find (elements, type) of the result of an element-wise op or a copy into a tensor; None for others."""
    short, first = find_base_name(name), signature.tensor(0)
    rule = POINTWISE.get(short)
    operands = [item for item in signature.inputs[: rule.operands if rule else 1] if item.is_tensor]
    if first is not None and (short == "copy" or (rule is not None and name.endswith("_") and not name.endswith("__"))):
        return first.numel, first.dtype or ""
    shape = broadcast_shapes(item.shape for item in operands)
    # a tensor behind the operands is that of `out=`
    given = any(item.is_tensor for item in signature.inputs[rule.operands :]) if rule else True
    return None if rule is None or not operands or shape is None or given else (math.prod(shape), find_result_dtype(operands, rule.result))


def find_matrix_dimensions(name: str, signature: Signature) -> tuple[int | None, int | None, int, int] | None:
    """Return (batch, m, n, k) of a GEMM, (None, None, output channels, input channels of a group) of a convolution, else None."""
    short = find_base_name(name)
    if find_family(name) == "conv":
        # input, weight, ... forward; grad_output, input, weight backward (schemas of torch 2.13 and of the cudnn/miopen ops before 1.11)
        weight = signature.tensor(2 if "backward" in short else 1)
        if weight is None or len(weight.shape) < 3:
            return None
        return None, None, weight.shape[0], weight.shape[1]
    first = {"mm": 0, "bmm": 0, "matmul": 0, "linear": 0, "_scaled_mm": 0, "_int_mm": 0}.get(short, 1)
    if find_family(name) != "gemm":
        return None
    a, b = signature.tensor(first), signature.tensor(first + 1)
    if a is None or b is None or not a.shape or not b.shape:
        return None
    if short == "linear":
        return (1, math.prod(a.shape[:-1]), b.shape[0], b.shape[1]) if len(b.shape) == 2 else None
    if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[-1] != b.shape[-2]:
        return None
    if len(b.shape) == 2:  # matmul folds the leading dimensions into m
        return 1, math.prod(a.shape[:-1]), b.shape[-1], a.shape[-1]
    return math.prod(a.shape[:-2]), a.shape[-2], b.shape[-1], a.shape[-1]


def find_copy_kind(name: str, signature: Signature) -> str | None:
    """Return 'layout', 'cast' or 'plain' for a copying operator; None for others and where strides were not recorded."""
    short = find_base_name(name)
    if short in ("cat", "stack", "constant_pad_nd", "pad", "repeat", "_reshape_copy", "narrow_copy", "roll", "flip"):
        return "layout"
    if short not in ("copy", "clone", "contiguous", "_to_copy"):
        return None
    source = signature.tensor(1 if short == "copy" else 0)
    target = signature.tensor(0)
    if source is None or target is None:
        return None
    if short == "copy" and source.dtype != target.dtype:
        return "cast"
    if short == "_to_copy":
        return None  # its target is its child copy_, which carries the kernel
    if source.strides is None or target.strides is None:
        return None
    # elements are reordered by other strides of the target, or (clone) from a source that is not dense row-major
    row_major = [math.prod(source.shape[at + 1 :]) for at in range(len(source.shape))]
    expected = target.strides if short == "copy" and target.shape == source.shape else row_major
    dimensions = zip(source.shape, source.strides, expected, strict=False)
    return "layout" if 0 in source.strides or any(size > 1 and have != want for size, have, want in dimensions) else "plain"
