"""Triton templates of Inductor (`triton_tem_*`): matrix products and convolutions whose operands tell the sizes.

FLOP: 2 m n k (op_costs section 1) and 2 * results * (C/groups) * window (section 2). Bytes: each operand once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from gpudiag.model.cost import Cost
from gpudiag.model.finding import Missing
from gpudiag.roofline.costs.fused import Operand

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm", "_int_mm", "matmul")


def template_cost(ops: Sequence[str], operands: Sequence[Operand]) -> Cost | Missing:
    """Return the cost of a template kernel; Missing where the operands do not tell its matrix work without doubt."""
    if any("attention" in op for op in ops):
        return Missing("a compiled attention: the blocks that its mask leaves out were not recorded")
    flops = None
    if "convolution" in ops:
        flops = _convolution(operands)
    elif any(op in _PRODUCTS for op in ops):
        flops = _product(operands)
    if flops is None:
        return Missing("a template kernel: the recorded operands do not tell the sizes of its product")
    matrix = next(item for item in operands if len(item.shape) >= 2)
    return Cost(matrix_flops=flops, bytes=sum(item.bytes for item in operands), dtype=matrix.dtype, provenance="derived")


def _product(operands: Sequence[Operand]) -> int | None:
    """Return 2 b m n k where exactly one pair of neighbouring operands multiplies to a result of the last operand's size."""
    found = {
        2 * left.numel * right.shape[-1]
        for left, right in pairwise(operands[:-1])
        if _multiplies(left, right) and left.numel // left.shape[-1] * right.shape[-1] == operands[-1].numel
    }
    return found.pop() if len(found) == 1 else None


def _multiplies(left: Operand, right: Operand) -> bool:
    """Return whether left[..., m, k] times right[..., k, n] is a matrix product."""
    if len(left.shape) not in (2, 3) or len(left.shape) != len(right.shape) or not left.numel * right.numel:
        return False
    return left.shape[-1] == right.shape[-2] and left.shape[:-2] == right.shape[:-2]


def _convolution(operands: Sequence[Operand]) -> int | None:
    """Return 2 * results * (C/groups) * window of x[N, C, ...], weight[K, C/groups, window...] and a result [N, K, ...] at the end."""
    spatial = [item for item in operands if len(item.shape) in (3, 4, 5)]
    if len(spatial) < 3 or len({len(item.shape) for item in spatial}) != 1:
        return None
    x, weight, y = spatial[0].shape, spatial[1].shape, spatial[-1].shape
    fits = y[:2] == (x[0], weight[0]) and weight[1] > 0 and x[1] % weight[1] == 0
    return 2 * prod(y) * prod(weight[1:]) if fits else None
