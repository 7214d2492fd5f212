"""Scans, sorts and searches: the least traffic (op_costs section 8). Real sorts make several passes, so their efficiency says little."""

from __future__ import annotations

from math import prod

from gpudiag.model.cost import Cost
from gpudiag.model.signature import Signature
from gpudiag.roofline.costs.arguments import integer, present, scalar_type, tensor
from gpudiag.roofline.costs.registry import costs, require
from gpudiag.roofline.costs.shapes import category, read_bytes, size_of


@costs("aten::cumsum", "aten::cumprod", "aten::logcumsumexp", "aten::_logcumsumexp", "aten::cumsum_", "aten::cumprod_")
def scan(signature: Signature) -> Cost:
    """Return the cost of a scan: as many results as elements (integers accumulate in int64)."""
    x = tensor(signature, 0, "self")
    default = "int64" if category(x.dtype or "") < 2 else x.dtype or ""
    return Cost(vector_flops=x.numel, bytes=x.distinct_bytes + size_of(x.numel, scalar_type(signature, 2, default)))


@costs("aten::sort", "aten::argsort", "aten::cummax", "aten::cummin", "aten::_cummax_helper", "aten::_cummin_helper")
def sort(signature: Signature) -> Cost:
    """Return the least traffic of a sort: values read and written, int64 indices written. Real sorts make several passes."""
    x = tensor(signature, 0, "self")
    return Cost(vector_flops=x.numel, bytes=x.distinct_bytes + size_of(x.numel, x.dtype) + size_of(x.numel, "int64"))


@costs("aten::topk")
def topk(signature: Signature) -> Cost:
    """Return the least traffic of a top-k: everything read, k values and int64 indices a row written."""
    x, k = tensor(signature, 0, "self"), integer(signature, 1, "k")
    dim = signature.value(2, -1)
    rank = len(x.shape)
    require(type(dim) is int and (-rank <= dim < rank) and k >= 0, "dim or k does not fit the shape")
    at = dim % rank if type(dim) is int and rank else 0
    kept = k * prod(size for index, size in enumerate(x.shape) if index != at)
    return Cost(vector_flops=x.numel, bytes=x.distinct_bytes + size_of(kept, x.dtype) + size_of(kept, "int64"))


@costs("aten::msort")
def msort(signature: Signature) -> Cost:
    """Return the least traffic of a sort that returns values alone."""
    x = tensor(signature, 0, "self")
    return Cost(vector_flops=x.numel, bytes=x.distinct_bytes + size_of(x.numel, x.dtype))


@costs("aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive")
def unique(signature: Signature) -> Cost:
    """Return the least traffic of finding distinct values, as if all are (`derived`); inverse and counts are int64 (flags behind self)."""
    x = tensor(signature, 0, "self")
    flags = [item.value for item in signature.inputs[1:] if isinstance(item.value, bool)]
    extra = sum(flags[-2:])  # return_inverse, return_counts
    return Cost(
        vector_flops=x.numel, bytes=x.distinct_bytes + size_of(x.numel, x.dtype) + extra * size_of(x.numel, "int64"), provenance="derived"
    )


def _searched(values: int, read: int, boundaries: int, int32: object) -> Cost:
    steps = max(boundaries - 1, 0).bit_length()
    return Cost(vector_flops=steps * values, bytes=read + size_of(values, "int32" if int32 is True else "int64"))


@costs("aten::searchsorted")
def searchsorted(signature: Signature) -> Cost:
    """Return the cost of binary searches (sorted_sequence 0, values 1, out_int32 2): log2(n) comparisons a value, positions written."""
    ordered = tensor(signature, 0, "sorted_sequence")
    values = signature.tensor(1)
    read = read_bytes((ordered, values, *present(signature, 5)))
    return _searched(values.numel if values is not None else 1, read, ordered.shape[-1] if ordered.shape else 1, signature.value(2))


@costs("aten::bucketize")
def bucketize(signature: Signature) -> Cost:
    """Return the cost of binary searches (values 0, boundaries 1, out_int32 2)."""
    values, ordered = signature.tensor(0), tensor(signature, 1, "boundaries")
    return _searched(values.numel if values is not None else 1, read_bytes((values, ordered)), ordered.numel, signature.value(2))


@costs("aten::histc")
def histc(signature: Signature) -> Cost:
    """Return the cost of a histogram (bins 1): self read, bins written."""
    x, bins = tensor(signature, 0, "self"), integer(signature, 1, "bins")
    require(bins >= 0, "bins is negative")
    return Cost(vector_flops=2 * x.numel, bytes=x.distinct_bytes + size_of(bins, x.dtype))


@costs("aten::bincount")
def bincount(signature: Signature) -> Cost:
    """Return the cost of counting (weights 1, minlength 2): self and weights read, minlength counts written (the largest value decides)."""
    x, bins = tensor(signature, 0, "self"), signature.value(2)
    length = bins if type(bins) is int and bins > 0 else 0
    return Cost(vector_flops=x.numel, bytes=read_bytes((x, *present(signature, 1))) + size_of(length, "int64"), provenance="derived")


@costs("aten::equal")
def equal(signature: Signature) -> Cost:
    """Return the cost of comparing two tensors: both read, one answer (`derived`: a difference may end it early)."""
    first, second = tensor(signature, 0, "self"), tensor(signature, 1, "other")
    return Cost(vector_flops=first.numel, bytes=read_bytes((first, second)), provenance="derived")


@costs("aten::isin")
def isin(signature: Signature) -> Cost:
    """Return the least traffic of a membership test: both sides read, one bool an element written."""
    values, tests = signature.tensor(0), signature.tensor(1)
    count = values.numel if values is not None else 1
    return Cost(vector_flops=count, bytes=read_bytes((values, tests)) + count, provenance="derived")


@costs("aten::multinomial")
def multinomial(signature: Signature) -> Cost:
    """Return the least traffic of drawing num_samples (1) a row: probabilities read, int64 positions written."""
    x, samples = tensor(signature, 0, "self"), integer(signature, 1, "num_samples")
    rows = prod(x.shape[:-1])
    require(samples >= 0, "num_samples is negative")
    return Cost(vector_flops=2 * x.numel, bytes=x.distinct_bytes + size_of(rows * samples, "int64"), provenance="derived")
