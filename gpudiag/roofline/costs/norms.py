"""Layer, RMS, group and batch norm, forward and backward (op_costs section 4), softmax and losses (sections 5 and 13).

Norms: one pass over the data, fp32 statistics. FLOP per element are conventions: layer and group norm 8 forward, 14 backward, RMS 4 and 10;
batch norm 8 training, 2 evaluation, 14 backward. Its bytes are the least: one read of x in spite of the two passes that kernels make over
data larger than the cache.
"""

from __future__ import annotations

from math import prod

from gpudiag.model.ops import Cost, Input, Provenance, Signature
from gpudiag.roofline.costs.registry import Flow, costs, count_read_bytes, register_flows, require, size_of

STATISTIC = 4
"""Bytes of one mean or reciprocal deviation (fp32, as torch keeps it for half precision inputs)."""


def estimate_row_norm(signature: Signature, operations: int, parameters: tuple[int, ...], statistics: int) -> Cost:
    """Estimate the cost of a norm of rows (normalized_shape 1, weight 2): x, y and parameters, and `statistics` a row."""
    x, weight = signature.need(0, "input"), signature.tensor(2)
    columns = prod(weight.shape if weight is not None else signature.integers(1, "normalized_shape (Concrete Inputs)"))
    require(columns > 0 and x.numel % columns == 0, "normalized_shape does not fit the input")
    moved = count_read_bytes((x, *signature.tensors(*parameters))) + size_of(x.numel, x.dtype)
    return Cost(vector_flops=operations * x.numel, bytes=moved + statistics * STATISTIC * (x.numel // columns))


costs("aten::native_layer_norm", operations=8, parameters=(2, 3), statistics=2)(estimate_row_norm)
costs("aten::_fused_rms_norm", operations=4, parameters=(2,), statistics=1)(estimate_row_norm)


@costs("aten::native_group_norm")
def group_norm(signature: Signature) -> Cost:
    """Return the cost of group norm: as layer norm with statistics per (sample, group)."""
    x = signature.need(0, "input")
    groups = signature.integer(3, "N (Concrete Inputs)") * signature.integer(6, "group (Concrete Inputs)")
    require(groups >= 0, "negative number of groups")
    moved = count_read_bytes((x, *signature.tensors(1, 2))) + size_of(x.numel, x.dtype) + 2 * STATISTIC * groups
    return Cost(vector_flops=8 * x.numel, bytes=moved)


def count_gradient_bytes(x: Input, weight: Input | None, columns: int, mask: tuple[bool, ...]) -> int:
    """Count the bytes of the gradients written: input where mask[0], then one row of parameters for each further True."""
    dtype = weight.dtype if weight is not None else x.dtype
    return (size_of(x.numel, x.dtype) if mask[0] else 0) + sum(mask[1:]) * size_of(columns, dtype)


def estimate_norm_backward(
    signature: Signature, operations: int, saved: tuple[int, ...], weight_at: int, mask_at: int, parameters: int = 2
) -> Cost:
    """Estimate the cost of a backward: x, dy, statistics (at `saved`) and gamma read; dx, dgamma, dbeta written as output_mask asks.

    A mask that was not recorded asks for everything that has a weight (`derived`).
    """
    grad, x = signature.need_all("grad_out", "input")
    weight = signature.tensor(weight_at)
    recorded = signature.value(mask_at) is not None
    mask = signature.flags(mask_at, "output_mask") if recorded else (True, *(weight is not None for _ in range(parameters)))
    moved = count_read_bytes((grad, x, weight, *signature.tensors(*saved)))
    moved += count_gradient_bytes(x, weight, weight.numel if weight is not None else 0, mask)
    return Cost(vector_flops=operations * x.numel, bytes=moved, provenance="exact" if recorded else "derived")


costs("aten::native_layer_norm_backward", operations=14, saved=(3, 4), weight_at=5, mask_at=7)(estimate_norm_backward)
costs("aten::native_group_norm_backward", operations=14, saved=(2, 3), weight_at=4, mask_at=9)(estimate_norm_backward)
costs("aten::_fused_rms_norm_backward", operations=10, saved=(3,), weight_at=4, mask_at=5, parameters=1)(estimate_norm_backward)


def estimate_batch_norm(
    signature: Signature, training: bool, parameters: tuple[int, ...] = (1, 2, 3, 4), provenance: Provenance = "exact"
) -> Cost:
    """Estimate the cost of batch norm: x, y and parameters; in training two statistics a channel are written."""
    x = signature.need(0, "input")
    require(len(x.shape) >= 2, "input has no channel dimension")
    saved = 2 * STATISTIC * x.shape[1] if training else 0
    moved = count_read_bytes((x, *signature.tensors(*parameters))) + size_of(x.numel, x.dtype) + saved
    return Cost(vector_flops=(8 if training else 2) * x.numel, bytes=moved, provenance=provenance)


costs("aten::_batch_norm_with_update", "aten::_batch_norm_with_update_functional", training=True)(estimate_batch_norm)
costs("aten::_batch_norm_no_update", "aten::_native_batch_norm_legit_no_training", training=False)(estimate_batch_norm)


@costs("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm", "aten::_batch_norm_impl_index", "aten::batch_norm")
def batch_norm(signature: Signature) -> Cost:
    """Return the cost of batch norm (weight, bias, running statistics 1-4, training 5).

    A training flag that was not recorded is taken as True (`derived`): it hardly changes the bytes, which bind.
    """
    recorded = isinstance(signature.value(5), bool)
    training = signature.flag(5, "training") if recorded else True
    return estimate_batch_norm(signature, training, provenance="exact" if recorded else "derived")


@costs("aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit_functional")
def batch_norm_legit(signature: Signature) -> Cost:
    """Return the cost of batch norm as torch.export writes it (training 5, or 3 in the overload without running statistics)."""
    without_statistics = isinstance(signature.value(3), bool)
    training = signature.flag(3 if without_statistics else 5, "training (Concrete Inputs)")
    return estimate_batch_norm(signature, training, (1, 2) if without_statistics else (1, 2, 3, 4))


# (grad_out, input) or (input, grad_output), weight 2, running statistics 3-4, saved statistics 5-6. Position of output_mask, if any.
_BACKWARDS = {
    "aten::native_batch_norm_backward": 9,
    "aten::batch_norm_backward": 9,
    "aten::cudnn_batch_norm_backward": None,
    "aten::miopen_batch_norm_backward": None,
}


def estimate_batch_norm_backward(signature: Signature, mask_at: int | None) -> Cost:
    """Estimate the cost of batch norm's backward; without a recorded output_mask all gradients are taken."""
    first, second = signature.need_all("grad_out", "input")
    require(len(second.shape) >= 2, "input has no channel dimension")
    weight = signature.tensor(2)
    mask, recorded = (True, weight is not None, weight is not None), mask_at is None
    value = signature.value(mask_at) if mask_at is not None else None
    if isinstance(value, tuple) and len(value) == 3:
        mask, recorded = (value[0] is True, value[1] is True, value[2] is True), True
    moved = count_read_bytes((first, second, *signature.tensors(2, 5, 6))) + count_gradient_bytes(second, weight, second.shape[1], mask)
    return Cost(vector_flops=14 * second.numel, bytes=moved, provenance="exact" if recorded else "derived")


for _name, _mask_at in _BACKWARDS.items():
    costs(_name, mask_at=_mask_at)(estimate_batch_norm_backward)


@costs("aten::batch_norm_stats")
def batch_norm_stats(signature: Signature) -> Cost:
    """Return the cost of synchronised batch norm's first part: x read, mean and reciprocal deviation a channel written."""
    x = signature.need(0, "input")
    require(len(x.shape) >= 2, "input has no channel dimension")
    return Cost(vector_flops=4 * x.numel, bytes=x.distinct_bytes + 2 * STATISTIC * x.shape[1])


@costs("aten::batch_norm_backward_reduce")
def batch_norm_backward_reduce(signature: Signature) -> Cost:
    """Return the cost of its backward's sums (dy 0, x 1, statistics 2-3, weight 4): both read, up to four numbers a channel written."""
    grad, x = signature.need_all("grad_out", "input")
    require(len(x.shape) >= 2, "input has no channel dimension")
    wanted = 2 + sum(signature.value(index) is True for index in (6, 7))
    return Cost(vector_flops=5 * x.numel, bytes=count_read_bytes((grad, x, *signature.tensors(2, 3))) + wanted * STATISTIC * x.shape[1])


register_flows(
    {
        "aten::batch_norm_elemt": Flow(reads=(0, 1, 2, 3, 4), writes=(0,), operations=4),
        "aten::batch_norm_backward_elemt": Flow(reads=(0, 1, 2, 3, 4, 5, 6, 7), writes=(1,), operations=6),
        "aten::batch_norm_update_stats": Flow(reads=(0, 1, 2), writes=(1, 2), operations=4),
        "aten::batch_norm_gather_stats": Flow(reads=(1, 2, 3, 4), writes=(3, 4, 3, 4), operations=8, per=1),
        "aten::batch_norm_gather_stats_with_counts": Flow(reads=(1, 2, 3, 4, 7), writes=(3, 4, 3, 4), operations=8, per=1),
        # weight norm: v and its norms; torch/nn/utils/parametrizations.py
        "aten::_weight_norm_interface": Flow(reads=(0, 1), writes=(0, 1), operations=3),
        "aten::_weight_norm_interface_backward": Flow(reads=(0, 1, 2, 3), writes=(1, 2), operations=6),
    }
)


@costs("aten::_softmax", "aten::_log_softmax")
def softmax(signature: Signature) -> Cost:
    """Return 5 FLOP an element (maximum, subtract, exponential, sum, divide), x read and y written; fp32 y with half_to_float."""
    x = signature.need(0, "self")
    widened = x.dtype in ("fp16", "bf16") and signature.flag(2, "half_to_float (Concrete Inputs)")
    return Cost(vector_flops=5 * x.numel, bytes=x.distinct_bytes + size_of(x.numel, "fp32" if widened else x.dtype))


@costs("aten::_softmax_backward_data", "aten::_log_softmax_backward_data")
def softmax_backward(signature: Signature) -> Cost:
    """Return 4 FLOP an element, gradient and output read, the input's gradient written in the input's dtype (argument 3)."""
    grad, output = signature.need_all("grad_output", "output")
    before = signature.tensor(3)  # torch before 1.11 passed the input itself
    dtype = before.dtype if before is not None else signature.scalar_type(3, grad.dtype or "")
    return Cost(vector_flops=4 * output.numel, bytes=count_read_bytes((grad, output)) + size_of(output.numel, dtype))


NO_REDUCTION = 0
"""at::Reduction::None (aten/src/ATen/core/Reduction.h); 1 mean, 2 sum."""

# name -> (FLOP per element, optional tensors, position of the reduction)
_PAIRWISE = {
    "mse_loss": (3, (), 2),
    "l1_loss": (3, (), 2),
    "smooth_l1_loss": (5, (), 2),
    "huber_loss": (5, (), 2),
    "binary_cross_entropy": (10, (2,), 3),
    "binary_cross_entropy_with_logits": (10, (2, 3), 4),
}


def estimate_pairwise(signature: Signature, operations: int, optional: tuple[int, ...], reduction: int) -> Cost:
    """Estimate the cost of a loss of input and target: both read, one number (or one an element) written."""
    x, target = signature.need_all("self", "target")
    outputs = x.numel if signature.integer(reduction, "reduction (Concrete Inputs)") == NO_REDUCTION else 1
    moved = count_read_bytes((x, target, *signature.tensors(*optional))) + size_of(outputs, x.dtype)
    return Cost(vector_flops=operations * x.numel, bytes=moved)


for _name, (_operations, _optional, _reduction) in _PAIRWISE.items():
    costs(f"aten::{_name}", operations=_operations, optional=_optional, reduction=_reduction)(estimate_pairwise)


@costs("aten::nll_loss_forward", "aten::nll_loss2d_forward")
def nll_loss_forward(signature: Signature) -> Cost:
    """Return the cost of picking one log-probability a target: picked values and targets read; a mean's two numbers are not counted."""
    x, target = signature.need_all("self", "target")
    require(bool(x.shape), "input has no class dimension")
    # not recorded: a mean or sum, whose result has no size; the difference is one number a target
    outputs = target.numel if signature.value(3) == NO_REDUCTION and type(signature.value(3)) is int else 0
    picked = size_of(min(target.numel, x.numel) + outputs, x.dtype)
    moved = picked + target.distinct_bytes + count_read_bytes(signature.tensors(2))
    return Cost(vector_flops=target.numel, bytes=moved)


@costs("aten::nll_loss_backward", "aten::nll_loss2d_backward")
def nll_loss_backward(signature: Signature) -> Cost:
    """Return the cost of the scatter kernel: targets and gradient read, one element a target written.

    The gradient's zero fill is an op of its own below this one (aten::zero_) and carries the rest of the output.
    """
    grad, x, target = signature.need_all("grad_output", "self", "target")
    return Cost(vector_flops=target.numel, bytes=size_of(min(target.numel, x.numel), x.dtype) + count_read_bytes((grad, target)))


@costs("aten::multi_margin_loss", "aten::multilabel_margin_loss_forward")
def margin_loss(signature: Signature) -> Cost:
    """Return the cost of a margin between classes: input and targets read, one number (or one a sample) written; 4 FLOP an element."""
    x, target = signature.need_all("self", "target")
    one_target = len(target.shape) < len(x.shape)
    reduces = signature.integer(5 if one_target else 2, "reduction (Concrete Inputs)") != NO_REDUCTION
    samples = x.shape[0] if len(x.shape) == 2 else 1
    is_target = 0 if one_target else size_of(target.numel, x.dtype)
    moved = count_read_bytes((x, target, *signature.tensors(4))) + size_of(1 if reduces else samples, x.dtype) + is_target
    return Cost(vector_flops=4 * x.numel, bytes=moved)


# CTC: 6 FLOP for each cell of the forward and of the backward lattice, [batch, time, 2 * target length + 1] (Graves et al. 2006).
register_flows(
    {
        "aten::_masked_softmax": Flow(reads=(0, 1), writes=(0,), operations=5),
        "aten::_masked_softmax_backward": Flow(reads=(0, 1, 2), writes=(1,), operations=4, per=1),
        # losses of input and target: gradient, both and optional weights read, the input's gradient written
        "aten::mse_loss_backward": Flow(reads=(0, 1, 2), writes=(1,), operations=3, per=1, required=(0, 2)),
        "aten::smooth_l1_loss_backward aten::huber_loss_backward": Flow((0, 1, 2), (1,), operations=5, per=1, required=(0, 2)),
        "aten::multilabel_margin_loss_backward": Flow(reads=(0, 1, 2, 4), writes=(1,), operations=5, per=1, required=(0, 2)),
        "aten::binary_cross_entropy_backward": Flow(reads=(0, 1, 2, 3), writes=(1,), operations=10, per=1, required=(0, 2)),
        "aten::multi_margin_loss_backward": Flow(reads=(0, 1, 2, 5), writes=(1,), operations=5, per=1),
        "aten::_ctc_loss_backward": Flow(reads=(0, 1, 2, 5, 6), writes=(1,), operations=12, per=6),
        "aten::_cudnn_ctc_loss": Flow(reads=(0, 1), writes=(0,), operations=12, provenance="derived"),
        "aten::miopen_ctc_loss": Flow(reads=(0, 1), writes=(0,), operations=12, provenance="derived"),
    }
)


@costs("aten::_ctc_loss")
def ctc_loss(signature: Signature) -> Cost:
    """Return the cost of the forward lattice: log-probabilities of the targets read, [batch, time, 2 * longest target + 1] written.

    Targets in one row without their lengths: all as long as the mean (`derived`).
    """
    x, targets = signature.need_all("log_probs", "targets")
    require(len(x.shape) == 3 and x.shape[1] > 0, "log_probs is not [time, batch, classes]")
    lengths = signature.value(3)
    known = isinstance(lengths, tuple) and bool(lengths) and all(type(item) is int and item >= 0 for item in lengths)
    longest = max((item for item in lengths if type(item) is int), default=0) if isinstance(lengths, tuple) and known else 0
    if not known:
        longest = targets.shape[1] if len(targets.shape) == 2 else -(-targets.numel // x.shape[1])
    cells = x.shape[0] * x.shape[1] * (2 * longest + 1)
    moved = min(x.distinct_bytes, size_of(cells, x.dtype)) + targets.distinct_bytes + size_of(cells + x.shape[1], x.dtype)
    return Cost(vector_flops=6 * cells, bytes=moved, provenance="exact" if known else "derived")
