"""Batch norm, forward and backward (op_costs section 4). Bytes are the least: one read of x in spite of the two passes that kernels
make over data larger than the cache. FLOP per element: 8 training, 2 evaluation, 14 backward (conventions)."""

from __future__ import annotations

from gpudiag.model.cost import Cost, Provenance
from gpudiag.model.signature import Signature
from gpudiag.roofline.costs.arguments import flag, present, tensor
from gpudiag.roofline.costs.flows import Flow, register_flows
from gpudiag.roofline.costs.norms import STATISTIC, gradient_bytes
from gpudiag.roofline.costs.registry import costs, require
from gpudiag.roofline.costs.shapes import read_bytes, size_of


def _forward(signature: Signature, training: bool, parameters: tuple[int, ...] = (1, 2, 3, 4), provenance: Provenance = "exact") -> Cost:
    x = tensor(signature, 0, "input")
    require(len(x.shape) >= 2, "input has no channel dimension")
    saved = 2 * STATISTIC * x.shape[1] if training else 0
    moved = read_bytes((x, *present(signature, *parameters))) + size_of(x.numel, x.dtype) + saved
    return Cost(vector_flops=(8 if training else 2) * x.numel, bytes=moved, provenance=provenance)


@costs("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm", "aten::_batch_norm_impl_index", "aten::batch_norm")
def batch_norm(signature: Signature) -> Cost:
    """Return the cost of batch norm (weight, bias, running statistics 1-4, training 5).

    A training flag that was not recorded is taken as True (`derived`): it hardly changes the bytes, which bind.
    """
    recorded = isinstance(signature.value(5), bool)
    training = flag(signature, 5, "training") if recorded else True
    return _forward(signature, training, provenance="exact" if recorded else "derived")


@costs("aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit_functional")
def batch_norm_legit(signature: Signature) -> Cost:
    """Return the cost of batch norm as torch.export writes it (training 5, or 3 in the overload without running statistics)."""
    without_statistics = isinstance(signature.value(3), bool)
    training = flag(signature, 3 if without_statistics else 5, "training (Concrete Inputs)")
    return _forward(signature, training, (1, 2) if without_statistics else (1, 2, 3, 4))


@costs("aten::_batch_norm_with_update", "aten::_batch_norm_with_update_functional")
def batch_norm_with_update(signature: Signature) -> Cost:
    """Return the cost of batch norm in training."""
    return _forward(signature, training=True)


@costs("aten::_batch_norm_no_update", "aten::_native_batch_norm_legit_no_training")
def batch_norm_no_update(signature: Signature) -> Cost:
    """Return the cost of batch norm in evaluation."""
    return _forward(signature, training=False)


# (grad_out, input) or (input, grad_output), weight 2, running statistics 3-4, saved statistics 5-6. Position of output_mask, if any.
_BACKWARDS = {
    "aten::native_batch_norm_backward": 9,
    "aten::batch_norm_backward": 9,
    "aten::cudnn_batch_norm_backward": None,
    "aten::miopen_batch_norm_backward": None,
}


def _backward(signature: Signature, mask_at: int | None) -> Cost:
    first, second = tensor(signature, 0, "grad_out"), tensor(signature, 1, "input")
    require(len(second.shape) >= 2, "input has no channel dimension")
    weight = signature.tensor(2)
    mask, recorded = (True, weight is not None, weight is not None), mask_at is None
    value = signature.value(mask_at) if mask_at is not None else None
    if isinstance(value, tuple) and len(value) == 3:
        mask, recorded = (value[0] is True, value[1] is True, value[2] is True), True
    moved = read_bytes((first, second, *present(signature, 2, 5, 6))) + gradient_bytes(second, weight, second.shape[1], mask)
    return Cost(vector_flops=14 * second.numel, bytes=moved, provenance="exact" if recorded else "derived")


def _register() -> None:
    for name, mask_at in _BACKWARDS.items():

        def formula(signature: Signature, mask_at: int | None = mask_at) -> Cost:
            return _backward(signature, mask_at)

        costs(name)(formula)


_register()


@costs("aten::batch_norm_stats")
def batch_norm_stats(signature: Signature) -> Cost:
    """Return the cost of synchronised batch norm's first part: x read, mean and reciprocal deviation a channel written."""
    x = tensor(signature, 0, "input")
    require(len(x.shape) >= 2, "input has no channel dimension")
    return Cost(vector_flops=4 * x.numel, bytes=x.distinct_bytes + 2 * STATISTIC * x.shape[1])


@costs("aten::batch_norm_backward_reduce")
def batch_norm_backward_reduce(signature: Signature) -> Cost:
    """Return the cost of its backward's sums (dy 0, x 1, statistics 2-3, weight 4): both read, up to four numbers a channel written."""
    grad, x = tensor(signature, 0, "grad_out"), tensor(signature, 1, "input")
    require(len(x.shape) >= 2, "input has no channel dimension")
    wanted = 2 + sum(signature.value(index) is True for index in (6, 7))
    return Cost(vector_flops=5 * x.numel, bytes=read_bytes((grad, x, *present(signature, 2, 3))) + wanted * STATISTIC * x.shape[1])


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
