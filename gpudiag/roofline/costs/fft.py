"""Fourier transforms: 5 N log2 N FLOP for N complex points, half for real ones (the convention of FFTW's benchFFT and of cuFFT)."""

from __future__ import annotations

from math import ceil, log2, prod

from gpudiag.model.cost import Cost
from gpudiag.model.signature import Input, Signature
from gpudiag.roofline.costs.arguments import flag, integer, ints, tensor
from gpudiag.roofline.costs.registry import costs, require
from gpudiag.roofline.costs.shapes import size_of

_COMPLEX = {"fp16": "complex64", "bf16": "complex64", "fp32": "complex64", "fp64": "complex128"}
_REAL = {"complex64": "fp32", "complex128": "fp64"}
_FLOP_PER_POINT = 5


def _transformed(signature: Signature, x: Input) -> tuple[int, ...]:
    dims = ints(signature, 1, "dim (Concrete Inputs)")
    rank = len(x.shape)
    require(bool(dims) and all(-rank <= dim < rank for dim in dims), "dim does not fit the shape")
    return tuple(dim % rank for dim in dims)


def _flops(elements: int, points: int, real: bool) -> int:
    return ceil(_FLOP_PER_POINT * elements * log2(points) / (2 if real else 1)) if points > 1 else 0


@costs("aten::_fft_c2c")
def complex_to_complex(signature: Signature) -> Cost:
    """Return the cost of a complex transform over all of `dim` in one pass: read and written once."""
    x = tensor(signature, 0, "self")
    points = prod(x.shape[dim] for dim in _transformed(signature, x))
    return Cost(vector_flops=_flops(x.numel, points, real=False), bytes=x.distinct_bytes + size_of(x.numel, x.dtype))


@costs("aten::_fft_r2c")
def real_to_complex(signature: Signature) -> Cost:
    """Return the cost of a real transform; `onesided` keeps n/2 + 1 of the last transformed dimension."""
    x = tensor(signature, 0, "self")
    dims = _transformed(signature, x)
    last = x.shape[dims[-1]]
    kept = last // 2 + 1 if flag(signature, 3, "onesided (Concrete Inputs)") else last
    outputs = x.numel // last * kept if last else 0
    points = prod(x.shape[dim] for dim in dims)
    return Cost(vector_flops=_flops(x.numel, points, real=True), bytes=x.distinct_bytes + size_of(outputs, _COMPLEX.get(x.dtype or "")))


@costs("aten::_fft_c2r")
def complex_to_real(signature: Signature) -> Cost:
    """Return the cost of the inverse of a real transform (last_dim_size 3)."""
    x = tensor(signature, 0, "self")
    dims = _transformed(signature, x)
    last = integer(signature, 3, "last_dim_size (Concrete Inputs)")
    have = x.shape[dims[-1]]
    require(last >= 0, "last_dim_size is negative")
    outputs = x.numel // have * last if have else 0
    points = prod(x.shape[dim] for dim in dims[:-1]) * last
    return Cost(vector_flops=_flops(outputs, points, real=True), bytes=x.distinct_bytes + size_of(outputs, _REAL.get(x.dtype or "")))
