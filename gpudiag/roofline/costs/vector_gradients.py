"""What the backward of an op without products costs, from its forward's recorded inputs: for autograd nodes whose calls record no shapes.

The least traffic of the whole node, whatever kernels it launches: the result's gradient and what was saved are read once, the gradients
written once; every differentiable input is taken to need one. FLOP an element are those of the backward ops (norms.py, softmax.py,
losses.py, pooling.py). Provenance `derived`. Saved tensors: torch/tools/autograd/derivatives.yaml.
"""

from __future__ import annotations

from math import prod

import msgspec

from gpudiag.model.cost import Cost
from gpudiag.model.signature import Input, Signature
from gpudiag.roofline.costs.arguments import flag, present, tensor
from gpudiag.roofline.costs.elementwise import TABLE as POINTWISE
from gpudiag.roofline.costs.elementwise import Pointwise, result_dtype
from gpudiag.roofline.costs.norms import STATISTIC
from gpudiag.roofline.costs.registry import FORMULAS, Formula, backward_costs, require, words
from gpudiag.roofline.costs.shapes import broadcast, category, promoted, read_bytes, size_of

LINEAR = frozenset(words("add sub rsub neg lerp"))
"""Their gradient needs no input: it is the result's gradient, scaled or summed where an operand was broadcast."""

NO_GRADIENT = frozenset(words("sign sgn ceil floor round trunc bitwise_not logical_not floor_divide heaviside nextafter gcd lcm digamma"))


def _cost(flops: int, moved: int) -> Cost:
    return Cost(vector_flops=flops, bytes=moved, provenance="derived")


def _written(inputs: list[Input]) -> int:
    """Return the bytes of one gradient for each of `inputs` that can have one."""
    return sum(size_of(item.numel, item.dtype) for item in inputs if category(item.dtype or "") >= 2)


def pointwise_gradient(signature: Signature, op: Pointwise, linear: bool) -> Cost:
    """Return the cost of an element-wise op's backward: the gradient and (unless linear) the operands read, a gradient an operand."""
    operands = [item for item in present(signature, *range(op.operands)) if item.shape or op.operands == 1]
    shape = broadcast(item.shape for item in operands)
    require(bool(operands) and shape is not None, "operand shapes do not broadcast")
    elements = prod(shape or ())
    saved = 0 if linear else read_bytes(operands)
    moved = size_of(elements, result_dtype(operands, op.result)) + saved + _written(operands)
    return _cost(op.operations * elements * len(operands), moved)


def _register_pointwise() -> None:
    for name, op in POINTWISE.items():
        if op.result == "bool" or name in NO_GRADIENT or name.startswith("__") or "backward" in name:
            continue

        def formula(signature: Signature, op: Pointwise = op, linear: bool = name in LINEAR) -> Cost:
            return pointwise_gradient(signature, op, linear)

        backward_costs(*(full for full in (f"aten::{name}", f"aten::{name}_") if full in FORMULAS), named=True)(formula)


_register_pointwise()


def _norm(signature: Signature, operations: int, weight_at: int, parameters: int, statistics: int, samples: int) -> Cost:
    x = tensor(signature, 0, "input")
    weight = signature.tensor(weight_at)
    gamma = [weight] if weight is not None else []
    moved = 3 * size_of(x.numel, x.dtype) + read_bytes(gamma) + parameters * _written(gamma) + statistics * STATISTIC * samples
    return _cost(operations * x.numel, moved)


@backward_costs("aten::native_layer_norm", "aten::layer_norm", named=True)
def layer_norm(signature: Signature) -> Cost:
    """Return the cost of layer norm's backward: x, dy, two statistics a row and gamma read; dx, dgamma, dbeta written."""
    x, weight = tensor(signature, 0, "input"), signature.tensor(2)
    return _norm(signature, 14, 2, 2, 2, x.numel // max(weight.numel, 1) if weight is not None else 0)


@backward_costs("aten::_fused_rms_norm", named=True)
def rms_norm(signature: Signature) -> Cost:
    """Return the cost of RMS norm's backward: x, dy, one statistic a row and gamma read; dx, dgamma written."""
    x, weight = tensor(signature, 0, "input"), signature.tensor(2)
    return _norm(signature, 10, 2, 1, 1, x.numel // max(weight.numel, 1) if weight is not None else 0)


@backward_costs("aten::native_group_norm", named=True)
def group_norm(signature: Signature) -> Cost:
    """Return the cost of group norm's backward, without its statistics: few beside x."""
    return _norm(signature, 14, 1, 2, 0, 0)


_BATCH_NORMS = words("native_batch_norm cudnn_batch_norm miopen_batch_norm _batch_norm_impl_index batch_norm _batch_norm_with_update")


@backward_costs(*(f"aten::{name}" for name in _BATCH_NORMS), named=True)
def batch_norm(signature: Signature) -> Cost:
    """Return the cost of batch norm's backward: x, dy, two statistics a channel and gamma read; dx, dgamma, dbeta written."""
    x = tensor(signature, 0, "input")
    require(len(x.shape) >= 2, "input has no channel dimension")
    return _norm(signature, 14, 1, 2, 2, x.shape[1])


@backward_costs("aten::_softmax", "aten::_log_softmax", named=True)
def softmax(signature: Signature) -> Cost:
    """Return the cost of softmax's backward: dy and y read (fp32 with half_to_float), dx written in x's dtype."""
    x = tensor(signature, 0, "self")
    widened = x.dtype in ("fp16", "bf16") and flag(signature, 2, "half_to_float (Concrete Inputs)")
    return _cost(4 * x.numel, 2 * size_of(x.numel, "fp32" if widened else x.dtype) + size_of(x.numel, x.dtype))


@backward_costs("aten::native_dropout", "aten::_fused_dropout", named=True)
def dropout(signature: Signature) -> Cost:
    """Return the cost of dropout's backward: dy and a 1-byte mask read, dx written."""
    x = tensor(signature, 0, "input")
    return _cost(x.numel, 2 * size_of(x.numel, x.dtype) + x.numel)


@backward_costs("aten::where", named=True)
def where(signature: Signature) -> Cost:
    """Return the cost of a select's backward: dy and the condition read, a gradient for each side written."""
    condition, sides = tensor(signature, 0, "condition"), present(signature, 1, 2)
    shape = broadcast(item.shape for item in (condition, *sides))
    require(bool(sides) and shape is not None, "operand shapes do not broadcast")
    elements = prod(shape or ())
    solid = [item for item in sides if item.shape]
    return _cost(elements, size_of(elements, promoted(sides)) + condition.distinct_bytes + _written(solid))


@backward_costs("aten::masked_fill", "aten::masked_fill_", named=True)
def masked_fill(signature: Signature) -> Cost:
    """Return the cost of a masked fill's backward: dy and the mask read, dx written."""
    x, mask = tensor(signature, 0, "self"), tensor(signature, 1, "mask")
    return _cost(x.numel, 2 * size_of(x.numel, x.dtype) + mask.distinct_bytes)


_LOSSES = words("mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits")


def _mirrored(forward: Formula, extra: int) -> Formula:
    """Return the formula of a backward that writes where its forward read: the same bytes, `extra` times self besides."""

    def formula(signature: Signature) -> Cost:
        cost, x = forward(signature), tensor(signature, 0, "self")
        moved = cost.bytes + extra * size_of(x.numel, x.dtype)
        return msgspec.structs.replace(cost, vector_flops=max(cost.vector_flops, x.numel), bytes=moved, provenance="derived")

    return formula


@backward_costs("aten::nll_loss_forward", "aten::nll_loss2d_forward", named=True)
def nll_loss(signature: Signature) -> Cost:
    """Return the cost of the gradient of log-probabilities: zeros everywhere, one number for each target."""
    x, target = tensor(signature, 0, "self"), tensor(signature, 1, "target")
    picked = size_of(min(target.numel, x.numel), x.dtype)
    return _cost(target.numel, size_of(x.numel, x.dtype) + target.distinct_bytes + picked)


_POOLS = words(
    """
    max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
    adaptive_max_pool2d adaptive_max_pool3d
    """
)
_MIRRORS = words("sum nansum mean _to_copy constant_pad_nd repeat")
_SAVING = words("norm linalg_vector_norm var std var_mean std_mean logsumexp amax amin max min")
"""Reductions whose gradient reads their input again."""


def _register_mirrored() -> None:
    for names, extra in ((_POOLS, 0), (_MIRRORS, 0), (_SAVING, 1), (_LOSSES, 1)):
        for name in names:
            backward_costs(f"aten::{name}", named=True)(_mirrored(FORMULAS[f"aten::{name}"], extra))


_register_mirrored()
