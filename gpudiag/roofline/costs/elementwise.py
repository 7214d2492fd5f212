"""Element-wise ops, activations, dropout, comparisons (op_costs section 7).

FLOP = operations per element * elements of the result, bytes = each operand's distinct elements read + the result written; an expanded
operand counts once, an in-place op reads and writes self. Operations per element are conventions (add 1, fused multiply-add 2, sigmoid 5,
tanh-gelu 8, erf-gelu 10): such kernels are far below the ridge, so the class does not depend on them. The same tensor given twice cannot
be told from two tensors and counts twice.
"""

from __future__ import annotations

from math import prod
from typing import Literal

import msgspec

from gpudiag.model.cost import Cost
from gpudiag.model.signature import Input, Signature
from gpudiag.roofline.costs.arguments import present
from gpudiag.roofline.costs.registry import costs, require, words
from gpudiag.roofline.costs.shapes import broadcast, category, promoted, read_bytes, size_of

Result = Literal["same", "bool", "floating"]
"""dtype of the result: as promoted; bool; promoted, but integers become fp32."""


class Pointwise(msgspec.Struct, frozen=True):
    """An element-wise op: operations per element, leading arguments that may be tensors, dtype of the result."""

    operations: int
    operands: int = 1
    result: Result = "same"


_UNARY = words(
    """
    abs neg sgn sign relu relu6 ceil floor round trunc frac square bitwise_not logical_not clamp hardtanh threshold
    leaky_relu nan_to_num conj_physical _conj_physical hardshrink softshrink deg2rad rad2deg angle
    """
)
_UNARY_FLOATING = words("sqrt rsqrt reciprocal")
_TRANSCENDENTAL = words(
    """
    exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid silu logit erf
    erfc erfinv log_sigmoid_forward softplus mish hardswish hardsigmoid elu celu selu lgamma digamma i0 sinc mvlgamma
    special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_ndtri special_bessel_j0 special_bessel_j1
    special_bessel_y0 special_bessel_y1 special_airy_ai special_spherical_bessel_j0 special_modified_bessel_i0
    special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1
    """
)
_BINARY = words(
    """
    add sub rsub mul maximum minimum fmax fmin bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift
    __and__ __or__ __xor__ __lshift__ __rshift__ clamp_min clamp_max hypot copysign remainder fmod floor_divide heaviside
    nextafter gcd lcm _add_relu
    """
)
_BINARY_IN_PLACE_ONLY = ["__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"]
_COMPARISONS = words("eq ne lt le gt ge logical_and logical_or logical_xor isclose")
_TESTS = words("isnan isinf isfinite isposinf isneginf signbit")
_BACKWARD = words(
    """
    threshold_backward hardtanh_backward leaky_relu_backward native_dropout_backward _masked_scale hardshrink_backward softshrink_backward
    """
)
_BACKWARD_TRANSCENDENTAL = words(
    """
    sigmoid_backward tanh_backward silu_backward gelu_backward softplus_backward mish_backward hardswish_backward
    hardsigmoid_backward logit_backward
    """
)

TABLE: dict[str, Pointwise] = {
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
    *words("isclose log_sigmoid_forward softplus rsub maximum minimum fmax fmin logaddexp logaddexp2 prelu _prelu_kernel _masked_scale"),
    *words("hardshrink softshrink angle _conj_physical cross linalg_cross"),
    "addcmul",  # has a formula of its own
    *(name for name in TABLE if name.startswith("special_")),
}


def result_dtype(inputs: list[Input], result: Result) -> str:
    """Return the dtype of an element-wise result."""
    if result == "bool":
        return "bool"
    dtype = promoted(inputs)
    return "fp32" if result == "floating" and category(dtype) < 2 else dtype


def pointwise(signature: Signature, op: Pointwise, in_place: bool) -> Cost:
    """Return the cost of one element-wise call (plain, in place, or with `out=` behind its operands)."""
    operands = present(signature, *range(op.operands))
    require(bool(operands), "no tensor shape was recorded")
    out = signature.tensor(0) if in_place else next(iter(present(signature, *range(op.operands, len(signature.inputs)))), None)
    if out is not None:
        elements, dtype = out.numel, out.dtype
    else:
        shape = broadcast(item.shape for item in operands)
        require(shape is not None, "operand shapes do not broadcast")
        elements, dtype = prod(shape or ()), result_dtype(operands, op.result)
    return Cost(vector_flops=op.operations * elements, bytes=read_bytes(operands) + size_of(elements, dtype))


@costs("aten::addcmul_")
def addcmul_in_place(signature: Signature) -> Cost:
    """Return the cost of self += factor * factor, as optimizers call it (the gradient squared): two factors of one size are one tensor.

    A trace does not record which tensor it was, so that this is `derived` (as for the list of such updates in optimizers.py).
    """
    cost = pointwise(signature, TABLE["addcmul"], in_place=True)
    first, second = signature.tensor(1), signature.tensor(2)
    if first is None or second is None or (first.shape, first.dtype, first.strides) != (second.shape, second.dtype, second.strides):
        return cost
    return msgspec.structs.replace(cost, bytes=cost.bytes - second.distinct_bytes, provenance="derived")


def _register() -> None:
    for name, op in TABLE.items():

        def plain(signature: Signature, op: Pointwise = op) -> Cost:
            return pointwise(signature, op, in_place=False)

        def in_place(signature: Signature, op: Pointwise = op) -> Cost:
            return pointwise(signature, op, in_place=True)

        if name in _BINARY_IN_PLACE_ONLY:
            costs(f"aten::{name}")(in_place)
            continue
        costs(f"aten::{name}")(plain)
        if not name.endswith(("__", "_backward")) and name not in _NO_IN_PLACE:
            costs(f"aten::{name}_")(in_place)


_register()
