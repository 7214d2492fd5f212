"""Convolutions whose own record does not tell their work, from the call on the other side of the autograd graph.

torch before 1.12 records no stride or padding ('Concrete Inputs'), so the output size of a forward is not known; but FLOP =
2 * N*K*P*Q * (C/groups)*R*S needs no more than the output's shape, and an autograd node records it: its first input is the gradient of
the output. A cudnn_convolution_backward_weight call records no weight shape; its forward does. Provenance `derived`.
"""

from __future__ import annotations

from math import prod

from gpudiag.model.cost import Cost
from gpudiag.model.signature import Shape, Signature
from gpudiag.roofline.costs.arguments import present, tensor
from gpudiag.roofline.costs.convolution import LAYOUTS, Layout, operands
from gpudiag.roofline.costs.gemm import matrix_cost
from gpudiag.roofline.costs.registry import NotModelledError, require
from gpudiag.roofline.costs.shapes import read_bytes, size_of

WEIGHT_GRADIENTS = ("aten::cudnn_convolution_backward_weight", "aten::miopen_convolution_backward_weight")
"""Schema: (weight size, grad_output, self, ...): native_functions.yaml of torch 1.9. The size is an argument, not a tensor."""

_MISFIT = "the gradient does not fit the input and weight shapes"


def _multiply_adds(x: Shape, weight: Shape, out: Shape, layout: Layout) -> int:
    """Return the multiply-adds of a convolution from `x` to `out`.

    Plain: weight [K, C/groups, *kernel]; transposed: weight [C, K/groups, *kernel]. Raises NotModelledError where the shapes fit
    neither, or both with unequal work.
    """
    require(len(x) == len(out) == len(weight) and x[0] == out[0], _MISFIT)
    taps, found = prod(weight[1:]), set()
    may_be = layout.is_transposed, layout.is_transposed or layout.transposed is not None
    if not may_be[0] and out[1] == weight[0] and weight[1] > 0 and x[1] % weight[1] == 0:
        found.add(prod(out) * taps)
    if may_be[1] and x[1] == weight[0] and weight[1] > 0 and out[1] % weight[1] == 0:
        found.add(prod(x) * taps)
    require(len(found) == 1, _MISFIT if not found else "transposed was not recorded and the shapes fit both ways")
    return found.pop()


def forward_from_output(name: str, signature: Signature, out: Shape) -> Cost:
    """Return the cost of forward convolution `name` whose result has the shape `out`. Raises NotModelledError where that cannot be."""
    layout = LAYOUTS[name]
    x, weight, shape, _ = operands(signature, layout)
    out = out if len(out) == len(shape) else (1, *out)
    moved = read_bytes((x, weight, *present(signature, *layout.extra))) + size_of(prod(out), x.dtype)
    return matrix_cost(_multiply_adds(shape, weight.shape, out, layout), x.dtype, moved, "derived")


def forward_from_node(name: str, signature: Signature, node: Signature) -> Cost:
    """Return the cost of forward convolution `name` whose autograd node recorded `node`: first the gradient of the result."""
    return forward_from_output(name, signature, tensor(node, 0, "the gradient of the result").shape)


def weight_gradient(signature: Signature, forward: Signature) -> Cost:
    """Return the cost of a weight gradient alone, whose forward was called with `forward` (input 0, weight 1 in every spelling)."""
    grad, x = tensor(signature, 1, "grad_output"), tensor(signature, 2, "input")
    first, weight = tensor(forward, 0, "input"), tensor(forward, 1, "weight")
    if first.shape != x.shape or len(weight.shape) != len(grad.shape):
        raise NotModelledError("the forward call does not fit the gradient")
    moved = read_bytes((grad, x)) + size_of(weight.numel, weight.dtype)
    anchor = _multiply_adds(x.shape, weight.shape, grad.shape, LAYOUTS["aten::cudnn_convolution"])
    return matrix_cost(anchor, grad.dtype, moved, "derived")


def forward_from_taker(name: str, signature: Signature, taker: Signature) -> Cost:
    """Return the cost of forward convolution `name` whose result is the first input of the call with `taker`."""
    return forward_from_output(name, signature, tensor(taker, 0, "the op that takes the result").shape)
