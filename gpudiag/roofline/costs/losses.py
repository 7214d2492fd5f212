"""Losses (op_costs sections 5 and 13): element-wise work with a reduction at the end."""

from __future__ import annotations

from gpudiag.model.cost import Cost
from gpudiag.model.signature import Input, Signature
from gpudiag.roofline.costs.arguments import integer, present, tensor
from gpudiag.roofline.costs.registry import costs, require
from gpudiag.roofline.costs.shapes import read_bytes, size_of

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
_PAIRWISE_BACKWARD = {
    "mse_loss_backward": (3, ()),
    "smooth_l1_loss_backward": (5, ()),
    "huber_loss_backward": (5, ()),
    "binary_cross_entropy_backward": (10, (3,)),
}


def _reduces(signature: Signature, index: int) -> bool:
    return integer(signature, index, "reduction (Concrete Inputs)") != NO_REDUCTION


def pairwise(signature: Signature, operations: int, optional: tuple[int, ...], reduction: int) -> Cost:
    """Return the cost of a loss of input and target: both read, one number (or one an element) written."""
    x, target = tensor(signature, 0, "self"), tensor(signature, 1, "target")
    outputs = 1 if _reduces(signature, reduction) else x.numel
    moved = read_bytes((x, target, *present(signature, *optional))) + size_of(outputs, x.dtype)
    return Cost(vector_flops=operations * x.numel, bytes=moved)


def pairwise_backward(signature: Signature, operations: int, optional: tuple[int, ...]) -> Cost:
    """Return the cost of such a loss's backward: gradient, input and target read, the input's gradient written."""
    grad, x, target = (tensor(signature, index, name) for index, name in enumerate(("grad_output", "self", "target")))
    moved = read_bytes((grad, x, target, *present(signature, *optional))) + size_of(x.numel, x.dtype)
    return Cost(vector_flops=operations * x.numel, bytes=moved)


def _register() -> None:
    for name, (operations, optional, reduction) in _PAIRWISE.items():

        def forward(signature: Signature, rule: tuple[int, tuple[int, ...], int] = (operations, optional, reduction)) -> Cost:
            return pairwise(signature, *rule)

        costs(f"aten::{name}")(forward)
    for name, (operations, optional) in _PAIRWISE_BACKWARD.items():

        def backward(signature: Signature, rule: tuple[int, tuple[int, ...]] = (operations, optional)) -> Cost:
            return pairwise_backward(signature, *rule)

        costs(f"aten::{name}")(backward)


_register()


@costs("aten::nll_loss_forward", "aten::nll_loss2d_forward")
def nll_loss_forward(signature: Signature) -> Cost:
    """Return the cost of picking one log-probability a target: picked values and targets read; a mean's two numbers are not counted."""
    x, target = tensor(signature, 0, "self"), tensor(signature, 1, "target")
    require(bool(x.shape), "input has no class dimension")
    # not recorded: a mean or sum, whose result has no size; the difference is one number a target
    outputs = target.numel if signature.value(3) == NO_REDUCTION and type(signature.value(3)) is int else 0
    moved = _picked(x, target) + target.distinct_bytes + size_of(outputs, x.dtype) + read_bytes(present(signature, 2))
    return Cost(vector_flops=target.numel, bytes=moved)


@costs("aten::nll_loss_backward", "aten::nll_loss2d_backward")
def nll_loss_backward(signature: Signature) -> Cost:
    """Return the cost of the scatter kernel: targets and gradient read, one element a target written.

    The gradient's zero fill is an op of its own below this one (aten::zero_) and carries the rest of the output.
    """
    grad, x, target = (tensor(signature, index, name) for index, name in enumerate(("grad_output", "self", "target")))
    return Cost(vector_flops=target.numel, bytes=_picked(x, target) + read_bytes((grad, target)))


def _picked(x: Input, target: Input) -> int:
    return size_of(min(target.numel, x.numel), x.dtype)
