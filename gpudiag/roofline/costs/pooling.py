"""Pooling (op_costs section 9): window elements per output, input read and output written once."""

from __future__ import annotations

from math import prod

from gpudiag.model.cost import Cost
from gpudiag.model.signature import Input, Shape, Signature
from gpudiag.roofline.costs.arguments import flag, ints, present, tensor
from gpudiag.roofline.costs.flows import Flow, register_flows
from gpudiag.roofline.costs.registry import costs, require
from gpudiag.roofline.costs.shapes import read_bytes, size_of


def pooled(size: int, window: int, stride: int, padding: int, ceil: bool) -> int:
    """Return the output length of one dimension; the last window must start inside the input or its left padding.

    Source: pooling_output_shape in torch/csrc aten/src/ATen/native/Pool.h.
    """
    require(stride > 0 and window > 0, "kernel size or stride is not positive")
    length = (size + 2 * padding - window + (stride - 1 if ceil else 0)) // stride + 1
    return length - 1 if ceil and (length - 1) * stride >= size + padding else length


def _list(signature: Signature, index: int, what: str, rank: int, default: Shape | None) -> Shape:
    """Return a list argument of `rank` entries; an empty list means `default`."""
    if signature.value(index) == () and default is not None:
        return default
    return ints(signature, index, f"{what} (Concrete Inputs)", rank)


def _outputs(signature: Signature, x: Input, rank: int, dilated: bool) -> tuple[int, int]:
    """Return (elements of the window, elements of the output); arguments: kernel 1, stride 2, padding 3, [dilation 4,] ceil_mode."""
    require(len(x.shape) in (rank + 1, rank + 2), "input shape does not fit the pooling")
    kernel = _list(signature, 1, "kernel_size", rank, None)
    stride = _list(signature, 2, "stride", rank, kernel)
    padding = _list(signature, 3, "padding", rank, (0,) * rank)
    dilation = _list(signature, 4, "dilation", rank, (1,) * rank) if dilated else (1,) * rank
    ceil = flag(signature, 5 if dilated else 4, "ceil_mode (Concrete Inputs)")
    spatial = x.shape[len(x.shape) - rank :]
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    sizes = [pooled(*item, ceil) for item in zip(spatial, reach, stride, padding, strict=True)]
    require(all(size >= 0 for size in sizes), "pooling arguments give a negative output size")
    return prod(kernel), prod(x.shape[: len(x.shape) - rank]) * prod(sizes)


def pool(signature: Signature, rank: int, dilated: bool, indices: bool) -> Cost:
    """Return the cost of a pooling in `rank` dimensions; `indices`: int64 positions are written too."""
    x = tensor(signature, 0, "self")
    window, outputs = _outputs(signature, x, rank, dilated)
    moved = x.distinct_bytes + size_of(outputs, x.dtype) + (size_of(outputs, "int64") if indices else 0)
    return Cost(vector_flops=window * outputs, bytes=moved)


def _register() -> None:
    for rank in (1, 2, 3):
        for name, dilated, indices in (
            (f"max_pool{rank}d", True, False),
            (f"max_pool{rank}d_with_indices", True, True),
            (f"mkldnn_max_pool{rank}d", True, False),
            (f"avg_pool{rank}d", False, False),
        ):

            def formula(signature: Signature, rank: int = rank, dilated: bool = dilated, indices: bool = indices) -> Cost:
                return pool(signature, rank, dilated, indices)

            if name != "mkldnn_max_pool1d":
                costs(f"aten::{name}")(formula)


_register()


def _sized(signature: Signature, size_at: int, rank: int | None = None) -> tuple[Input, int]:
    """Return (input, elements of the result) of a pooling that is told the output's spatial size."""
    x = tensor(signature, 0, "self")
    size = ints(signature, size_at, "output_size (Concrete Inputs)", rank)
    require(len(size) < len(x.shape) and min(size, default=0) >= 0, "output_size does not fit the input")
    return x, prod(x.shape[: len(x.shape) - len(size)]) * prod(size)


@costs("aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool3d", "aten::mkldnn_adaptive_avg_pool2d")
def adaptive_avg_pool(signature: Signature) -> Cost:
    """Return the cost of adaptive average pooling (output size 1): every input element added once."""
    x, outputs = _sized(signature, 1)
    return Cost(vector_flops=x.numel, bytes=x.distinct_bytes + size_of(outputs, x.dtype))


@costs("aten::adaptive_max_pool2d", "aten::adaptive_max_pool3d")
def adaptive_max_pool(signature: Signature) -> Cost:
    """Return the cost of adaptive maximum pooling: every input element compared once, int64 positions written too."""
    x, outputs = _sized(signature, 1)
    return Cost(vector_flops=x.numel, bytes=x.distinct_bytes + size_of(outputs, x.dtype) + size_of(outputs, "int64"))


def fractional_max_pool(signature: Signature, rank: int) -> Cost:
    """Return the cost of pooling with random windows (kernel 1, output size 2, samples 3)."""
    x, outputs = _sized(signature, 2, rank)
    window = prod(ints(signature, 1, "kernel_size (Concrete Inputs)", rank))
    moved = read_bytes((x, *present(signature, 3))) + size_of(outputs, x.dtype) + size_of(outputs, "int64")
    return Cost(vector_flops=max(window, 0) * outputs, bytes=moved)


@costs("aten::fractional_max_pool2d")
def fractional_max_pool2d(signature: Signature) -> Cost:
    """Return the cost of fractional_max_pool in two dimensions."""
    return fractional_max_pool(signature, 2)


@costs("aten::fractional_max_pool3d")
def fractional_max_pool3d(signature: Signature) -> Cost:
    """Return the cost of fractional_max_pool in three dimensions."""
    return fractional_max_pool(signature, 3)


# Values go back to where the maxima were; the zero fill of the result is an op of its own. Backwards: one addition for each element.
register_flows(
    {
        "aten::max_unpool2d": Flow(reads=(0, 1), writes=(0,), operations=0),
        "aten::max_unpool3d": Flow(reads=(0, 1), writes=(0,), operations=0),
        "aten::mkldnn_max_pool2d_backward": Flow(reads=(0, 1, 2), writes=(2,)),
        "aten::mkldnn_max_pool3d_backward": Flow(reads=(0, 1, 2), writes=(2,)),
        "aten::mkldnn_adaptive_avg_pool2d_backward": Flow(reads=(0,), writes=(1,), per=1),
        "aten::max_pool2d_backward": Flow(reads=(0, 1), writes=(1,)),
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
    grad, x = tensor(signature, 0, "grad_output"), tensor(signature, 1, "self")
    indices = [item for item in present(signature, *range(2, len(signature.inputs))) if item.dtype == "int64"][:1]
    return Cost(vector_flops=grad.numel, bytes=read_bytes((grad, *indices)) + size_of(x.numel, x.dtype))


@costs(
    "aten::avg_pool2d_backward",
    "aten::avg_pool3d_backward",
    "aten::_adaptive_avg_pool2d_backward",
    "aten::_adaptive_avg_pool3d_backward",
    "aten::adaptive_avg_pool3d_backward",
)
def avg_pool_backward(signature: Signature) -> Cost:
    """Return the cost of average pooling's backward: dy read, dx written."""
    grad, x = tensor(signature, 0, "grad_output"), tensor(signature, 1, "self")
    return Cost(vector_flops=x.numel, bytes=grad.distinct_bytes + size_of(x.numel, x.dtype))
