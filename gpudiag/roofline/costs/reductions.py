"""Reductions, scans, sorts and searches (op_costs section 8): every element read once, the result written."""

from __future__ import annotations

from math import prod
from typing import Literal

import msgspec

from gpudiag.model.ops import Argument, Cost, Input, Signature
from gpudiag.roofline.costs.registry import (
    Flow,
    costs,
    count_read_bytes,
    count_reduced,
    find_dtype_category,
    register_flows,
    require,
    size_of,
)

ReductionResult = Literal["same", "sum", "bool", "int64", "with_indices"]


class Reduction(msgspec.Struct, frozen=True):
    """A reduction: FLOP per element read, result dtype rule, place of the dimensions, arguments of the whole-tensor overload."""

    operations: int = 1
    result: ReductionResult = "same"
    dim: int = 1
    whole: int = 1
    """A call with at most this many arguments (`out=` aside) reduces everything; one with more has dimensions at `dim`."""
    dtype: int | None = None
    """Position of a ScalarType argument, counted behind `dim`."""
    outputs: int = 1


REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction(result="sum", whole=2, dtype=2),
    "nansum": Reduction(result="sum", whole=0, dtype=2),
    "prod": Reduction(result="sum", whole=2, dtype=2),
    "mean": Reduction(whole=2, dtype=2),
    "amax": Reduction(whole=0),
    "amin": Reduction(whole=0),
    "aminmax": Reduction(whole=0, outputs=2),
    "argmax": Reduction(result="int64", whole=0),
    "argmin": Reduction(result="int64", whole=0),
    "any": Reduction(result="bool"),
    "all": Reduction(result="bool"),
    "max": Reduction(result="with_indices"),
    "min": Reduction(result="with_indices"),
    "median": Reduction(result="with_indices"),
    "mode": Reduction(result="with_indices"),
    "kthvalue": Reduction(result="with_indices", dim=2, whole=0),
    "norm": Reduction(operations=2, dim=2, whole=3, dtype=2),
    "linalg_vector_norm": Reduction(operations=2, dim=2, whole=0, dtype=2),
    "var": Reduction(operations=2, whole=2),
    "std": Reduction(operations=2, whole=2),
    "var_mean": Reduction(operations=2, whole=2, outputs=2),
    "std_mean": Reduction(operations=2, whole=2, outputs=2),
    "count_nonzero": Reduction(result="int64", whole=0),
    "nanmedian": Reduction(result="with_indices"),
    "_aminmax": Reduction(outputs=2),
    "_is_all_true": Reduction(result="bool"),
    "_is_any_true": Reduction(result="bool"),
    "linalg__powsum": Reduction(operations=2, dim=2, whole=0, dtype=2),
    "logsumexp": Reduction(operations=5, whole=0),
}

_NEGLIGIBLE = 8
"""Above this ratio of read to largest possible result, the result's size decides less than 1/8 of the bytes."""


def _count_written(signature: Signature, rule: Reduction, x: Input, left: int) -> int:
    dtype = x.dtype or ""
    if rule.result == "sum" and find_dtype_category(dtype) < 2:
        dtype = "int64"
    if rule.result in ("bool", "int64"):
        dtype = rule.result
    if rule.dtype is not None and len(signature.inputs) > rule.whole:
        dtype = signature.scalar_type(rule.dim + rule.dtype, dtype)
    elif rule.dtype is not None and rule.whole == 2:
        dtype = signature.scalar_type(1, dtype)
    indices = size_of(left, "int64") if rule.result == "with_indices" and len(signature.inputs) > 1 else 0
    return rule.outputs * size_of(left, dtype) + indices


def estimate_reduction(signature: Signature, rule: Reduction) -> Cost:
    """Estimate the cost of a reduction.

    Dimensions that were not recorded: the read alone. The result then has at most 1/n of the elements, n the smallest dimension that can
    be reduced: `derived` where that is at most an eighth of the read, else `generic`.
    """
    x = signature.need(0, "self")
    outs = signature.tensors(*range(1, len(signature.inputs)))
    two_operands = rule.result == "with_indices" and len(signature.inputs) == 2 and bool(outs) and bool(outs[0].shape)
    require(not two_operands, "element-wise overload (aten::maximum carries the cost)")
    flops = rule.operations * x.numel
    if outs:
        return Cost(vector_flops=flops, bytes=x.distinct_bytes + sum(size_of(out.numel, out.dtype) for out in outs))
    dims: tuple[Argument, ...] = ()  # none: all are reduced
    recorded = True
    if len(signature.inputs) > max(rule.whole, rule.dim):
        value = signature.value(rule.dim)
        dims = value if isinstance(value, tuple) else () if value is None else (value,)
        recorded = signature.has_args if value is None else all(type(item) is int for item in dims)
    if not recorded:
        smallest = min((size for size in x.shape if size > 1), default=1)
        negligible = _NEGLIGIBLE * _count_written(signature, rule, x, x.numel // smallest) <= x.distinct_bytes
        return Cost(vector_flops=flops, bytes=x.distinct_bytes, provenance="derived" if negligible else "generic")
    left = count_reduced(x.shape, [item for item in dims if type(item) is int])
    require(left is not None, "a reduced dimension does not exist")
    return Cost(vector_flops=flops, bytes=x.distinct_bytes + _count_written(signature, rule, x, left or 0))


for _name, _rule in REDUCTIONS.items():
    costs(f"aten::{_name}", rule=_rule)(estimate_reduction)


@costs("aten::cumsum", "aten::cumprod", "aten::logcumsumexp", "aten::_logcumsumexp", "aten::cumsum_", "aten::cumprod_")
def scan(signature: Signature) -> Cost:
    """Return the cost of a scan: as many results as elements (integers accumulate in int64)."""
    x = signature.need(0, "self")
    default = "int64" if find_dtype_category(x.dtype or "") < 2 else x.dtype or ""
    return Cost(vector_flops=x.numel, bytes=x.distinct_bytes + size_of(x.numel, signature.scalar_type(2, default)))


register_flows(
    {
        # the least traffic of a sort: values read and written (int64 indices too); real sorts make several passes
        "aten::sort aten::argsort aten::cummax aten::cummin aten::_cummax_helper aten::_cummin_helper": Flow((0,), (0,), beside=8),
        "aten::msort": Flow(reads=(0,), writes=(0,)),
        # both read, one answer; a difference may end it early
        "aten::equal": Flow(reads=(0, 1), writes=(), required=(1,), provenance="derived"),
    }
)


@costs("aten::topk")
def topk(signature: Signature) -> Cost:
    """Return the least traffic of a top-k: everything read, k values and int64 indices a row written."""
    x, k = signature.need(0, "self"), signature.integer(1, "k")
    dim = signature.value(2, -1)
    rank = len(x.shape)
    require(type(dim) is int and (-rank <= dim < rank) and k >= 0, "dim or k does not fit the shape")
    at = dim % rank if type(dim) is int and rank else 0
    kept = k * prod(size for index, size in enumerate(x.shape) if index != at)
    return Cost(vector_flops=x.numel, bytes=x.distinct_bytes + size_of(kept, x.dtype) + size_of(kept, "int64"))


@costs("aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive")
def unique(signature: Signature) -> Cost:
    """Return the least traffic of finding distinct values, as if all are (`derived`); inverse and counts are int64 (flags behind self)."""
    x = signature.need(0, "self")
    flags = [item.value for item in signature.inputs[1:] if isinstance(item.value, bool)]
    extra = sum(flags[-2:])  # return_inverse, return_counts
    return Cost(
        vector_flops=x.numel, bytes=x.distinct_bytes + size_of(x.numel, x.dtype) + extra * size_of(x.numel, "int64"), provenance="derived"
    )


def estimate_search(signature: Signature, ordered_at: int) -> Cost:
    """Estimate the cost of binary searches: log2(n) comparisons a value, positions written (out_int32 2)."""
    ordered, values = signature.need(ordered_at, "boundaries"), signature.tensor(1 - ordered_at)
    count = values.numel if values is not None else 1
    # searchsorted: a row of boundaries for each row of values, and a sorter; bucketize: the same for all
    boundaries = ordered.numel if ordered_at else (ordered.shape or (1,))[-1]
    read = count_read_bytes((ordered, values, *signature.tensors(*(() if ordered_at else (5,)))))
    steps = max(boundaries - 1, 0).bit_length()
    return Cost(vector_flops=steps * count, bytes=read + size_of(count, "int32" if signature.value(2) is True else "int64"))


costs("aten::searchsorted", ordered_at=0)(estimate_search)
costs("aten::bucketize", ordered_at=1)(estimate_search)


@costs("aten::histc")
def histc(signature: Signature) -> Cost:
    """Return the cost of a histogram (bins 1): self read, bins written."""
    x, bins = signature.need(0, "self"), signature.integer(1, "bins")
    require(bins >= 0, "bins is negative")
    return Cost(vector_flops=2 * x.numel, bytes=x.distinct_bytes + size_of(bins, x.dtype))


@costs("aten::bincount")
def bincount(signature: Signature) -> Cost:
    """Return the cost of counting (weights 1, minlength 2): self and weights read, minlength counts written (the largest value decides)."""
    x, bins = signature.need(0, "self"), signature.value(2)
    length = bins if type(bins) is int and bins > 0 else 0
    return Cost(vector_flops=x.numel, bytes=count_read_bytes((x, *signature.tensors(1))) + size_of(length, "int64"), provenance="derived")


@costs("aten::isin")
def isin(signature: Signature) -> Cost:
    """Return the least traffic of a membership test: both sides read, one bool an element written."""
    values, tests = signature.tensor(0), signature.tensor(1)
    count = values.numel if values is not None else 1
    return Cost(vector_flops=count, bytes=count_read_bytes((values, tests)) + count, provenance="derived")


@costs("aten::multinomial")
def multinomial(signature: Signature) -> Cost:
    """Return the least traffic of drawing num_samples (1) a row: probabilities read, int64 positions written."""
    x, samples = signature.need(0, "self"), signature.integer(1, "num_samples")
    rows = prod(x.shape[:-1])
    require(samples >= 0, "num_samples is negative")
    return Cost(vector_flops=2 * x.numel, bytes=x.distinct_bytes + size_of(rows * samples, "int64"), provenance="derived")
