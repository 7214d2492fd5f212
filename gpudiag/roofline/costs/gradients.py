"""What a backward costs, from its forward's recorded inputs: for autograd nodes whose own calls record no shapes; and the other way round.

Matrix ops: a product or convolution has two gradients (both inputs are taken to need one), each of the forward's FLOPs over the same
three tensors (op_costs sections 1 and 2). A fused attention backward forms five products where the forward forms two: 2.5 x at equal head
dimensions, one of them the scores again (op_costs section 3; FlashAttention-2, arXiv:2307.08691, section 3.1.2). Provenance `derived`.

Ops without products: the least traffic of the whole node, whatever kernels it launches: the result's gradient and what was saved are read
once, the gradients written once; every differentiable input is taken to need one. FLOP an element are those of the backward ops
(norms.py, vision.py). Provenance `derived`. Saved tensors: torch/tools/autograd/derivatives.yaml.

The forward from its gradient: the first gradient of a node has the shape and dtype of the forward's first result (torch/csrc/autograd).
With it a join of tensors whose sizes were not recorded, a reduction without its dimensions or an indexing whose index shapes torch never
records costs what the same call with an `out=` tensor of that size costs; and a pooled look-up in embedding tables knows the width of its
rows.
"""

from __future__ import annotations

import msgspec

from gpudiag.model.ops import Cost, Input, NotModelledError, Signature
from gpudiag.roofline.costs import attention, copies, norms, reductions, vision  # noqa: F401 - their formulas are derived from
from gpudiag.roofline.costs.convolution import CONVOLUTION_LAYOUTS
from gpudiag.roofline.costs.elementwise import POINTWISE, Pointwise, find_result_dtype
from gpudiag.roofline.costs.embedding import TOTAL_D as TOTAL_D
from gpudiag.roofline.costs.norms import STATISTIC
from gpudiag.roofline.costs.registry import (
    FORMULAS,
    Flow,
    Formula,
    backward_costs,
    count_broadcast,
    count_read_bytes,
    estimate_flow,
    find_dtype_category,
    promote_dtypes,
    require,
    size_of,
    split_names,
)

MATRIX_PRODUCTS = split_names(
    "aten::mm aten::bmm aten::matmul aten::mv aten::dot aten::addmm aten::baddbmm aten::addmv aten::addbmm aten::linear"
)

FUSED_ATTENTION = split_names(
    """
    aten::_scaled_dot_product_flash_attention aten::_scaled_dot_product_flash_attention_for_cpu
    aten::_scaled_dot_product_efficient_attention aten::_scaled_dot_product_cudnn_attention
    aten::_scaled_dot_product_fused_attention_overrideable aten::_flash_attention_forward aten::_efficient_attention_forward
    aten::_cudnn_attention_forward flash_attn::_flash_attn_forward
    """
)


def estimate_both_gradients(signature: Signature, forward: Formula) -> Cost:
    """Estimate the cost of two gradients of an op with the formula `forward`."""
    cost = forward(signature)
    return msgspec.structs.replace(cost, matrix_flops=2 * cost.matrix_flops, bytes=2 * cost.bytes, provenance="derived")


def estimate_attention_gradient(signature: Signature, forward: Formula) -> Cost:
    """Estimate the cost of the backward of a fused attention with the formula `forward` (query 0, value 2).

    Bytes: the forward moved q, k, v and the result; the backward reads them and the result's gradient, and writes three gradients.
    """
    cost = forward(signature)
    width, value_width = (signature.need(index, "query and value").shape[-1] for index in (0, 2))
    both = max(width + value_width, 1)
    return msgspec.structs.replace(
        cost,
        matrix_flops=cost.matrix_flops * (3 * width + 2 * value_width) // both,
        bytes=2 * cost.bytes,
        provenance="generic" if cost.provenance == "generic" else "derived",
        recompute_flops=cost.matrix_flops * width // both,
    )


for _name in (*MATRIX_PRODUCTS, *CONVOLUTION_LAYOUTS):
    backward_costs(_name, forward=FORMULAS[_name])(estimate_both_gradients)
for _name in FUSED_ATTENTION:
    backward_costs(_name, forward=FORMULAS[_name])(estimate_attention_gradient)


LINEAR_OPS = frozenset(split_names("add sub rsub neg lerp"))
"""Their gradient needs no input: it is the result's gradient, scaled or summed where an operand was broadcast."""

NO_GRADIENT = frozenset(
    split_names("sign sgn ceil floor round trunc bitwise_not logical_not floor_divide heaviside nextafter gcd lcm digamma")
)


def _build_cost(flops: int, moved: int) -> Cost:
    return Cost(vector_flops=flops, bytes=moved, provenance="derived")


def _count_written_gradients(inputs: list[Input]) -> int:
    return sum(size_of(item.numel, item.dtype) for item in inputs if find_dtype_category(item.dtype or "") >= 2)


def estimate_pointwise_gradient(signature: Signature, op: Pointwise, linear: bool) -> Cost:
    """Estimate the cost of an element-wise op's backward: the gradient and (unless linear) the operands read, a gradient an operand."""
    operands = [item for item in signature.tensors(*range(op.operands)) if item.shape or op.operands == 1]
    require(bool(operands), "no tensor shape was recorded")
    elements = count_broadcast(operands)
    saved = 0 if linear else count_read_bytes(operands)
    moved = size_of(elements, find_result_dtype(operands, op.result)) + saved + _count_written_gradients(operands)
    return _build_cost(op.operations * elements * len(operands), moved)


for _name, _op in POINTWISE.items():
    if _op.result != "bool" and _name not in NO_GRADIENT and not _name.startswith("__") and "backward" not in _name:
        _spellings = [full for full in (f"aten::{_name}", f"aten::{_name}_") if full in FORMULAS]
        backward_costs(*_spellings, named=True, op=_op, linear=_name in LINEAR_OPS)(estimate_pointwise_gradient)


def estimate_norm_gradient(
    signature: Signature, operations: int, weight_at: int, parameters: int, statistics: int, by_channel: bool
) -> Cost:
    """Estimate the cost of a norm's backward: x, dy, `statistics` a row (or channel), gamma read; dx and `parameters` gradients written."""
    x, weight = signature.need(0, "input"), signature.tensor(weight_at)
    gamma = [weight] if weight is not None else []
    samples = sum(x.numel // max(item.numel, 1) for item in gamma)
    if by_channel:
        require(len(x.shape) >= 2 or not statistics, "input has no channel dimension")
        samples = x.shape[1] if statistics else 0
    moved = 3 * size_of(x.numel, x.dtype) + count_read_bytes(gamma) + parameters * _count_written_gradients(gamma)
    return _build_cost(operations * x.numel, moved + statistics * STATISTIC * samples)


_BATCH_NORMS = split_names("native_batch_norm cudnn_batch_norm miopen_batch_norm _batch_norm_impl_index batch_norm _batch_norm_with_update")

# FLOP, position of the weight, gradients of parameters, statistics of a row or channel (group norm's are few beside x)
for _names, _operations, _weight_at, _parameters, _statistics, _by_channel in (
    (("aten::native_layer_norm", "aten::layer_norm"), 14, 2, 2, 2, False),
    (("aten::_fused_rms_norm",), 10, 2, 1, 1, False),
    (("aten::native_group_norm",), 14, 1, 2, 0, True),
    (tuple(f"aten::{name}" for name in _BATCH_NORMS), 14, 1, 2, 2, True),
):
    backward_costs(
        *_names,
        named=True,
        operations=_operations,
        weight_at=_weight_at,
        parameters=_parameters,
        statistics=_statistics,
        by_channel=_by_channel,
    )(estimate_norm_gradient)


@backward_costs("aten::_softmax", "aten::_log_softmax", named=True)
def softmax_gradient(signature: Signature) -> Cost:
    """Return the cost of softmax's backward: dy and y read (fp32 with half_to_float), dx written in x's dtype."""
    x = signature.need(0, "self")
    widened = x.dtype in ("fp16", "bf16") and signature.flag(2, "half_to_float (Concrete Inputs)")
    return _build_cost(4 * x.numel, 2 * size_of(x.numel, "fp32" if widened else x.dtype) + size_of(x.numel, x.dtype))


# dy and a 1-byte mask read, dx written
_DROPOUT = Flow(reads=(), writes=(0, 0), beside=1, provenance="derived")
backward_costs("aten::native_dropout", "aten::_fused_dropout", named=True, flow=_DROPOUT)(estimate_flow)
_MASKED_FILL = Flow(reads=(1,), writes=(0, 0), required=(1,), provenance="derived")
backward_costs("aten::masked_fill", "aten::masked_fill_", named=True, flow=_MASKED_FILL)(estimate_flow)


@backward_costs("aten::where", named=True)
def where_gradient(signature: Signature) -> Cost:
    """Return the cost of a select's backward: dy and the condition read, a gradient for each side written."""
    condition, sides = signature.need(0, "condition"), signature.tensors(1, 2)
    require(bool(sides), "no side's shape was recorded")
    elements = count_broadcast((condition, *sides))
    solid = [item for item in sides if item.shape]
    return _build_cost(elements, size_of(elements, promote_dtypes(sides)) + condition.distinct_bytes + _count_written_gradients(solid))


_LOSSES = split_names("mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits")


def estimate_mirrored_gradient(signature: Signature, forward: Formula, extra: int) -> Cost:
    """Estimate the cost of a backward that writes where its forward read: the same bytes, `extra` times self besides."""
    cost, x = forward(signature), signature.need(0, "self")
    moved = cost.bytes + extra * size_of(x.numel, x.dtype)
    return msgspec.structs.replace(cost, vector_flops=max(cost.vector_flops, x.numel), bytes=moved, provenance="derived")


@backward_costs("aten::nll_loss_forward", "aten::nll_loss2d_forward", named=True)
def nll_loss_gradient(signature: Signature) -> Cost:
    """Return the cost of the gradient of log-probabilities: zeros everywhere, one number for each target."""
    x, target = signature.need(0, "self"), signature.need(1, "target")
    picked = size_of(min(target.numel, x.numel), x.dtype)
    return _build_cost(target.numel, size_of(x.numel, x.dtype) + target.distinct_bytes + picked)


_POOLS = split_names(
    """
    max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
    adaptive_max_pool2d adaptive_max_pool3d
    """
)
_MIRRORS = split_names("sum nansum mean _to_copy constant_pad_nd repeat")
_SAVING = split_names("norm linalg_vector_norm var std var_mean std_mean logsumexp amax amin max min")
"""Reductions whose gradient reads their input again."""

for _extra, _mirrored in ((0, (*_POOLS, *_MIRRORS)), (1, (*_SAVING, *_LOSSES))):
    for _name in _mirrored:
        _forward = FORMULAS[f"aten::{_name}"]
        backward_costs(f"aten::{_name}", named=True, forward=_forward, extra=_extra)(estimate_mirrored_gradient)


TOLD_AS_OUTPUT = frozenset(
    f"aten::{name}"
    for name in split_names("cat _cat stack _stack index _unsafe_index index_select sum mean nansum prod amax amin var std norm")
)
"""Ops that have an `out=` overload with the result behind their other arguments."""

TOLD_BY_GRADIENT = (*sorted(TOLD_AS_OUTPUT), *sorted(TOTAL_D))


def complete_inputs(name: str, own: Signature, node: Signature) -> Signature:
    """Return the inputs of a call with what the node's own inputs tell; raises NotModelledError where they tell nothing about it."""
    gradient = node.tensor(0)
    if gradient is None or (not gradient.shape and name in TOTAL_D):
        raise NotModelledError("the autograd node recorded no gradient")
    if name in TOTAL_D:
        at = TOTAL_D[name]
        if at >= len(own.inputs) or own.value(at) is not None:
            return own
        return Signature((*own.inputs[:at], Input(value=gradient.shape[-1]), *own.inputs[at + 1 :]))
    if name in TOLD_AS_OUTPUT:
        return Signature((*own.inputs, gradient))
    raise NotModelledError(f"{name} is not told by a gradient")


def estimate_forward_from_gradient(name: str, own: Signature, node: Signature) -> Cost:
    """Estimate the cost of a forward call, given the inputs of its autograd node (`derived`)."""
    cost = FORMULAS[name](complete_inputs(name, own, node))
    return msgspec.structs.replace(cost, provenance="derived")


def complete_backward_inputs(name: str, own: Signature, node: Signature | None) -> Signature:
    """Return the forward's inputs for a backward formula, with what its node tells where that helps."""
    if node is None or name not in TOTAL_D:
        return own
    try:
        return complete_inputs(name, own, node)
    except NotModelledError:
        return own
