"""Image operators beside convolution: pooling, interpolation, sampling, regions of interest (op_costs section 9).

Antialiasing (`_aa`) widens the window when it shrinks an image; its FLOPs are those of the plain filter, a lower bound.

torchvision's schemas: torchvision/csrc/ops/{roi_align,nms,deform_conv2d}.cpp.
"""

from __future__ import annotations

from math import prod

from gpudiag.model.ops import Cost, Input, Shape, Signature
from gpudiag.roofline.costs.gemm import build_matrix_cost
from gpudiag.roofline.costs.registry import Flow, costs, count_read_bytes, register_flows, require, size_of


def _read_list(signature: Signature, index: int, what: str, rank: int, default: Shape | None) -> Shape:
    if signature.value(index) == () and default is not None:
        return default
    return signature.integers(index, f"{what} (Concrete Inputs)", rank)


def estimate_pool(signature: Signature, rank: int, dilated: bool, indices: bool) -> Cost:
    """Estimate the cost of a pooling in `rank` dimensions; `indices`: int64 positions are written too.

    Arguments: kernel 1, stride 2, padding 3, [dilation 4,] ceil_mode. Source of the output's size: pooling_output_shape in torch/csrc
    aten/src/ATen/native/Pool.h.
    """
    x = signature.need(0, "self")
    require(len(x.shape) in (rank + 1, rank + 2), "input shape does not fit the pooling")
    kernel = _read_list(signature, 1, "kernel_size", rank, None)
    stride = _read_list(signature, 2, "stride", rank, kernel)
    padding = _read_list(signature, 3, "padding", rank, (0,) * rank)
    dilation = _read_list(signature, 4, "dilation", rank, (1,) * rank) if dilated else (1,) * rank
    ceil = signature.flag(5 if dilated else 4, "ceil_mode (Concrete Inputs)")
    spatial = x.shape[len(x.shape) - rank :]
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    window, outputs = prod(kernel), prod(x.shape[: len(x.shape) - rank])
    for size, length, step, pad in zip(spatial, reach, stride, padding, strict=True):
        require(step > 0 and length > 0, "kernel size or stride is not positive")
        places = (size + 2 * pad - length + (step - 1 if ceil else 0)) // step + 1
        if ceil and (places - 1) * step >= size + pad:  # the last window must start inside the input or its left padding
            places -= 1
        require(places >= 0, "pooling arguments give a negative output size")
        outputs *= places
    moved = x.distinct_bytes + size_of(outputs, x.dtype) + (size_of(outputs, "int64") if indices else 0)
    return Cost(vector_flops=window * outputs, bytes=moved)


for _rank in (1, 2, 3):
    _plain = (f"aten::max_pool{_rank}d", *((f"aten::mkldnn_max_pool{_rank}d",) if _rank > 1 else ()))
    costs(*_plain, rank=_rank, dilated=True, indices=False)(estimate_pool)
    costs(f"aten::max_pool{_rank}d_with_indices", rank=_rank, dilated=True, indices=True)(estimate_pool)
    costs(f"aten::avg_pool{_rank}d", rank=_rank, dilated=False, indices=False)(estimate_pool)


def _read_output_size(signature: Signature, size_at: int, rank: int | None = None) -> tuple[Input, int]:
    """Return (input, elements of the result) of a pooling that is told the output's spatial size."""
    x = signature.need(0, "self")
    size = signature.integers(size_at, "output_size (Concrete Inputs)", rank)
    require(len(size) < len(x.shape) and min(size, default=0) >= 0, "output_size does not fit the input")
    return x, prod(x.shape[: len(x.shape) - len(size)]) * prod(size)


def estimate_adaptive_pool(signature: Signature, indices: bool) -> Cost:
    """Estimate the cost of adaptive pooling (output size 1): every input element used once; `indices`: int64 positions are written too."""
    x, outputs = _read_output_size(signature, 1)
    moved = x.distinct_bytes + size_of(outputs, x.dtype) + (size_of(outputs, "int64") if indices else 0)
    return Cost(vector_flops=x.numel, bytes=moved)


costs("aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool3d", "aten::mkldnn_adaptive_avg_pool2d", indices=False)(estimate_adaptive_pool)
costs("aten::adaptive_max_pool2d", "aten::adaptive_max_pool3d", indices=True)(estimate_adaptive_pool)


def estimate_fractional_pool(signature: Signature, rank: int) -> Cost:
    """Estimate the cost of pooling with random windows (kernel 1, output size 2, samples 3) in `rank` dimensions."""
    x, outputs = _read_output_size(signature, 2, rank)
    window = prod(signature.integers(1, "kernel_size (Concrete Inputs)", rank))
    moved = count_read_bytes((x, *signature.tensors(3))) + size_of(outputs, x.dtype) + size_of(outputs, "int64")
    return Cost(vector_flops=max(window, 0) * outputs, bytes=moved)


costs("aten::fractional_max_pool2d", rank=2)(estimate_fractional_pool)
costs("aten::fractional_max_pool3d", rank=3)(estimate_fractional_pool)

_AVERAGE_BACKWARDS = """
    aten::avg_pool2d_backward aten::avg_pool3d_backward aten::_adaptive_avg_pool2d_backward aten::_adaptive_avg_pool3d_backward
    aten::adaptive_avg_pool3d_backward
    """

# Values go back to where the maxima were; the zero fill of the result is an op of its own. Backwards: one addition for each element.
register_flows(
    {
        "aten::max_unpool2d aten::max_unpool3d": Flow(reads=(0, 1), writes=(0,), operations=0),
        "aten::mkldnn_max_pool2d_backward aten::mkldnn_max_pool3d_backward": Flow(reads=(0, 1, 2), writes=(2,)),
        "aten::mkldnn_adaptive_avg_pool2d_backward": Flow(reads=(0,), writes=(1,), per=1),
        "aten::max_pool2d_backward": Flow(reads=(0, 1), writes=(1,)),
        _AVERAGE_BACKWARDS: Flow(reads=(0,), writes=(1,), per=1, required=(0,)),
        # elements reordered: read once, written once
        "aten::pixel_shuffle aten::pixel_unshuffle aten::channel_shuffle aten::native_channel_shuffle": Flow((0,), (0,), operations=0),
    }
)


@costs(
    "aten::max_pool2d_with_indices_backward",
    "aten::max_pool3d_with_indices_backward",
    "aten::adaptive_max_pool2d_backward",
    "aten::adaptive_max_pool3d_backward",
    "aten::fractional_max_pool2d_backward",
    "aten::fractional_max_pool3d_backward",
)
def max_pool_backward(signature: Signature) -> Cost:
    """Return the cost of max pooling's backward: dy and indices read, dx written, one addition for each dy."""
    grad, x = signature.need_all("grad_output", "self")
    indices = [item for item in signature.tensors(*range(2, len(signature.inputs))) if item.dtype == "int64"][:1]
    return Cost(vector_flops=grad.numel, bytes=count_read_bytes((grad, *indices)) + size_of(x.numel, x.dtype))


# Reads per output: the corners that are blended (torch.nn.functional.interpolate), 2 FLOP each; nearest copies.
_UPSAMPLE_CORNERS = {
    "upsample_nearest1d": 0, "upsample_nearest2d": 0, "upsample_nearest3d": 0, "_upsample_nearest_exact1d": 0,
    "_upsample_nearest_exact2d": 0, "_upsample_nearest_exact3d": 0, "upsample_linear1d": 2, "upsample_bilinear2d": 4,
    "upsample_bicubic2d": 16, "upsample_trilinear3d": 8, "_upsample_bilinear2d_aa": 4, "_upsample_bicubic2d_aa": 16,
    "_upsample_lanczos2d_aa": 36,
}  # fmt: skip


def estimate_spread(signature: Signature, size_at: int, operations: int) -> Cost:
    """Estimate the cost of a gradient of the size at `size_at`: dy read and spread or added up, dx written."""
    grad = signature.need(0, "grad_output")
    size = signature.integers(size_at, "input size (Concrete Inputs)")
    require(min(size, default=0) >= 0, "input size is negative")
    return Cost(vector_flops=operations * grad.numel, bytes=grad.distinct_bytes + size_of(prod(size), grad.dtype))


costs("aten::unfold_backward", size_at=1, operations=1)(estimate_spread)  # of overlapping slices


def estimate_upsample(signature: Signature, corners: int) -> Cost:
    """Estimate the cost of an interpolation: output_size (1), else a list of scale factors (the last list of numbers), tells the result."""
    x, size = signature.need(0, "self"), signature.value(1)
    require(len(x.shape) >= 3, "input has no spatial dimension")
    if isinstance(size, tuple) and size and all(type(item) is int and item >= 0 for item in size):
        plane = prod(item for item in size if type(item) is int)
    else:
        lists = [item.value for item in signature.inputs if isinstance(item.value, tuple)]
        factors = [float(item) for item in lists[-1] if isinstance(item, (int, float))] if lists else []
        fits = len(factors) == len(x.shape) - 2 and all(0 <= factor < 1e9 for factor in factors)
        require(fits, "output_size was not recorded (Concrete Inputs)")
        plane = prod(int(length * factor) for length, factor in zip(x.shape[2:], factors, strict=True))
    outputs = x.shape[0] * x.shape[1] * plane
    read = min(x.distinct_bytes, size_of(max(corners, 1) * outputs, x.dtype))
    return Cost(vector_flops=2 * corners * outputs, bytes=read + size_of(outputs, x.dtype))


for _name, _corners in _UPSAMPLE_CORNERS.items():
    costs(f"aten::{_name}", corners=_corners)(estimate_upsample)
    costs(f"aten::{_name}_backward", size_at=2, operations=2 * max(_corners, 1))(estimate_spread)

_SAMPLE_FLOP = 8
"""Per corner and output: position, weight, bounds, multiply-add (convention)."""


def estimate_grid_samples(signature: Signature, backwards: bool) -> Cost:
    """Estimate the cost of sampling an image at the points of a grid, bilinear (nearest does less): input at most once, grid, result.

    The grid is [N, *output size, dimensions]. Backwards (grad_output 0, input 1, grid 2, output_mask 6) the grid's gradient is always
    written, the input's where asked for.
    """
    x, grid = (signature.need(index + backwards, name) for index, name in enumerate(("input", "grid")))
    fits = len(x.shape) in (4, 5) and len(grid.shape) == len(x.shape) and grid.shape[-1] == len(x.shape) - 2
    require(fits, "grid does not fit the input")
    outputs, corners = x.shape[1] * prod(grid.shape[:-1]), 2 ** (len(x.shape) - 2)
    if not backwards:
        read = min(x.distinct_bytes, size_of(corners * outputs, x.dtype)) + grid.distinct_bytes
        return Cost(vector_flops=_SAMPLE_FLOP * corners * outputs, bytes=read + size_of(outputs, x.dtype))
    grad = signature.need(0, "grad_output")
    written = size_of(grid.numel, grid.dtype) + (size_of(x.numel, x.dtype) if signature.flags(6, "output_mask")[0] else 0)
    return Cost(vector_flops=2 * _SAMPLE_FLOP * corners * outputs, bytes=count_read_bytes((grad, x, grid)) + written)


costs("aten::grid_sampler_2d", "aten::grid_sampler_3d", "aten::cudnn_grid_sampler", backwards=False)(estimate_grid_samples)
costs("aten::grid_sampler_2d_backward", "aten::grid_sampler_3d_backward", backwards=True)(estimate_grid_samples)


@costs("aten::im2col")
def im2col(signature: Signature) -> Cost:
    """Return the bytes of unfolding windows (kernel 1, dilation 2, padding 3, stride 4): input read, every window written."""
    x = signature.need(0, "self")
    require(len(x.shape) in (3, 4), "input is no image")
    kernel, dilation, padding, stride = (
        signature.integers(index + 1, f"{name} (Concrete Inputs)", 2)
        for index, name in enumerate(("kernel", "dilation", "padding", "stride"))
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
    x = signature.need(0, "self")
    size, kernel = signature.integers(1, "output_size (Concrete Inputs)", 2), signature.integers(2, "kernel (Concrete Inputs)", 2)
    require(len(x.shape) in (2, 3) and min(kernel) > 0 and min(size) >= 0, "columns do not fit the image")
    outputs = prod(x.shape[:-2]) * (x.shape[-2] // prod(kernel)) * prod(size)
    return Cost(vector_flops=x.numel, bytes=x.distinct_bytes + size_of(outputs, x.dtype))


_ROI_CORNERS = 4
_USUAL_RATIO = 2
"""Where sampling_ratio is 0 or less, ceil(region / bins) squared points are sampled per bin; 2 x 2 is taken (detectron2's usual bins)."""


@costs("torchvision::roi_align")
def roi_align(signature: Signature) -> Cost:
    """Return the cost of pooling regions (rois 1, bins 3-4, sampling_ratio 5): bilinear samples, `derived` as regions may overlap."""
    x, rois = signature.need_all("input", "rois")
    bins = signature.integer(3, "pooled_height") * signature.integer(4, "pooled_width")
    require(len(x.shape) == 4 and len(rois.shape) == 2 and bins >= 0, "input or rois have other dimensions")
    outputs = rois.shape[0] * x.shape[1] * bins
    ratio = signature.value(5)
    samples = outputs * (ratio if type(ratio) is int and ratio > 0 else _USUAL_RATIO) ** 2
    moved = min(x.distinct_bytes, size_of(_ROI_CORNERS * samples, x.dtype)) + rois.distinct_bytes + size_of(outputs, x.dtype)
    return Cost(vector_flops=2 * _ROI_CORNERS * samples, bytes=moved, provenance="derived")


@costs("torchvision::_roi_align_backward")
def roi_align_backward(signature: Signature) -> Cost:
    """Return the cost of its gradient (grad 0, rois 1, batch, channels, height, width 5-8): dy read and spread, dx written."""
    grad, rois = signature.need_all("grad", "rois")
    size = [signature.integer(index, "input size") for index in (5, 6, 7, 8)]
    require(min(size) >= 0, "input size is negative")
    ratio = signature.value(9)
    samples = grad.numel * (ratio if type(ratio) is int and ratio > 0 else _USUAL_RATIO) ** 2
    return Cost(
        vector_flops=2 * _ROI_CORNERS * samples,
        bytes=count_read_bytes((grad, rois)) + size_of(prod(size), grad.dtype),
        provenance="derived",
    )


@costs("torchvision::nms")
def nms(signature: Signature) -> Cost:
    """Return the cost of comparing all pairs of boxes: 13 FLOP an overlap, a bit a pair written and read; `derived` (the sort is small)."""
    boxes, scores = signature.need_all("dets", "scores")
    pairs = scores.numel * scores.numel
    return Cost(vector_flops=13 * pairs // 2, bytes=count_read_bytes((boxes, scores)) + 2 * (pairs // 8), provenance="derived")


@costs("torchvision::deform_conv2d")
def deform_conv2d(signature: Signature) -> Cost:
    """Return the cost of a deformable convolution: 2 * N*P*Q * elements of the weight (offset [N, .., P, Q] holds the output size)."""
    x, weight, offset = signature.need_all("input", "weight", "offset")
    require(len(x.shape) == len(weight.shape) == len(offset.shape) == 4, "shapes do not fit a convolution")
    pixels = offset.shape[0] * offset.shape[2] * offset.shape[3]
    moved = count_read_bytes((x, weight, offset, *signature.tensors(3, 4))) + size_of(pixels * weight.shape[0], x.dtype)
    return build_matrix_cost(pixels * weight.numel, x.dtype, moved)
