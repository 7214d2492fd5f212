"""Work on a sparse tensor of rows (COO with one sparse dimension: the gradient of an embedding), given how many rows it holds.

The profiler records the size that the tensor stands for, never the rows that it holds; those are read from the calls inside
(`rows_inside`), which record them as dense tensors. Every cost is `derived`: indices are int64, rows that occur twice count twice.
Source: SparseTensorMath.cpp, SparseTensor.cpp and SparseCUDATensorMath.cu of torch (add: spcadd, coalesce, sparse_mask).
"""

from __future__ import annotations

from math import prod

import msgspec

from gpudiag.model.cost import Cost
from gpudiag.model.signature import Input, Shape, Signature
from gpudiag.roofline.costs.arguments import is_sparse_tensor
from gpudiag.roofline.costs.elementwise import TABLE
from gpudiag.roofline.costs.registry import FORMULAS, LARGEST, NotModelledError, costs, words
from gpudiag.roofline.costs.shapes import size_of

INDEX_BYTES = 8
"""Bytes of one index of a COO tensor: int64 (torch.sparse_coo_tensor)."""

_UNKNOWN = "how many values a sparse operand holds is not recorded"

_SUMS = frozenset(f"aten::{name}" for name in words("add add_ sub sub_"))
_ON_VALUES = frozenset(f"aten::{name}" for name in words("clone copy_ norm sum"))
_REARRANGED = ("aten::_coalesce", "aten::sparse_mask")

ON_ROWS = frozenset({*_SUMS, *_ON_VALUES, *_REARRANGED, *(f"aten::{name}" for name in TABLE), *(f"aten::{name}_" for name in TABLE)})
"""Ops that work on the rows which a sparse operand holds, and on as many of a dense one."""


class Held(msgspec.Struct, frozen=True):
    """The rows that the calls inside one call work on: the first count (an operand's), the largest and the smallest (a result's)."""

    first: int
    largest: int
    smallest: int


def represented(signature: Signature) -> Shape | None:
    """Return the size that the first sparse operand stands for; None where there is none, or no dimension besides its rows."""
    found = next((item.shape for item in signature.inputs if is_sparse_tensor(item)), ())
    return found if len(found) >= 2 else None


def rows_inside(size: Shape, name: str, call: Signature) -> tuple[int | None, bool]:
    """Return (rows of a sparse tensor of `size` that the first fitting operand of a call of `name` inside records; whether one fits but
    has as many rows as `size`: the rows, or a dense operand). The values have the other dimensions of `size`, the indices are [1, rows].
    """
    if name == "aten::resize_":
        return None, False  # an empty tensor that is about to get its size
    length = call.value(3) if name == "aten::narrow" else None  # coalescing cuts its result to the distinct rows
    if type(length) is int and 0 <= length <= LARGEST and represented(call) is None:
        return length, False
    whole = False
    for item in call.inputs:
        if not item.is_tensor or is_sparse_tensor(item) or len(item.shape) < 2 or max(item.shape) > LARGEST:
            continue
        if len(item.shape) == 2 and item.shape[0] == 1 and item.dtype == "int64":
            return item.shape[1], False
        if item.shape[1:] == size[1:]:
            if item.shape[0] != size[0]:
                return item.shape[0], False
            whole = True
    return None, whole


def sparse_cost(name: str, signature: Signature, held: Held) -> Cost:
    """Return the cost of op `name` on the rows `held`; raises NotModelledError where the op is none of ON_ROWS."""
    size = represented(signature)
    if size is None or name not in ON_ROWS:
        raise NotModelledError(_UNKNOWN)
    dtype = next((item.dtype for item in signature.inputs if is_sparse_tensor(item)), None)
    row, row_bytes = prod(size[1:]), size_of(prod(size[1:]), dtype)
    if name in _SUMS:
        return _sum(signature, size, held, row, row_bytes)
    if name == "aten::_coalesce":
        moved = (row_bytes + INDEX_BYTES) * (held.first + held.smallest)
        return Cost(vector_flops=held.first * row, bytes=moved, provenance="derived")
    if name == "aten::sparse_mask":
        return Cost(bytes=(2 * row_bytes + INDEX_BYTES) * held.first, provenance="derived")
    cost = FORMULAS[name](_on_values(signature, size, held))
    return msgspec.structs.replace(cost, provenance="derived")


def _sum(signature: Signature, size: Shape, held: Held, row: int, row_bytes: int) -> Cost:
    """Return the cost of a sum: rows added to a dense tensor (touched rows read and written), or two sparse tensors joined."""
    first = signature.tensor(0)
    if first is None or is_sparse_tensor(first):
        moved = 2 * (row_bytes + INDEX_BYTES) * held.largest
        return Cost(vector_flops=held.largest * row, bytes=moved, provenance="derived")
    touched = min(held.first, size[0]) * size_of(row, first.dtype)
    return Cost(vector_flops=held.first * row, bytes=(row_bytes + INDEX_BYTES) * held.first + 2 * touched, provenance="derived")


def _on_values(signature: Signature, size: Shape, held: Held) -> Signature:
    """Return the inputs with tensors of `size`, and a result that has no size yet, replaced by as many rows as are held."""

    def rows(item: Input) -> Input:
        if not item.is_tensor or item.shape not in (size, (0,)):
            return item
        return msgspec.structs.replace(item, shape=(held.first, *size[1:]), strides=None)

    return Signature(tuple(rows(item) for item in signature.inputs))


@costs(*_REARRANGED, generic=False)
def rearranged(signature: Signature) -> Cost:
    """Raise NotModelledError: without the calls inside nothing tells how many rows there are (see `sparse_cost`)."""
    raise NotModelledError(_UNKNOWN)
