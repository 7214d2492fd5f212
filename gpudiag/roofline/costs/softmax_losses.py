"""Softmax and losses (op_costs sections 5 and 13)."""

from __future__ import annotations

from gpudiag.model.ops import Cost, Signature
from gpudiag.roofline.costs.arguments import Flow, count_read_bytes, register_flows, size_of
from gpudiag.roofline.costs.registry import costs, require


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
