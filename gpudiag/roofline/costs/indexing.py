"""Gather and scatter (op_costs section 12), and work on sparse tensors of rows (the gradient of an embedding).

The profiler records the size that a sparse tensor stands for, never the rows that it holds; those are read from the calls inside
(`count_rows_inside`), which record them as dense tensors. Every cost is `derived`: indices are int64, rows that occur twice count twice.
Source: SparseTensorMath.cpp, SparseTensor.cpp and SparseCUDATensorMath.cu of torch (add: spcadd, coalesce, sparse_mask).
"""

from __future__ import annotations

from math import prod

import msgspec

from gpudiag.model.ops import Cost, Input, NotModelledError, Shape, Signature
from gpudiag.roofline.costs.arguments import Flow, is_sparse_tensor, register_flows, size_of
from gpudiag.roofline.costs.elementwise import POINTWISE
from gpudiag.roofline.costs.registry import FORMULAS, LARGEST, costs, reject, require, split_names


def _estimate_taken(source: Input, index: Input, taken: int) -> Cost:
    """Estimate the bytes of reading `taken` elements (no more than there are) and the index, and of writing them."""
    return Cost(bytes=size_of(min(taken, source.numel) + taken, source.dtype) + index.distinct_bytes)


@costs("aten::index_select")
def index_select(signature: Signature) -> Cost:
    """Return the cost of taking slices along one dimension (dim 1, index 2)."""
    source, index = signature.need(0, "self"), signature.need(2, "index")
    dim, rank = signature.value(1, 0), len(source.shape)
    out = signature.output(3)
    if out is not None:
        return _estimate_taken(source, index, out.numel)
    if signature.value(1) is None:
        # the dimension was not recorded: the first, as of rows in a table
        rows = source.shape[0] if source.shape else 0
        cost = _estimate_taken(source, index, source.numel // rows * index.numel if rows else 0)
        return msgspec.structs.replace(cost, provenance="derived")
    require(type(dim) is int and -rank <= dim < rank, "dim is none of self's dimensions")
    size = source.shape[dim] if type(dim) is int else 0
    return _estimate_taken(source, index, source.numel // size * index.numel if size else 0)


@costs("aten::gather", "aten::take", "aten::take_along_dim")
def gather(signature: Signature) -> Cost:
    """Return the cost of taking one element for each index (aten::gather: index 2; aten::take: index 1)."""
    source = signature.need(0, "self")
    index = signature.tensor(2) or signature.need(1, "index")
    return _estimate_taken(source, index, index.numel)


@costs("aten::index", "aten::_unsafe_index", generic=False)
def index(signature: Signature) -> Cost:
    """Return the cost of advanced indexing, known only where the call has an `out=` tensor: torch records no shapes of the indices."""
    source, out = signature.need(0, "self"), signature.output(2)
    require(out is not None, "torch records no shapes for the list of indices, so the result's size is unknown")
    return Cost(bytes=2 * out.distinct_bytes if out else source.distinct_bytes, provenance="derived")


def estimate_index_by_view(own: Signature, view: Signature) -> Cost:
    """Estimate the cost of aten::index by the aten::as_strided inside it: the source seen in the shape of the result, with stride 0 where
    the indices decide (restride_src of TensorAdvancedIndexing.cpp). The indices' own bytes are not recorded (`derived`)."""
    source = own.need(0, "self")
    shape, strides = (view.integers(at, "size and stride of the view (Concrete Inputs)") for at in (1, 2))
    require(0 in strides and all(size >= 0 for size in shape), "the view inside is not that of the indexed source")
    taken = prod(shape)
    return Cost(bytes=size_of(min(taken, source.numel) + taken, source.dtype), provenance="derived")


@costs("aten::_index_put_impl_", "aten::index_put_")
def index_put(signature: Signature) -> Cost:
    """Return the cost of writing values (2) at indices: values read and written, with accumulate (3) also what was there.

    The index tensors' shapes are not recorded, so their bytes are missing (`derived`).
    """
    target, values = signature.need(0, "self"), signature.need(2, "values")
    accumulate = isinstance(signature.value(3), bool) and signature.flag(3, "accumulate")
    touched = size_of(min(values.numel, target.numel), target.dtype)
    moved = values.distinct_bytes + touched * (2 if accumulate else 1)
    return Cost(vector_flops=values.numel if accumulate else 0, bytes=moved, provenance="derived")


def _estimate_update(signature: Signature, source: Input, index: Input, in_place: bool, adds: bool) -> Cost:
    """Estimate the cost of updating self from `source`: touched elements read (when added to) and written, or all of self copied."""
    target = signature.need(0, "self")
    touched = size_of(min(source.numel, target.numel), target.dtype) * (2 if adds else 1)
    whole = target.distinct_bytes + size_of(target.numel, target.dtype)
    moved = source.distinct_bytes + index.distinct_bytes + (touched if in_place else whole)
    return Cost(vector_flops=source.numel if adds else 0, bytes=moved)


_UPDATES = (
    ("index_add", True), ("index_copy", False), ("index_reduce", True), ("scatter_add", True), ("scatter", False), ("scatter_reduce", True),
)  # fmt: skip


def estimate_scatter(signature: Signature, adds: bool, in_place: bool) -> Cost:
    """Estimate the cost of updating self at an index (2) from a source (3), or from one number."""
    index, source = signature.need(2, "index"), signature.tensor(3)
    if source is None:  # as many elements as indices, none of them read (stride 0)
        source = Input(dtype=signature.need(0, "self").dtype, shape=index.shape, strides=(0,) * len(index.shape))
    return _estimate_update(signature, source, index, in_place, adds)


for _name, _adds in _UPDATES:
    costs(f"aten::{_name}_", adds=_adds, in_place=True)(estimate_scatter)
    costs(f"aten::{_name}", adds=_adds, in_place=False)(estimate_scatter)


def estimate_index_fill(signature: Signature, in_place: bool) -> Cost:
    """Estimate the bytes of overwriting slices (dim 1, index 2) with one number, in self or in a copy of it."""
    target, index = signature.need(0, "self"), signature.need(2, "index")
    dim, rank = signature.value(1), len(target.shape)
    require(type(dim) is int and -rank <= dim < rank, "dim was not recorded (Concrete Inputs)")
    size = target.shape[dim] if type(dim) is int else 0
    written = min(target.numel // size * index.numel, target.numel) if size else 0
    whole = target.distinct_bytes + size_of(target.numel, target.dtype)
    return Cost(bytes=index.distinct_bytes + (size_of(written, target.dtype) if in_place else whole))


costs("aten::index_fill_", in_place=True)(estimate_index_fill)
costs("aten::index_fill", in_place=False)(estimate_index_fill)


@costs("aten::put_")
def put_(signature: Signature) -> Cost:
    """Return the cost of writing elements at flat positions (index 1, source 2, accumulate 3)."""
    adds = isinstance(signature.value(3), bool) and signature.flag(3, "accumulate")
    return _estimate_update(signature, signature.need(2, "source"), signature.need(1, "index"), in_place=True, adds=adds)


@costs("aten::masked_scatter_", "aten::masked_scatter")
def masked_scatter(signature: Signature) -> Cost:
    """Return the bytes of filling masked places from `source` in order: mask and source read, as much written (`derived`: all fits)."""
    target, mask, source = signature.need_all("self", "mask", "source")
    return Cost(bytes=mask.distinct_bytes + 2 * size_of(min(source.numel, target.numel), target.dtype), provenance="derived")


# how much is selected, and how many positions are written, depends on the data and is not counted
register_flows(
    {
        "aten::masked_select": Flow(reads=(0, 1), writes=(), per=1, required=(0,), provenance="derived"),
        "aten::nonzero aten::nonzero_static": Flow(reads=(0,), writes=(), provenance="derived"),
    }
)

INDEX_BYTES = 8
"""Bytes of one index of a COO tensor: int64 (torch.sparse_coo_tensor)."""

_UNKNOWN_ROWS = "how many values a sparse operand holds is not recorded"

_SPARSE_SUMS = frozenset(f"aten::{name}" for name in split_names("add add_ sub sub_"))
_ON_VALUES = frozenset(f"aten::{name}" for name in split_names("clone copy_ norm sum"))
_REARRANGED = ("aten::_coalesce", "aten::sparse_mask")

ON_ROWS = frozenset(
    {*_SPARSE_SUMS, *_ON_VALUES, *_REARRANGED, *(f"aten::{name}" for name in POINTWISE), *(f"aten::{name}_" for name in POINTWISE)}
)
"""Ops that work on the rows which a sparse operand holds, and on as many of a dense one."""


class HeldRows(msgspec.Struct, frozen=True):
    """The rows that the calls inside one call work on: the first count (an operand's), the largest and the smallest (a result's)."""

    first: int
    largest: int
    smallest: int


def find_sparse_size(signature: Signature) -> Shape | None:
    """Find the size that the first sparse operand stands for; None where there is none, or no dimension besides its rows."""
    found = next((item.shape for item in signature.inputs if is_sparse_tensor(item)), ())
    return found if len(found) >= 2 else None


def count_rows_inside(size: Shape, name: str, call: Signature) -> tuple[int | None, bool]:
    """Return (rows of a sparse tensor of `size` that the first fitting operand of a call of `name` inside records; whether one fits but
    has as many rows as `size`: the rows, or a dense operand). The values have the other dimensions of `size`, the indices are [1, rows].
    """
    if name == "aten::resize_":
        return None, False  # an empty tensor that is about to get its size
    length = call.value(3) if name == "aten::narrow" else None  # coalescing cuts its result to the distinct rows
    if type(length) is int and 0 <= length <= LARGEST and find_sparse_size(call) is None:
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


def estimate_sparse_cost(name: str, signature: Signature, held: HeldRows) -> Cost:
    """Estimate the cost of op `name` on the rows `held`; raises NotModelledError where the op is none of ON_ROWS."""
    size = find_sparse_size(signature)
    if size is None or name not in ON_ROWS:
        raise NotModelledError(_UNKNOWN_ROWS)
    dtype = next((item.dtype for item in signature.inputs if is_sparse_tensor(item)), None)
    row, row_bytes = prod(size[1:]), size_of(prod(size[1:]), dtype)
    if name in _SPARSE_SUMS:
        first = signature.tensor(0)
        if first is None or is_sparse_tensor(first):  # two sparse tensors joined
            moved = 2 * (row_bytes + INDEX_BYTES) * held.largest
            return Cost(vector_flops=held.largest * row, bytes=moved, provenance="derived")
        # rows added to a dense tensor: touched rows read and written
        touched = min(held.first, size[0]) * size_of(row, first.dtype)
        return Cost(vector_flops=held.first * row, bytes=(row_bytes + INDEX_BYTES) * held.first + 2 * touched, provenance="derived")
    if name == "aten::_coalesce":
        moved = (row_bytes + INDEX_BYTES) * (held.first + held.smallest)
        return Cost(vector_flops=held.first * row, bytes=moved, provenance="derived")
    if name == "aten::sparse_mask":
        return Cost(bytes=(2 * row_bytes + INDEX_BYTES) * held.first, provenance="derived")
    # tensors of `size`, and a result that has no size yet, stand for as many rows as are held
    shape = (held.first, *size[1:])
    inputs = (
        msgspec.structs.replace(item, shape=shape, strides=None) if item.is_tensor and item.shape in (size, (0,)) else item
        for item in signature.inputs
    )
    return msgspec.structs.replace(FORMULAS[name](Signature(tuple(inputs))), provenance="derived")


# without the calls inside nothing tells how many rows there are
costs(*_REARRANGED, generic=False, reason=_UNKNOWN_ROWS)(reject)
