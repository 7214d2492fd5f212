"""Layer, RMS and group norm, forward and backward (op_costs section 4): one pass over the data, fp32 statistics.

FLOP per element are conventions: 8 forward, 14 backward, RMS 4 and 10.
"""

from __future__ import annotations

from math import prod

from gpudiag.model.cost import Cost
from gpudiag.model.signature import Input, Signature
from gpudiag.roofline.costs.arguments import flags, integer, ints, present, tensor
from gpudiag.roofline.costs.registry import costs, require
from gpudiag.roofline.costs.shapes import read_bytes, size_of

STATISTIC = 4
"""Bytes of one mean or reciprocal deviation (fp32, as torch keeps it for half precision inputs)."""


def _rows(signature: Signature, x: Input, shape_at: int, weight_at: int) -> int:
    """Return the number of rows that are normalised, from normalized_shape or from the weight."""
    weight = signature.tensor(weight_at)
    normalized = weight.shape if weight is not None else ints(signature, shape_at, "normalized_shape (Concrete Inputs)")
    columns = prod(normalized)
    require(columns > 0 and x.numel % columns == 0, "normalized_shape does not fit the input")
    return x.numel // columns


@costs("aten::native_layer_norm")
def layer_norm(signature: Signature) -> Cost:
    """Return the cost of layer norm: x, y, gamma, beta, and mean and reciprocal deviation a row."""
    x = tensor(signature, 0, "input")
    rows = _rows(signature, x, 1, 2)
    moved = read_bytes((x, *present(signature, 2, 3))) + size_of(x.numel, x.dtype) + 2 * STATISTIC * rows
    return Cost(vector_flops=8 * x.numel, bytes=moved)


@costs("aten::_fused_rms_norm")
def rms_norm(signature: Signature) -> Cost:
    """Return the cost of RMS norm: x, y, gamma, one statistic a row."""
    x = tensor(signature, 0, "input")
    rows = _rows(signature, x, 1, 2)
    moved = read_bytes((x, *present(signature, 2))) + size_of(x.numel, x.dtype) + STATISTIC * rows
    return Cost(vector_flops=4 * x.numel, bytes=moved)


def gradient_bytes(x: Input, weight: Input | None, columns: int, mask: tuple[bool, ...]) -> int:
    """Return the bytes of the gradients written: input where mask[0], then one row of parameters for each further True."""
    dtype = weight.dtype if weight is not None else x.dtype
    return (size_of(x.numel, x.dtype) if mask[0] else 0) + sum(mask[1:]) * size_of(columns, dtype)


def _backward(signature: Signature, operations: int, saved: tuple[int, ...], weight_at: int, mask_at: int, parameters: int) -> Cost:
    """Return the cost of a backward; an output_mask that was not recorded asks for everything that has a weight (`derived`)."""
    grad, x = tensor(signature, 0, "grad_out"), tensor(signature, 1, "input")
    weight = signature.tensor(weight_at)
    recorded = signature.value(mask_at) is not None
    mask = flags(signature, mask_at, "output_mask") if recorded else (True, *(weight is not None for _ in range(parameters)))
    statistics = present(signature, *saved)
    columns = weight.numel if weight is not None else 0
    read = read_bytes((grad, x, *statistics)) + (weight.distinct_bytes if weight is not None else 0)
    moved = read + gradient_bytes(x, weight, columns, mask)
    return Cost(vector_flops=operations * x.numel, bytes=moved, provenance="exact" if recorded else "derived")


@costs("aten::native_layer_norm_backward")
def layer_norm_backward(signature: Signature) -> Cost:
    """Return the cost of layer norm's backward: x, dy, statistics and gamma read; dx, dgamma, dbeta written as output_mask asks."""
    return _backward(signature, 14, (3, 4), weight_at=5, mask_at=7, parameters=2)


@costs("aten::_fused_rms_norm_backward")
def rms_norm_backward(signature: Signature) -> Cost:
    """Return the cost of RMS norm's backward: x, dy, one statistic and gamma read; dx, dgamma written as output_mask asks."""
    return _backward(signature, 10, (3,), weight_at=4, mask_at=5, parameters=1)


@costs("aten::native_group_norm")
def group_norm(signature: Signature) -> Cost:
    """Return the cost of group norm: as layer norm with statistics per (sample, group)."""
    x = tensor(signature, 0, "input")
    groups = integer(signature, 3, "N (Concrete Inputs)") * integer(signature, 6, "group (Concrete Inputs)")
    require(groups >= 0, "negative number of groups")
    moved = read_bytes((x, *present(signature, 1, 2))) + size_of(x.numel, x.dtype) + 2 * STATISTIC * groups
    return Cost(vector_flops=8 * x.numel, bytes=moved)


@costs("aten::native_group_norm_backward")
def group_norm_backward(signature: Signature) -> Cost:
    """Return the cost of group norm's backward (statistics 2-3, weight 4, output_mask 9)."""
    return _backward(signature, 14, (2, 3), weight_at=4, mask_at=9, parameters=2)
