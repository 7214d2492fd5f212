"""Convolutions in 1 to 3 dimensions and their gradients, also where only a related call tells the sizes (op_costs section 2).

Forward (NVIDIA Convolutional Layers guide): FLOP = 2 * N*K*P*Q * (C/groups)*R*S, transposed 2 * N*C*H*W * (K/groups)*R*S; input, weight,
bias and output moved once. Padding taps count as work (they are part of the algorithm), faster algorithms (Winograd, FFT) do not lower
the count.

Each gradient costs what the forward costs and moves the same three tensors. Which are computed is `output_mask`. The weight gradient of a
grouped convolution is not multiplied by `groups` (torch.utils.flop_counter does that and is wrong, op_costs 0.3).

torch before 1.12 records no stride or padding ('Concrete Inputs'), so the output size of a forward is not known; but FLOP =
2 * N*K*P*Q * (C/groups)*R*S needs no more than the output's shape, and an autograd node records it: its first input is the gradient of
the output. A cudnn_convolution_backward_weight call records no weight shape; its forward does. Provenance `derived`.
"""

from __future__ import annotations

from math import prod

import msgspec

from gpudiag.model.ops import Cost, Input, NotModelledError, Shape, Signature
from gpudiag.roofline.costs.gemm import build_matrix_cost
from gpudiag.roofline.costs.registry import costs, count_read_bytes, require, size_of


class ConvolutionLayout(msgspec.Struct, frozen=True):
    """Positions of a convolution's arguments in its schema; None: the op has no such argument (its torch default holds)."""

    stride: int
    padding: int
    dilation: int | None
    groups: int | None = None
    output_padding: int | None = None
    transposed: int | None = None
    """Position of the flag; None: see `is_transposed`."""
    is_transposed: bool = False
    extra: tuple[int, ...] = (2,)
    """Further tensors that are read: bias, and a summand for fused ops."""
    data: tuple[int, int] = (0, 1)
    """Positions of input and weight."""


CONVOLUTION_LAYOUTS: dict[str, ConvolutionLayout] = {
    name: layout
    for names, layout in (
        ("conv1d conv2d conv3d _convolution_mode", ConvolutionLayout(stride=3, padding=4, dilation=5, groups=6)),
        ("cudnn_convolution_relu miopen_convolution_relu", ConvolutionLayout(stride=3, padding=4, dilation=5, groups=6)),
        (
            "cudnn_convolution_add_relu miopen_convolution_add_relu",
            ConvolutionLayout(stride=5, padding=6, dilation=7, groups=8, extra=(2, 4)),
        ),
        (
            "convolution _convolution convolution_overrideable",
            ConvolutionLayout(stride=3, padding=4, dilation=5, transposed=6, output_padding=7, groups=8),
        ),
        ("cudnn_convolution", ConvolutionLayout(padding=2, stride=3, dilation=4, groups=5, extra=())),
        (
            "cudnn_convolution_transpose",
            ConvolutionLayout(padding=2, output_padding=3, stride=4, dilation=5, groups=6, is_transposed=True, extra=()),
        ),
        (
            "miopen_convolution miopen_depthwise_convolution mkldnn_convolution mkldnn::_convolution_pointwise",
            ConvolutionLayout(padding=3, stride=4, dilation=5, groups=6),
        ),
        (
            "miopen_convolution_transpose mkldnn::_convolution_transpose_pointwise",
            ConvolutionLayout(padding=3, output_padding=4, stride=5, dilation=6, groups=7, is_transposed=True),
        ),
        (
            "conv_transpose1d conv_transpose2d conv_transpose3d",
            ConvolutionLayout(stride=3, padding=4, output_padding=5, groups=6, dilation=7, is_transposed=True),
        ),
        (
            "_conv_depthwise2d conv_depthwise3d slow_conv_dilated2d slow_conv_dilated3d",
            ConvolutionLayout(stride=4, padding=5, dilation=6, extra=(3,)),
        ),
        (
            "thnn_conv2d _slow_conv2d_forward slow_conv3d slow_conv3d_forward",
            ConvolutionLayout(stride=4, padding=5, dilation=None, extra=(3,)),
        ),
        (
            "slow_conv_transpose2d slow_conv_transpose3d",
            ConvolutionLayout(stride=4, padding=5, output_padding=6, dilation=7, is_transposed=True, extra=(3,)),
        ),
    )
    for name in (short if "::" in short else f"aten::{short}" for short in names.split())
}


def _read_padding(signature: Signature, layout: ConvolutionLayout, kernel: Shape, dilation: Shape) -> tuple[Shape, Shape]:
    """Read the padding before and after each dimension; 'same' and 'valid' as torch.nn.functional.conv2d defines them."""
    rank = len(kernel)
    value = signature.value(layout.padding)
    if isinstance(value, str):
        mode = value.strip("\"'")
        require(mode in ("same", "valid"), "padding was not recorded")
        total = tuple(d * (k - 1) if mode == "same" else 0 for k, d in zip(kernel, dilation, strict=True))
        return tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
    both = signature.integers(layout.padding, "padding (Concrete Inputs)", rank)
    return both, both


def read_operands(signature: Signature, layout: ConvolutionLayout) -> tuple[Input, Input, Shape, Shape]:
    """Return (input, weight, batched input shape, kernel size); torch also takes an input without batch dimension."""
    x, weight = signature.need(layout.data[0], "input"), signature.need(layout.data[1], "weight")
    rank = len(weight.shape) - 2
    require(1 <= rank <= 3 and len(x.shape) in (rank + 1, rank + 2), "input and weight shapes do not fit a convolution")
    shape = x.shape if len(x.shape) == rank + 2 else (1, *x.shape)
    return x, weight, shape, weight.shape[2:]


def estimate_convolution(signature: Signature, layout: ConvolutionLayout) -> Cost:
    """Estimate the cost of a forward convolution whose arguments stand where `layout` says.

    Spatial size of the output: floor((H + p - d*(R-1) - 1) / stride) + 1, or the inverse for transposed ones. Source: torch.nn.Conv2d and
    ConvTranspose2d, section Shape.
    """
    x, weight, shape, kernel = read_operands(signature, layout)
    rank = len(kernel)
    transposed = layout.is_transposed
    if layout.transposed is not None:
        transposed = signature.flag(layout.transposed, "transposed (Concrete Inputs)")
    dilation = signature.integers(layout.dilation, "dilation (Concrete Inputs)", rank) if layout.dilation is not None else (1,) * rank
    before, after = _read_padding(signature, layout, kernel, dilation)
    extra = (0,) * rank
    if transposed and layout.output_padding is not None:
        extra = signature.integers(layout.output_padding, "output_padding", rank)
    stride = signature.integers(layout.stride, "stride (Concrete Inputs)", rank)
    channels = weight.shape[0]
    if transposed:
        require(channels == shape[1], "input and weight channels do not fit a transposed convolution")
        groups = signature.integers(layout.groups, "groups", 1)[0] if layout.groups is not None else 1
        require(groups >= 0, "groups is negative")
        channels = weight.shape[1] * groups
    else:
        require(weight.shape[1] == 0 or shape[1] % weight.shape[1] == 0, "input and weight channels do not fit a convolution")
    out = shape[0] * channels
    for h, r, s, p, q, d, more in zip(shape[2:], kernel, stride, before, after, dilation, extra, strict=True):
        require(s > 0, "stride is not positive")
        reach = d * (r - 1)
        length = (h - 1) * s - p - q + reach + more + 1 if transposed else (h + p + q - reach - 1) // s + 1
        require(length >= 0, "convolution arguments give a negative output size")
        out *= length
    anchor = prod(shape) if transposed else out
    moved = count_read_bytes((x, weight, *signature.tensors(*layout.extra))) + size_of(out, x.dtype)
    return build_matrix_cost(anchor * prod(weight.shape[1:]), x.dtype, moved)


for _name, _layout in CONVOLUTION_LAYOUTS.items():
    costs(_name, generic=False, layout=_layout)(estimate_convolution)


class GradientLayout(msgspec.Struct, frozen=True):
    """Positions of a convolution gradient's arguments in its schema."""

    grad_output: int
    input: int
    weight: int
    mask: int
    transposed: int | None = None
    """Position of the flag; None: `is_transposed`."""
    is_transposed: bool = False


# Ops of torch before 1.11 (cudnn_, miopen_, mkldnn_, thnn_) are still found in stored traces; native_functions.yaml of torch 1.9.
GRADIENT_LAYOUTS: dict[str, GradientLayout] = {
    "aten::convolution_backward": GradientLayout(grad_output=0, input=1, weight=2, mask=10, transposed=7),
    "aten::convolution_backward_overrideable": GradientLayout(grad_output=0, input=1, weight=2, mask=9, transposed=6),
    "aten::cudnn_convolution_backward": GradientLayout(input=0, grad_output=1, weight=2, mask=10),
    "aten::cudnn_convolution_transpose_backward": GradientLayout(input=0, grad_output=1, weight=2, mask=11, is_transposed=True),
    "aten::miopen_convolution_backward": GradientLayout(input=0, grad_output=1, weight=2, mask=9),
    "aten::miopen_depthwise_convolution_backward": GradientLayout(input=0, grad_output=1, weight=2, mask=9),
    "aten::miopen_convolution_transpose_backward": GradientLayout(input=0, grad_output=1, weight=2, mask=10, is_transposed=True),
    "aten::mkldnn_convolution_backward": GradientLayout(input=0, grad_output=1, weight=2, mask=7),
    "aten::thnn_conv2d_backward": GradientLayout(grad_output=0, input=1, weight=2, mask=8),
    "aten::_slow_conv2d_backward": GradientLayout(grad_output=0, input=1, weight=2, mask=6),
    "aten::slow_conv3d_backward": GradientLayout(grad_output=0, input=1, weight=2, mask=8),
    "aten::slow_conv_dilated2d_backward": GradientLayout(grad_output=0, input=1, weight=2, mask=7),
    "aten::thnn_conv_depthwise2d_backward": GradientLayout(grad_output=0, input=1, weight=2, mask=7),
    "aten::_conv_depthwise2d_backward": GradientLayout(grad_output=0, input=1, weight=2, mask=7),
    "aten::conv_depthwise3d_backward": GradientLayout(grad_output=0, input=1, weight=2, mask=7),
}

_GRADIENT_MISFIT = "gradient, input and weight shapes do not fit a convolution"


def estimate_convolution_backward(signature: Signature, layout: GradientLayout) -> Cost:
    """Estimate the cost of the gradients that were asked for; `derived` where the mask was not recorded (then input and weight)."""
    grad = signature.need(layout.grad_output, "grad_output")
    x, weight = signature.need(layout.input, "input"), signature.need(layout.weight, "weight")
    rank = len(weight.shape)
    require(3 <= rank <= 5 and len(grad.shape) == rank and len(x.shape) == rank, _GRADIENT_MISFIT)
    transposed = layout.is_transposed
    if layout.transposed is not None and isinstance(flagged := signature.value(layout.transposed), bool):
        transposed = flagged
    elif layout.transposed is not None:  # not recorded: by channels (weight[0] is the output's; the input's if transposed)
        plain, inverse = grad.shape[1] == weight.shape[0], x.shape[1] == weight.shape[0]
        require(plain or inverse, _GRADIENT_MISFIT)
        require(not (plain and inverse) or grad.numel == x.numel, "transposed was not recorded and the shapes fit both ways")
        transposed = not plain
    anchor = x.numel if transposed else grad.numel
    recorded = signature.value(layout.mask) is not None
    wants_input, wants_weight, wants_bias = True, True, False  # unless the mask was recorded
    if recorded:
        wants_input, wants_weight, wants_bias = (*signature.flags(layout.mask, "output_mask"), False)[:3]
    moved = 0
    if wants_input:
        moved += count_read_bytes((grad, weight)) + size_of(x.numel, x.dtype)
    if wants_weight:
        moved += count_read_bytes((grad, x)) + size_of(weight.numel, weight.dtype)
    if wants_bias:
        moved += size_of(grad.shape[1], grad.dtype)
    gradients = int(wants_input) + int(wants_weight)
    return build_matrix_cost(gradients * anchor * prod(weight.shape[1:]), grad.dtype, moved, "exact" if recorded else "derived")


for _name, _gradient_layout in GRADIENT_LAYOUTS.items():
    costs(_name, generic=False, layout=_gradient_layout)(estimate_convolution_backward)


@costs("aten::cudnn_convolution_backward_input", "aten::miopen_convolution_backward_input", generic=False)
def convolution_backward_input(signature: Signature) -> Cost:
    """Return the cost of the input gradient alone (schema: input size, grad_output, weight, ...).

    Where the input size was not recorded its spatial size is taken from grad_output: the FLOPs are exact, the bytes a lower bound
    (provenance `derived`).
    """
    grad, weight = signature.need(1, "grad_output"), signature.need(2, "weight")
    rank = len(weight.shape)
    require(3 <= rank <= 5 and len(grad.shape) == rank, _GRADIENT_MISFIT)
    recorded = signature.value(0) is not None
    size = signature.integers(0, "input size", rank) if recorded else (grad.shape[0], weight.shape[1], *grad.shape[2:])
    require(min(size) >= 0, _GRADIENT_MISFIT)
    moved = count_read_bytes((grad, weight)) + size_of(prod(size), grad.dtype)
    return build_matrix_cost(grad.numel * prod(weight.shape[1:]), grad.dtype, moved, "exact" if recorded else "derived")


@costs("aten::cudnn_convolution_backward_weight", "aten::miopen_convolution_backward_weight", generic=False)
def convolution_backward_weight(signature: Signature) -> Cost:
    """Return the cost of the weight gradient alone (schema: weight size, grad_output, input, ...); needs the weight size."""
    size = signature.integers(0, "weight size (Concrete Inputs)")
    grad, x = signature.need(1, "grad_output"), signature.need(2, "input")
    require(3 <= len(size) <= 5 and len(grad.shape) == len(size) == len(x.shape) and min(size) >= 0, _GRADIENT_MISFIT)
    moved = count_read_bytes((grad, x)) + size_of(prod(size), grad.dtype)
    return build_matrix_cost(grad.numel * prod(size[1:]), grad.dtype, moved)


WEIGHT_GRADIENTS = ("aten::cudnn_convolution_backward_weight", "aten::miopen_convolution_backward_weight")
"""Schema: (weight size, grad_output, self, ...): native_functions.yaml of torch 1.9. The size is an argument, not a tensor."""

_RELATIVE_MISFIT = "the gradient does not fit the input and weight shapes"


def _count_multiply_adds(x: Shape, weight: Shape, out: Shape, layout: ConvolutionLayout) -> int:
    """Return the multiply-adds of a convolution from `x` to `out`.

    Plain: weight [K, C/groups, *kernel]; transposed: weight [C, K/groups, *kernel]. Raises NotModelledError where the shapes fit
    neither, or both with unequal work.
    """
    require(len(x) == len(out) == len(weight) and x[0] == out[0], _RELATIVE_MISFIT)
    taps, found = prod(weight[1:]), set()
    may_be = layout.is_transposed, layout.is_transposed or layout.transposed is not None
    if not may_be[0] and out[1] == weight[0] and weight[1] > 0 and x[1] % weight[1] == 0:
        found.add(prod(out) * taps)
    if may_be[1] and x[1] == weight[0] and weight[1] > 0 and out[1] % weight[1] == 0:
        found.add(prod(x) * taps)
    require(len(found) == 1, _RELATIVE_MISFIT if not found else "transposed was not recorded and the shapes fit both ways")
    return found.pop()


def estimate_forward_from_output(name: str, signature: Signature, other: Signature) -> Cost:
    """Estimate the cost of forward convolution `name` from a call whose first tensor has the shape of its result (`derived`).

    That is the autograd node, which records the gradient of the result first, or the op that takes the result.
    """
    layout = CONVOLUTION_LAYOUTS[name]
    out = other.need(0, "the result or its gradient").shape
    x, weight, shape, _ = read_operands(signature, layout)
    out = out if len(out) == len(shape) else (1, *out)
    moved = count_read_bytes((x, weight, *signature.tensors(*layout.extra))) + size_of(prod(out), x.dtype)
    return build_matrix_cost(_count_multiply_adds(shape, weight.shape, out, layout), x.dtype, moved, "derived")


def estimate_weight_gradient(signature: Signature, forward: Signature) -> Cost:
    """Estimate the cost of a weight gradient alone, whose forward was called with `forward` (input 0, weight 1 in every spelling)."""
    grad, x = signature.need(1, "grad_output"), signature.need(2, "input")
    first, weight = forward.need(0, "input"), forward.need(1, "weight")
    if first.shape != x.shape or len(weight.shape) != len(grad.shape):
        raise NotModelledError("the forward call does not fit the gradient")
    moved = count_read_bytes((grad, x)) + size_of(weight.numel, weight.dtype)
    anchor = _count_multiply_adds(x.shape, weight.shape, grad.shape, CONVOLUTION_LAYOUTS["aten::cudnn_convolution"])
    return build_matrix_cost(anchor, grad.dtype, moved, "derived")
