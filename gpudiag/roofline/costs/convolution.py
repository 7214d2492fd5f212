"""Forward convolutions in 1 to 3 dimensions (op_costs section 2; NVIDIA Convolutional Layers guide).

FLOP = 2 * N*K*P*Q * (C/groups)*R*S, transposed 2 * N*C*H*W * (K/groups)*R*S; input, weight, bias and output moved once. Padding
taps count as work (they are part of the algorithm), faster algorithms (Winograd, FFT) do not lower the count.
"""

from __future__ import annotations

from math import prod

import msgspec

from gpudiag.model.cost import Cost
from gpudiag.model.signature import Input, Shape, Signature
from gpudiag.roofline.costs.arguments import flag, ints, present, tensor
from gpudiag.roofline.costs.gemm import matrix_cost
from gpudiag.roofline.costs.registry import costs, require
from gpudiag.roofline.costs.shapes import read_bytes, size_of


class Layout(msgspec.Struct, frozen=True):
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


class Geometry(msgspec.Struct, frozen=True):
    """What decides the output size, one entry per spatial dimension."""

    stride: Shape
    padding: Shape
    dilation: Shape
    output_padding: Shape
    transposed: bool


_PLAIN = Layout(stride=3, padding=4, dilation=5, groups=6)
_FULL = Layout(stride=3, padding=4, dilation=5, transposed=6, output_padding=7, groups=8)
_BACKEND = Layout(padding=3, stride=4, dilation=5, groups=6)
_KERNEL_SIZE = Layout(stride=4, padding=5, dilation=None, extra=(3,))

LAYOUTS: dict[str, Layout] = {
    "aten::conv1d": _PLAIN,
    "aten::conv2d": _PLAIN,
    "aten::conv3d": _PLAIN,
    "aten::_convolution_mode": _PLAIN,
    "aten::cudnn_convolution_relu": _PLAIN,
    "aten::miopen_convolution_relu": _PLAIN,
    "aten::cudnn_convolution_add_relu": Layout(stride=5, padding=6, dilation=7, groups=8, extra=(2, 4)),
    "aten::miopen_convolution_add_relu": Layout(stride=5, padding=6, dilation=7, groups=8, extra=(2, 4)),
    "aten::convolution": _FULL,
    "aten::_convolution": _FULL,
    "aten::convolution_overrideable": _FULL,
    "aten::cudnn_convolution": Layout(padding=2, stride=3, dilation=4, groups=5, extra=()),
    "aten::cudnn_convolution_transpose": Layout(padding=2, output_padding=3, stride=4, dilation=5, groups=6, is_transposed=True, extra=()),
    "aten::miopen_convolution": _BACKEND,
    "aten::miopen_depthwise_convolution": _BACKEND,
    "aten::mkldnn_convolution": _BACKEND,
    "mkldnn::_convolution_pointwise": _BACKEND,
    "aten::miopen_convolution_transpose": Layout(padding=3, output_padding=4, stride=5, dilation=6, groups=7, is_transposed=True),
    "mkldnn::_convolution_transpose_pointwise": Layout(padding=3, output_padding=4, stride=5, dilation=6, groups=7, is_transposed=True),
    "aten::conv_transpose1d": Layout(stride=3, padding=4, output_padding=5, groups=6, dilation=7, is_transposed=True),
    "aten::conv_transpose2d": Layout(stride=3, padding=4, output_padding=5, groups=6, dilation=7, is_transposed=True),
    "aten::conv_transpose3d": Layout(stride=3, padding=4, output_padding=5, groups=6, dilation=7, is_transposed=True),
    "aten::_conv_depthwise2d": Layout(stride=4, padding=5, dilation=6, extra=(3,)),
    "aten::conv_depthwise3d": Layout(stride=4, padding=5, dilation=6, extra=(3,)),
    "aten::thnn_conv2d": _KERNEL_SIZE,
    "aten::_slow_conv2d_forward": _KERNEL_SIZE,
    "aten::slow_conv3d": _KERNEL_SIZE,
    "aten::slow_conv3d_forward": _KERNEL_SIZE,
    "aten::slow_conv_dilated2d": Layout(stride=4, padding=5, dilation=6, extra=(3,)),
    "aten::slow_conv_dilated3d": Layout(stride=4, padding=5, dilation=6, extra=(3,)),
    "aten::slow_conv_transpose2d": Layout(stride=4, padding=5, output_padding=6, dilation=7, is_transposed=True, extra=(3,)),
    "aten::slow_conv_transpose3d": Layout(stride=4, padding=5, output_padding=6, dilation=7, is_transposed=True, extra=(3,)),
}


def _padding(signature: Signature, layout: Layout, kernel: Shape, dilation: Shape) -> tuple[Shape, Shape]:
    """Return the padding before and after each dimension; 'same' and 'valid' as torch.nn.functional.conv2d defines them."""
    rank = len(kernel)
    value = signature.value(layout.padding)
    if isinstance(value, str):
        mode = value.strip("\"'")
        require(mode in ("same", "valid"), "padding was not recorded")
        total = tuple(d * (k - 1) if mode == "same" else 0 for k, d in zip(kernel, dilation, strict=True))
        return tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
    both = ints(signature, layout.padding, "padding (Concrete Inputs)", rank)
    return both, both


def output_size(size: Shape, kernel: Shape, geometry: Geometry, after: Shape) -> Shape:
    """Return the spatial size of the output: floor((H + p - d*(R-1) - 1) / stride) + 1, or the inverse for transposed ones.

    `geometry.padding` pads before, `after` behind each dimension. Source: torch.nn.Conv2d and ConvTranspose2d, section Shape.
    """
    out = []
    for h, r, s, p, q, d, extra in zip(
        size, kernel, geometry.stride, geometry.padding, after, geometry.dilation, geometry.output_padding, strict=True
    ):
        require(s > 0, "stride is not positive")
        reach = d * (r - 1)
        out.append((h - 1) * s - p - q + reach + extra + 1 if geometry.transposed else (h + p + q - reach - 1) // s + 1)
    require(all(item >= 0 for item in out), "convolution arguments give a negative output size")
    return tuple(out)


def operands(signature: Signature, layout: Layout) -> tuple[Input, Input, Shape, Shape]:
    """Return (input, weight, batched input shape, kernel size); torch also takes an input without batch dimension."""
    x, weight = tensor(signature, layout.data[0], "input"), tensor(signature, layout.data[1], "weight")
    rank = len(weight.shape) - 2
    require(1 <= rank <= 3 and len(x.shape) in (rank + 1, rank + 2), "input and weight shapes do not fit a convolution")
    shape = x.shape if len(x.shape) == rank + 2 else (1, *x.shape)
    return x, weight, shape, weight.shape[2:]


def _geometry(signature: Signature, layout: Layout, kernel: Shape) -> tuple[Geometry, Shape]:
    rank = len(kernel)
    ones, zeros = (1,) * rank, (0,) * rank
    transposed = layout.is_transposed
    if layout.transposed is not None:
        transposed = flag(signature, layout.transposed, "transposed (Concrete Inputs)")
    dilation = ints(signature, layout.dilation, "dilation (Concrete Inputs)", rank) if layout.dilation is not None else ones
    before, after = _padding(signature, layout, kernel, dilation)
    extra = zeros
    if transposed and layout.output_padding is not None:
        extra = ints(signature, layout.output_padding, "output_padding", rank)
    stride = ints(signature, layout.stride, "stride (Concrete Inputs)", rank)
    return Geometry(stride, before, dilation, extra, transposed), after


def _output_channels(signature: Signature, layout: Layout, weight: Shape, channels: int, transposed: bool) -> int:
    if not transposed:
        require(weight[1] == 0 or channels % weight[1] == 0, "input and weight channels do not fit a convolution")
        return weight[0]
    require(weight[0] == channels, "input and weight channels do not fit a transposed convolution")
    groups = ints(signature, layout.groups, "groups", 1)[0] if layout.groups is not None else 1
    return weight[1] * groups


def convolution(signature: Signature, layout: Layout) -> Cost:
    """Return the cost of a forward convolution whose arguments stand where `layout` says."""
    x, weight, shape, kernel = operands(signature, layout)
    geometry, after = _geometry(signature, layout, kernel)
    channels = _output_channels(signature, layout, weight.shape, shape[1], geometry.transposed)
    require(channels >= 0, "groups is negative")
    out = shape[0] * channels * prod(output_size(shape[2:], kernel, geometry, after))
    anchor = prod(shape) if geometry.transposed else out
    moved = read_bytes((x, weight, *present(signature, *layout.extra))) + size_of(out, x.dtype)
    return matrix_cost(anchor * prod(weight.shape[1:]), x.dtype, moved)


def _register() -> None:
    for name, layout in LAYOUTS.items():

        def formula(signature: Signature, layout: Layout = layout) -> Cost:
            return convolution(signature, layout)

        costs(name, generic=False)(formula)


_register()
