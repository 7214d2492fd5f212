"""Reductions: every element read once, the result written (op_costs section 8). FLOP = elements read (2x for norms and variances)."""

from __future__ import annotations

from typing import Literal

import msgspec

from gpudiag.model.cost import Cost
from gpudiag.model.signature import Input, Signature
from gpudiag.roofline.costs.arguments import present, scalar_type, tensor
from gpudiag.roofline.costs.registry import NotModelledError, costs, require
from gpudiag.roofline.costs.shapes import category, reduced, size_of

Result = Literal["same", "sum", "bool", "int64", "with_indices"]


class Reduction(msgspec.Struct, frozen=True):
    """A reduction: FLOP per element read, result dtype rule, place of the dimensions, arguments of the whole-tensor overload."""

    operations: int = 1
    result: Result = "same"
    dim: int = 1
    whole: int = 1
    """A call with at most this many arguments (`out=` aside) reduces everything; one with more has dimensions at `dim`."""
    dtype: int | None = None
    """Position of a ScalarType argument, counted behind `dim`."""
    outputs: int = 1


TABLE: dict[str, Reduction] = {
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


def _dims(signature: Signature, rule: Reduction) -> tuple[int, ...]:
    """Return the reduced dimensions, () for all; raises NotModelledError where they were not recorded."""
    if len(signature.inputs) <= max(rule.whole, rule.dim):
        return ()
    value = signature.value(rule.dim)
    if value is None:
        require(signature.has_args, "the reduced dimensions were not recorded (Concrete Inputs)")
        return ()
    items = value if isinstance(value, tuple) else (value,)
    require(all(type(item) is int for item in items), "the reduced dimensions were not recorded")
    return tuple(item for item in items if type(item) is int)


def _written(signature: Signature, rule: Reduction, x: Input, left: int) -> int:
    dtype = x.dtype or ""
    if rule.result == "sum" and category(dtype) < 2:
        dtype = "int64"
    if rule.result in ("bool", "int64"):
        dtype = rule.result
    if rule.dtype is not None and len(signature.inputs) > rule.whole:
        dtype = scalar_type(signature, rule.dim + rule.dtype, dtype)
    elif rule.dtype is not None and rule.whole == 2:
        dtype = scalar_type(signature, 1, dtype)
    indices = size_of(left, "int64") if rule.result == "with_indices" and len(signature.inputs) > 1 else 0
    return rule.outputs * size_of(left, dtype) + indices


def reduction(signature: Signature, rule: Reduction) -> Cost:
    """Return the cost of a reduction.

    Dimensions that were not recorded: the read alone. The result then has at most 1/n of the elements, n the smallest dimension that can
    be reduced: `derived` where that is at most an eighth of the read, else `generic`.
    """
    x = tensor(signature, 0, "self")
    outs = present(signature, *range(1, len(signature.inputs)))
    two_operands = rule.result == "with_indices" and len(signature.inputs) == 2 and bool(outs) and bool(outs[0].shape)
    require(not two_operands, "element-wise overload (aten::maximum carries the cost)")
    flops = rule.operations * x.numel
    if outs:
        return Cost(vector_flops=flops, bytes=x.distinct_bytes + sum(size_of(out.numel, out.dtype) for out in outs))
    try:
        dims = _dims(signature, rule)
    except NotModelledError:
        smallest = min((size for size in x.shape if size > 1), default=1)
        negligible = _NEGLIGIBLE * _written(signature, rule, x, x.numel // smallest) <= x.distinct_bytes
        return Cost(vector_flops=flops, bytes=x.distinct_bytes, provenance="derived" if negligible else "generic")
    left = reduced(x.shape, dims)
    require(left is not None, "a reduced dimension does not exist")
    return Cost(vector_flops=flops, bytes=x.distinct_bytes + _written(signature, rule, x, left or 0))


def _register() -> None:
    for name, rule in TABLE.items():

        def formula(signature: Signature, rule: Reduction = rule) -> Cost:
            return reduction(signature, rule)

        costs(f"aten::{name}")(formula)


_register()
