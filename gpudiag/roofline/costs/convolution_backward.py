"""Convolution gradients: each gradient costs what the forward costs and moves the same three tensors (op_costs section 2).

Which gradients are computed is `output_mask`. The weight gradient of a grouped convolution is not multiplied by `groups`
(torch.utils.flop_counter does that and is wrong, op_costs 0.3).
"""

from __future__ import annotations

from math import prod

import msgspec

from gpudiag.model.cost import Cost
from gpudiag.model.signature import Input, Shape, Signature
from gpudiag.roofline.costs.arguments import flags, ints, tensor
from gpudiag.roofline.costs.gemm import matrix_cost
from gpudiag.roofline.costs.registry import costs, require
from gpudiag.roofline.costs.shapes import read_bytes, size_of


class Layout(msgspec.Struct, frozen=True):
    """Positions of a convolution gradient's arguments in its schema."""

    grad_output: int
    input: int
    weight: int
    mask: int
    transposed: int | None = None
    """Position of the flag; None: `is_transposed`."""
    is_transposed: bool = False


# Ops of torch before 1.11 (cudnn_, miopen_, mkldnn_, thnn_) are still found in stored traces; native_functions.yaml of torch 1.9.
LAYOUTS: dict[str, Layout] = {
    "aten::convolution_backward": Layout(grad_output=0, input=1, weight=2, mask=10, transposed=7),
    "aten::convolution_backward_overrideable": Layout(grad_output=0, input=1, weight=2, mask=9, transposed=6),
    "aten::cudnn_convolution_backward": Layout(input=0, grad_output=1, weight=2, mask=10),
    "aten::cudnn_convolution_transpose_backward": Layout(input=0, grad_output=1, weight=2, mask=11, is_transposed=True),
    "aten::miopen_convolution_backward": Layout(input=0, grad_output=1, weight=2, mask=9),
    "aten::miopen_depthwise_convolution_backward": Layout(input=0, grad_output=1, weight=2, mask=9),
    "aten::miopen_convolution_transpose_backward": Layout(input=0, grad_output=1, weight=2, mask=10, is_transposed=True),
    "aten::mkldnn_convolution_backward": Layout(input=0, grad_output=1, weight=2, mask=7),
    "aten::thnn_conv2d_backward": Layout(grad_output=0, input=1, weight=2, mask=8),
    "aten::_slow_conv2d_backward": Layout(grad_output=0, input=1, weight=2, mask=6),
    "aten::slow_conv3d_backward": Layout(grad_output=0, input=1, weight=2, mask=8),
    "aten::slow_conv_dilated2d_backward": Layout(grad_output=0, input=1, weight=2, mask=7),
    "aten::thnn_conv_depthwise2d_backward": Layout(grad_output=0, input=1, weight=2, mask=7),
    "aten::_conv_depthwise2d_backward": Layout(grad_output=0, input=1, weight=2, mask=7),
    "aten::conv_depthwise3d_backward": Layout(grad_output=0, input=1, weight=2, mask=7),
}

_MISFIT = "gradient, input and weight shapes do not fit a convolution"


def _is_transposed(signature: Signature, layout: Layout, grad: Shape, x: Shape, weight: Shape) -> bool:
    """Return whether the convolution is transposed: as recorded, else by channels (weight[0] is the output's; input's if transposed)."""
    if layout.transposed is None:
        return layout.is_transposed
    recorded = signature.value(layout.transposed)
    if isinstance(recorded, bool):
        return recorded
    plain, transposed = grad[1] == weight[0], x[1] == weight[0]
    require(plain or transposed, _MISFIT)
    require(not (plain and transposed) or prod(grad) == prod(x), "transposed was not recorded and the shapes fit both ways")
    return not plain


def _wanted(signature: Signature, position: int) -> tuple[tuple[bool, ...], bool]:
    """Return (gradients wanted: input, weight, bias; whether that was recorded). Not recorded: input and weight, no bias."""
    value = signature.value(position)
    if value is None:
        return (True, True, False), False
    return (*flags(signature, position, "output_mask"), False)[:3], True


def _tensors(signature: Signature, layout: Layout) -> tuple[Input, Input, Input]:
    grad = tensor(signature, layout.grad_output, "grad_output")
    x, weight = tensor(signature, layout.input, "input"), tensor(signature, layout.weight, "weight")
    rank = len(weight.shape)
    require(3 <= rank <= 5 and len(grad.shape) == rank and len(x.shape) == rank, _MISFIT)
    return grad, x, weight


def convolution_backward(signature: Signature, layout: Layout) -> Cost:
    """Return the cost of the gradients that were asked for; `derived` where the mask was not recorded (then input and weight)."""
    grad, x, weight = _tensors(signature, layout)
    transposed = _is_transposed(signature, layout, grad.shape, x.shape, weight.shape)
    anchor = x.numel if transposed else grad.numel
    (wants_input, wants_weight, wants_bias), recorded = _wanted(signature, layout.mask)
    moved = 0
    if wants_input:
        moved += read_bytes((grad, weight)) + size_of(x.numel, x.dtype)
    if wants_weight:
        moved += read_bytes((grad, x)) + size_of(weight.numel, weight.dtype)
    if wants_bias:
        moved += size_of(grad.shape[1], grad.dtype)
    gradients = int(wants_input) + int(wants_weight)
    return matrix_cost(gradients * anchor * prod(weight.shape[1:]), grad.dtype, moved, "exact" if recorded else "derived")


def _register() -> None:
    for name, layout in LAYOUTS.items():

        def formula(signature: Signature, layout: Layout = layout) -> Cost:
            return convolution_backward(signature, layout)

        costs(name, generic=False)(formula)


_register()


@costs("aten::cudnn_convolution_backward_input", "aten::miopen_convolution_backward_input", generic=False)
def convolution_backward_input(signature: Signature) -> Cost:
    """Return the cost of the input gradient alone (schema: input size, grad_output, weight, ...).

    Where the input size was not recorded its spatial size is taken from grad_output: the FLOPs are exact, the bytes a lower bound
    (provenance `derived`).
    """
    grad, weight = tensor(signature, 1, "grad_output"), tensor(signature, 2, "weight")
    rank = len(weight.shape)
    require(3 <= rank <= 5 and len(grad.shape) == rank, _MISFIT)
    recorded = signature.value(0) is not None
    size = ints(signature, 0, "input size", rank) if recorded else (grad.shape[0], weight.shape[1], *grad.shape[2:])
    require(min(size) >= 0, _MISFIT)
    moved = read_bytes((grad, weight)) + size_of(prod(size), grad.dtype)
    return matrix_cost(grad.numel * prod(weight.shape[1:]), grad.dtype, moved, "exact" if recorded else "derived")


@costs("aten::cudnn_convolution_backward_weight", "aten::miopen_convolution_backward_weight", generic=False)
def convolution_backward_weight(signature: Signature) -> Cost:
    """Return the cost of the weight gradient alone (schema: weight size, grad_output, input, ...); needs the weight size."""
    size = ints(signature, 0, "weight size (Concrete Inputs)")
    grad, x = tensor(signature, 1, "grad_output"), tensor(signature, 2, "input")
    require(3 <= len(size) <= 5 and len(grad.shape) == len(size) == len(x.shape) and min(size) >= 0, _MISFIT)
    moved = read_bytes((grad, x)) + size_of(prod(size), grad.dtype)
    return matrix_cost(grad.numel * prod(size[1:]), grad.dtype, moved)
