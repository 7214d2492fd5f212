"""Op families by operator name, as the rules group work: matrix, element-wise, normalisation, ... (names: ATen, torch 1.9 to 2.13)."""

from __future__ import annotations

from functools import lru_cache

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
        softshrink_backward hardsigmoid_backward logit log_sigmoid_forward log_sigmoid_backward
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

MATRIX = ("gemm", "conv", "attention")
"""Families whose work runs on matrix engines."""

FUSABLE = ("elementwise", "norm", "softmax", "reduction", "copy")
"""Families that torch.compile fuses (rule OVH-03)."""

_ATTENTION_PREFIXES = ("_scaled_dot_product_", "_flash_attention", "_efficient_attention", "_cudnn_attention", "_fused_attention")
_ATTENTION_WRAPPERS = ("_scaled_dot_product_attention_math",)  # its children carry the work


@lru_cache(maxsize=_MOST_NAMES)
def base_name(name: str) -> str:
    """Return the operator without its namespace and in-place mark: 'aten::mul_' -> 'mul'; '' for no ATen operator."""
    if not name.startswith("aten::"):
        return ""
    short = name[len("aten::") :]
    return short if short.startswith("_") else short.rstrip("_")


@lru_cache(maxsize=_MOST_NAMES)
def family(name: str) -> str:
    """Return the family of an operator, 'other' where it has none.

    gemm | conv | attention | elementwise | softmax | norm | reduction | copy | fill | optimizer | other.
    """
    short = base_name(name)
    if short in _BY_NAME:
        return _BY_NAME[short]
    if short.startswith(("_fused_adam", "_fused_sgd", "_fused_adagrad", "_foreach_")):
        return "optimizer"
    if name.startswith("flash_attn::"):
        return "attention"
    if short.startswith(_ATTENTION_PREFIXES) and not short.startswith(_ATTENTION_WRAPPERS):
        return "attention"
    return "other"
