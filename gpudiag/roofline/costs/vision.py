"""Image operators beside convolution and pooling: unfolding, regions of interest, suppression of boxes, deformable convolution.

torchvision's schemas: torchvision/csrc/ops/{roi_align,nms,deform_conv2d}.cpp.
"""

from __future__ import annotations

from math import prod

from gpudiag.model.cost import Cost
from gpudiag.model.signature import Signature
from gpudiag.roofline.costs.arguments import integer, ints, present, tensor
from gpudiag.roofline.costs.gemm import matrix_cost
from gpudiag.roofline.costs.registry import costs, require
from gpudiag.roofline.costs.shapes import read_bytes, size_of


@costs("aten::pixel_shuffle", "aten::pixel_unshuffle", "aten::channel_shuffle", "aten::native_channel_shuffle")
def shuffle(signature: Signature) -> Cost:
    """Return the bytes of reordering elements: read once, written once."""
    x = tensor(signature, 0, "self")
    return Cost(bytes=x.distinct_bytes + size_of(x.numel, x.dtype))


@costs("aten::im2col")
def im2col(signature: Signature) -> Cost:
    """Return the bytes of unfolding windows (kernel 1, dilation 2, padding 3, stride 4): input read, every window written."""
    x = tensor(signature, 0, "self")
    require(len(x.shape) in (3, 4), "input is no image")
    kernel, dilation, padding, stride = (
        ints(signature, index + 1, f"{name} (Concrete Inputs)", 2) for index, name in enumerate(("kernel", "dilation", "padding", "stride"))
    )
    require(min(stride) > 0 and min(kernel) > 0, "kernel size or stride is not positive")
    steps = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, d, p, s in zip(x.shape[-2:], kernel, dilation, padding, stride, strict=True)
    ]
    require(min(steps) >= 0, "windows do not fit the image")
    return Cost(bytes=x.distinct_bytes + size_of(prod(x.shape[:-2]) * prod(kernel) * prod(steps), x.dtype))


@costs("aten::col2im")
def col2im(signature: Signature) -> Cost:
    """Return the cost of adding windows up to an image (output_size 1, kernel 2): columns read, image written."""
    x = tensor(signature, 0, "self")
    size, kernel = ints(signature, 1, "output_size (Concrete Inputs)", 2), ints(signature, 2, "kernel (Concrete Inputs)", 2)
    require(len(x.shape) in (2, 3) and min(kernel) > 0 and min(size) >= 0, "columns do not fit the image")
    outputs = prod(x.shape[:-2]) * (x.shape[-2] // prod(kernel)) * prod(size)
    return Cost(vector_flops=x.numel, bytes=x.distinct_bytes + size_of(outputs, x.dtype))


@costs("aten::unfold_backward")
def unfold_backward(signature: Signature) -> Cost:
    """Return the cost of the gradient of overlapping slices (input_sizes 1): gradient read and added up, input's gradient written."""
    grad, sizes = tensor(signature, 0, "grad_in"), ints(signature, 1, "input_sizes (Concrete Inputs)")
    require(min(sizes, default=0) >= 0, "input_sizes are negative")
    return Cost(vector_flops=grad.numel, bytes=grad.distinct_bytes + size_of(prod(sizes), grad.dtype))


_CORNERS = 4
_SAMPLES = 4
"""Sampling points per bin where sampling_ratio is 0 or less: ceil(region / bins) squared; 2 x 2 is taken (detectron2's usual bins)."""


def _roi_samples(ratio: object) -> int:
    return ratio * ratio if type(ratio) is int and ratio > 0 else _SAMPLES


@costs("torchvision::roi_align")
def roi_align(signature: Signature) -> Cost:
    """Return the cost of pooling regions (rois 1, bins 3-4, sampling_ratio 5): bilinear samples, `derived` as regions may overlap."""
    x, rois = tensor(signature, 0, "input"), tensor(signature, 1, "rois")
    bins = integer(signature, 3, "pooled_height") * integer(signature, 4, "pooled_width")
    require(len(x.shape) == 4 and len(rois.shape) == 2 and bins >= 0, "input or rois have other dimensions")
    outputs = rois.shape[0] * x.shape[1] * bins
    samples = outputs * _roi_samples(signature.value(5))
    moved = min(x.distinct_bytes, size_of(_CORNERS * samples, x.dtype)) + rois.distinct_bytes + size_of(outputs, x.dtype)
    return Cost(vector_flops=2 * _CORNERS * samples, bytes=moved, provenance="derived")


@costs("torchvision::_roi_align_backward")
def roi_align_backward(signature: Signature) -> Cost:
    """Return the cost of its gradient (grad 0, rois 1, batch, channels, height, width 5-8): dy read and spread, dx written."""
    grad, rois = tensor(signature, 0, "grad"), tensor(signature, 1, "rois")
    size = [integer(signature, index, "input size") for index in (5, 6, 7, 8)]
    require(min(size) >= 0, "input size is negative")
    samples = grad.numel * _roi_samples(signature.value(9))
    return Cost(vector_flops=2 * _CORNERS * samples, bytes=read_bytes((grad, rois)) + size_of(prod(size), grad.dtype), provenance="derived")


@costs("torchvision::nms")
def nms(signature: Signature) -> Cost:
    """Return the cost of comparing all pairs of boxes: 13 FLOP an overlap, a bit a pair written and read; `derived` (the sort is small)."""
    boxes, scores = tensor(signature, 0, "dets"), tensor(signature, 1, "scores")
    count = scores.numel
    return Cost(vector_flops=13 * count * count // 2, bytes=read_bytes((boxes, scores)) + 2 * (count * count // 8), provenance="derived")


@costs("torchvision::deform_conv2d")
def deform_conv2d(signature: Signature) -> Cost:
    """Return the cost of a deformable convolution: 2 * N*P*Q * elements of the weight (offset [N, .., P, Q] holds the output size)."""
    x, weight, offset = (tensor(signature, index, name) for index, name in enumerate(("input", "weight", "offset")))
    require(len(x.shape) == len(weight.shape) == len(offset.shape) == 4, "shapes do not fit a convolution")
    pixels = offset.shape[0] * offset.shape[2] * offset.shape[3]
    moved = read_bytes((x, weight, offset, *present(signature, 3, 4))) + size_of(pixels * weight.shape[0], x.dtype)
    return matrix_cost(pixels * weight.numel, x.dtype, moved)
