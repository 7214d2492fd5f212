"""Interpolation and sampling of images: each output blends a few input elements (torch.nn.functional.interpolate, grid_sample).

Antialiasing (`_aa`) widens the window when it shrinks an image; its FLOPs are those of the plain filter, a lower bound.
"""

from __future__ import annotations

from math import prod

from gpudiag.model.cost import Cost
from gpudiag.model.signature import Shape, Signature
from gpudiag.roofline.costs.arguments import flags, ints, tensor
from gpudiag.roofline.costs.registry import costs, require
from gpudiag.roofline.costs.shapes import read_bytes, size_of

# Reads per output: the corners that are blended (torch.nn.functional.interpolate), 2 FLOP each; nearest copies.
_CORNERS = {
    "upsample_nearest1d": 0, "upsample_nearest2d": 0, "upsample_nearest3d": 0, "_upsample_nearest_exact1d": 0,
    "_upsample_nearest_exact2d": 0, "_upsample_nearest_exact3d": 0, "upsample_linear1d": 2, "upsample_bilinear2d": 4,
    "upsample_bicubic2d": 16, "upsample_trilinear3d": 8, "_upsample_bilinear2d_aa": 4, "_upsample_bicubic2d_aa": 16,
    "_upsample_lanczos2d_aa": 36,
}  # fmt: skip


def _scaled(signature: Signature, spatial: Shape) -> int:
    """Return the elements of one output plane: from output_size (1), else from the list of scale factors (last list of numbers)."""
    size = signature.value(1)
    if isinstance(size, tuple) and size and all(type(item) is int and item >= 0 for item in size):
        return prod(item for item in size if type(item) is int)
    lists = [item.value for item in signature.inputs if isinstance(item.value, tuple)]
    factors = [float(item) for item in lists[-1] if isinstance(item, (int, float))] if lists else []
    require(len(factors) == len(spatial) and all(0 <= factor < 1e9 for factor in factors), "output_size was not recorded (Concrete Inputs)")
    return prod(int(length * factor) for length, factor in zip(spatial, factors, strict=True))


def upsample_backward(signature: Signature, corners: int) -> Cost:
    """Return the cost of the gradient (input_size 2): dy read, dx written, each dy spread over its corners."""
    grad = tensor(signature, 0, "grad_output")
    size = ints(signature, 2, "input_size (Concrete Inputs)")
    require(min(size, default=0) >= 0, "input_size is negative")
    return Cost(vector_flops=2 * max(corners, 1) * grad.numel, bytes=grad.distinct_bytes + size_of(prod(size), grad.dtype))


def _register() -> None:
    for name, corners in _CORNERS.items():

        def formula(signature: Signature, corners: int = corners) -> Cost:
            x = tensor(signature, 0, "self")
            require(len(x.shape) >= 3, "input has no spatial dimension")
            outputs = x.shape[0] * x.shape[1] * _scaled(signature, x.shape[2:])
            read = min(x.distinct_bytes, size_of(max(corners, 1) * outputs, x.dtype))
            return Cost(vector_flops=2 * corners * outputs, bytes=read + size_of(outputs, x.dtype))

        def backward(signature: Signature, corners: int = corners) -> Cost:
            return upsample_backward(signature, corners)

        costs(f"aten::{name}")(formula)
        costs(f"aten::{name}_backward")(backward)


_register()

_SAMPLE_FLOP = 8
"""Per corner and output: position, weight, bounds, multiply-add (convention)."""


def _sampled(signature: Signature, x_at: int, grid_at: int) -> tuple[int, int]:
    """Return (elements of the result, corners): grid is [N, *output size, dimensions]."""
    x, grid = tensor(signature, x_at, "input"), tensor(signature, grid_at, "grid")
    require(
        len(x.shape) in (4, 5) and len(grid.shape) == len(x.shape) and grid.shape[-1] == len(x.shape) - 2, "grid does not fit the input"
    )
    return x.shape[1] * prod(grid.shape[:-1]), 2 ** (len(x.shape) - 2)


@costs("aten::grid_sampler_2d", "aten::grid_sampler_3d", "aten::cudnn_grid_sampler")
def grid_sampler(signature: Signature) -> Cost:
    """Return the cost of sampling an image at the points of a grid, bilinear (nearest does less): input at most once, grid, result."""
    outputs, corners = _sampled(signature, 0, 1)
    x, grid = tensor(signature, 0, "input"), tensor(signature, 1, "grid")
    read = min(x.distinct_bytes, size_of(corners * outputs, x.dtype)) + grid.distinct_bytes
    return Cost(vector_flops=_SAMPLE_FLOP * corners * outputs, bytes=read + size_of(outputs, x.dtype))


@costs("aten::grid_sampler_2d_backward", "aten::grid_sampler_3d_backward")
def grid_sampler_backward(signature: Signature) -> Cost:
    """Return the cost of its gradient (grad_output 0, input 1, grid 2, output_mask 6): the grid's always, the input's where asked for."""
    outputs, corners = _sampled(signature, 1, 2)
    grad, x, grid = (tensor(signature, index, name) for index, name in enumerate(("grad_output", "input", "grid")))
    wants_input = flags(signature, 6, "output_mask")[0]
    written = size_of(grid.numel, grid.dtype) + (size_of(x.numel, x.dtype) if wants_input else 0)
    return Cost(vector_flops=2 * _SAMPLE_FLOP * corners * outputs, bytes=read_bytes((grad, x, grid)) + written)
