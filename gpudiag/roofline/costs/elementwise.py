"""Element-wise ops, activations, dropout, comparisons, selection, random numbers (op_costs section 7).

FLOP = operations per element * elements of the result, bytes = each operand's distinct elements read + the result written; an expanded
operand counts once, an in-place op reads and writes self. Operations per element are conventions (add 1, fused multiply-add 2, sigmoid 5,
tanh-gelu 8, erf-gelu 10): such kernels are far below the ridge, so the class does not depend on them. What may decide are elementary
functions, which have units and a roof of their own: one an element (Cost.special) is the least that such an op needs. The same tensor given
twice cannot be told from two tensors and counts twice.
"""

from __future__ import annotations

from math import prod
from typing import Literal

import msgspec

from gpudiag.model.ops import Cost, Input, Signature
from gpudiag.roofline.costs.registry import (
    Flow,
    broadcast_shapes,
    costs,
    count_broadcast,
    count_read_bytes,
    estimate_flow,
    find_dtype_category,
    promote_dtypes,
    register_flows,
    require,
    size_of,
    split_names,
)

PointwiseResult = Literal["same", "bool", "floating"]
"""dtype of the result: as promoted; bool; promoted, but integers become fp32."""


class Pointwise(msgspec.Struct, frozen=True):
    """An element-wise op: operations per element, leading arguments that may be tensors, dtype of the result."""

    operations: int
    operands: int = 1
    result: PointwiseResult = "same"


_UNARY = split_names(
    """
    abs neg sgn sign relu relu6 ceil floor round trunc frac square bitwise_not logical_not clamp hardtanh threshold
    leaky_relu nan_to_num conj_physical _conj_physical hardshrink softshrink deg2rad rad2deg angle
    """
)
_UNARY_FLOATING = split_names("sqrt rsqrt reciprocal")
_TRANSCENDENTAL = split_names(
    """
    exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid silu logit erf
    erfc erfinv log_sigmoid_forward softplus mish hardswish hardsigmoid elu celu selu lgamma digamma i0 sinc mvlgamma
    special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_ndtri special_bessel_j0 special_bessel_j1
    special_bessel_y0 special_bessel_y1 special_airy_ai special_spherical_bessel_j0 special_modified_bessel_i0
    special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1
    """
)
_BINARY = split_names(
    """
    add sub rsub mul maximum minimum fmax fmin bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift
    __and__ __or__ __xor__ __lshift__ __rshift__ clamp_min clamp_max hypot copysign remainder fmod floor_divide heaviside
    nextafter gcd lcm _add_relu
    """
)
_BINARY_IN_PLACE_ONLY = ["__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"]
_COMPARISONS = split_names("eq ne lt le gt ge logical_and logical_or logical_xor isclose")
_TESTS = split_names("isnan isinf isfinite isposinf isneginf signbit")
_BACKWARD = split_names(
    """
    threshold_backward hardtanh_backward leaky_relu_backward native_dropout_backward _masked_scale hardshrink_backward softshrink_backward
    """
)
_BACKWARD_TRANSCENDENTAL = split_names(
    """
    sigmoid_backward tanh_backward silu_backward gelu_backward softplus_backward mish_backward hardswish_backward
    hardsigmoid_backward logit_backward
    """
)

ELEMENTARY = frozenset(
    split_names(
        """
        exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid silu logit erf erfc erfinv
        softplus mish log_sigmoid_forward lgamma digamma pow float_power atan2 logaddexp logaddexp2 xlogy gelu gelu_backward silu_backward
        mish_backward softplus_backward log_sigmoid_backward _softmax _log_softmax softmax log_softmax
        """
    )
)
"""Ops that evaluate an elementary function for each element, whatever its value (elu does so for negative ones alone)."""

POINTWISE: dict[str, Pointwise] = {
    **dict.fromkeys(_UNARY, Pointwise(1)),
    **dict.fromkeys(_UNARY_FLOATING, Pointwise(1, result="floating")),
    **dict.fromkeys(_TRANSCENDENTAL, Pointwise(5, result="floating")),
    **dict.fromkeys(_BINARY, Pointwise(1, 2)),
    **dict.fromkeys(_BINARY_IN_PLACE_ONLY, Pointwise(1, 2)),
    **dict.fromkeys(("div", "divide", "true_divide"), Pointwise(1, 2, "floating")),
    "polygamma": Pointwise(5, 2, "floating"),  # (n, self), in place (self, n)
    "ldexp": Pointwise(1, 2, "floating"),
    **dict.fromkeys(("igamma", "igammac"), Pointwise(20, 2)),
    **dict.fromkeys(("special_zeta", "special_xlog1py"), Pointwise(5, 2, "floating")),
    **dict.fromkeys(("pow", "float_power", "atan2", "logaddexp", "logaddexp2", "xlogy"), Pointwise(5, 2)),
    **dict.fromkeys(_COMPARISONS, Pointwise(1, 2, "bool")),
    **dict.fromkeys(_TESTS, Pointwise(1, 1, "bool")),
    **dict.fromkeys(("addcmul", "lerp"), Pointwise(2, 3)),
    "addcdiv": Pointwise(3, 3),
    "gelu": Pointwise(10),  # with the error function; which form it was is text, and torch records no text
    "prelu": Pointwise(1, 2),
    "_prelu_kernel": Pointwise(1, 2),
    "rrelu_with_noise": Pointwise(1, 2),
    **dict.fromkeys(_BACKWARD, Pointwise(1, 2)),
    **dict.fromkeys(_BACKWARD_TRANSCENDENTAL, Pointwise(5, 2)),
    "log_sigmoid_backward": Pointwise(5, 3),
    "rrelu_with_noise_backward": Pointwise(1, 3),
    "elu_backward": Pointwise(5, 6),  # its second tensor is argument 5
    **dict.fromkeys(("cross", "linalg_cross"), Pointwise(3, 2)),
}

_NO_IN_PLACE = {
    *_TESTS,
    *split_names(
        "isclose log_sigmoid_forward softplus rsub maximum minimum fmax fmin logaddexp logaddexp2 prelu _prelu_kernel _masked_scale"
    ),
    *split_names("hardshrink softshrink angle _conj_physical cross linalg_cross"),
    "addcmul",  # has a formula of its own
    *(name for name in POINTWISE if name.startswith("special_")),
}


def find_result_dtype(inputs: list[Input], result: PointwiseResult) -> str:
    """Find the dtype of an element-wise result."""
    if result == "bool":
        return "bool"
    dtype = promote_dtypes(inputs)
    return "fp32" if result == "floating" and find_dtype_category(dtype) < 2 else dtype


def estimate_pointwise(signature: Signature, op: Pointwise, in_place: bool, elementary: bool = False) -> Cost:
    """Estimate the cost of one element-wise call (plain, in place, or with `out=` behind its operands)."""
    operands = signature.tensors(*range(op.operands))
    require(bool(operands), "no tensor shape was recorded")
    out = signature.tensor(0) if in_place else next(iter(signature.tensors(*range(op.operands, len(signature.inputs)))), None)
    if out is not None:
        elements, dtype = out.numel, out.dtype
    else:
        elements, dtype = count_broadcast(operands), find_result_dtype(operands, op.result)
    moved = count_read_bytes(operands) + size_of(elements, dtype)
    return Cost(vector_flops=op.operations * elements, bytes=moved, special=elements if elementary else 0)


@costs("aten::addcmul_")
def addcmul_in_place(signature: Signature) -> Cost:
    """Return the cost of self += factor * factor, as optimizers call it (the gradient squared): two factors of one size are one tensor.

    A trace does not record which tensor it was, so that this is `derived` (as for the list of such updates in optimizers.py).
    """
    cost = estimate_pointwise(signature, POINTWISE["addcmul"], in_place=True)
    first, second = signature.tensor(1), signature.tensor(2)
    if first is None or second is None or (first.shape, first.dtype, first.strides) != (second.shape, second.dtype, second.strides):
        return cost
    return msgspec.structs.replace(cost, bytes=cost.bytes - second.distinct_bytes, provenance="derived")


for _name, _op in POINTWISE.items():
    _elementary = _name in ELEMENTARY
    costs(f"aten::{_name}", op=_op, in_place=_name in _BINARY_IN_PLACE_ONLY, elementary=_elementary)(estimate_pointwise)
    if not _name.endswith(("__", "_backward")) and _name not in _NO_IN_PLACE:
        costs(f"aten::{_name}_", op=_op, in_place=True, elementary=_elementary)(estimate_pointwise)


@costs("aten::where")
def where(signature: Signature) -> Cost:
    """Return the cost of a select: condition (1 byte) and both sides read, one operation an element."""
    condition, sides = signature.need(0, "condition"), signature.tensors(1, 2)
    require(bool(sides), "condition alone: the result's size depends on the data")
    elements, out = count_broadcast((condition, *sides)), signature.output(3)
    moved = count_read_bytes((condition, *sides)) + size_of(elements, out.dtype if out else promote_dtypes(sides))
    return Cost(vector_flops=elements, bytes=moved)


_FAKE_QUANTIZE = """
    aten::fake_quantize_per_tensor_affine_cachemask aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams
    aten::fake_quantize_per_channel_affine_cachemask aten::_fused_moving_avg_obs_fq_helper
    """
_RANDOM_FILLS = """
    aten::normal_ aten::uniform_ aten::random_ aten::exponential_ aten::log_normal_ aten::cauchy_ aten::geometric_ aten::bernoulli_
    aten::_philox_normal_ aten::_philox_uniform_
    """

register_flows(
    {
        "aten::glu_backward": Flow(reads=(0, 1), writes=(1,), operations=4, per=1),
        "aten::_prelu_kernel_backward": Flow(reads=(0, 1, 2), writes=(1, 1), operations=3, per=1),
        "aten::masked_fill aten::masked_fill_": Flow(reads=(0, 1), writes=(0,), required=(1,), broadcast=True),
        # two real tensors read, one complex one written
        "aten::polar aten::complex": Flow(reads=(0, 1), writes=(0, 0), required=(1,), broadcast=True),
        "aten::_amp_update_scale_": Flow(reads=(0, 1, 2), writes=(0, 1)),
        "aten::_transform_bias_rescale_qkv": Flow(reads=(0, 1), writes=(0,), operations=2),
        # rounding to a grid, dropout in training: x read, y and a 1-byte mask written
        _FAKE_QUANTIZE: Flow(reads=(0,), writes=(0,), operations=5, beside=1),
        "aten::native_dropout aten::_fused_dropout": Flow(reads=(0,), writes=(0,), operations=2, beside=1, draws=True),
        # one number an element: with the probabilities of self; in the dtype asked for; into self, with a tensor of probabilities read
        "aten::bernoulli": Flow(reads=(0,), writes=(0,), draws=True),
        "aten::rand_like aten::randn_like": Flow(reads=(), writes=(0,), dtype=1, draws=True),
        _RANDOM_FILLS: Flow(reads=(1,), writes=(0,), draws=True),
    }
)


# (self, high, dtype, four more) or (self, low, high, dtype, four more)
costs("aten::randint_like")(
    lambda signature: estimate_flow(signature, Flow(reads=(), writes=(0,), dtype=3 if len(signature.inputs) > 7 else 2, draws=True))
)


@costs("aten::addr", "aten::addr_")
def addr(signature: Signature) -> Cost:
    """Return the cost of adding an outer product: self and both vectors read, a matrix written, 2 FLOP an element."""
    operands = signature.need_all("self", "vec1", "vec2")
    elements = operands[1].numel * operands[2].numel
    return Cost(vector_flops=2 * elements, bytes=count_read_bytes(operands) + size_of(elements, promote_dtypes(operands)))


@costs("aten::_cdist_forward")
def cdist(signature: Signature) -> Cost:
    """Return the cost of all distances of two sets of points: 3 FLOP a coordinate of each pair."""
    first, second = signature.need_all("x1", "x2")
    require(len(first.shape) >= 2 and len(second.shape) >= 2, "x1 or x2 is no set of points")
    batch = broadcast_shapes((first.shape[:-2], second.shape[:-2]))
    require(batch is not None and first.shape[-1] == second.shape[-1], "x1 and x2 do not fit")
    pairs = prod(batch or ()) * first.shape[-2] * second.shape[-2]
    return Cost(vector_flops=3 * pairs * first.shape[-1], bytes=count_read_bytes((first, second)) + size_of(pairs, first.dtype))


@costs("aten::_cdist_backward")
def cdist_backward(signature: Signature) -> Cost:
    """Return the cost of its gradient for x1 (grad 0, x1 1, x2 2, distances 4): 5 FLOP a coordinate of each pair."""
    grad, first, second = signature.need_all("grad", "x1", "x2")
    width = first.shape[-1] if first.shape else 0
    moved = count_read_bytes((grad, first, second, *signature.tensors(4))) + size_of(first.numel, first.dtype)
    return Cost(vector_flops=5 * grad.numel * width, bytes=moved)


@costs("aten::quantize_per_tensor", "aten::quantize_per_channel", "aten::quantize_per_tensor_dynamic")
def quantize(signature: Signature) -> Cost:
    """Return the cost of storing x in a byte an element (qint32, ScalarType 14: four)."""
    x = signature.need(0, "self")
    types = [item.value for item in signature.inputs[1:] if type(item.value) is int]
    return Cost(vector_flops=3 * x.numel, bytes=x.distinct_bytes + x.numel * (4 if types and types[-1] == 14 else 1))


@costs("aten::glu")
def glu(signature: Signature) -> Cost:
    """Return the cost of a gated linear unit: half as many results as inputs."""
    x = signature.need(0, "self")
    return Cost(vector_flops=6 * (x.numel // 2), bytes=x.distinct_bytes + size_of(x.numel // 2, x.dtype))


@costs("aten::normal", "aten::poisson", "aten::binomial", "aten::_standard_gamma", "aten::_standard_gamma_grad", "aten::_sample_dirichlet")
def random_from(signature: Signature) -> Cost:
    """Return the cost of drawing from a distribution an element: parameters read, as many numbers written."""
    given = signature.tensors(0, 1)
    require(bool(given), "the result's size was not recorded")
    largest = max(given, key=lambda item: item.numel)
    moved = count_read_bytes(given) + size_of(largest.numel, largest.dtype)
    return Cost(vector_flops=5 * largest.numel, bytes=moved, draws=largest.numel)
