"""Gather and scatter (op_costs section 12): rows or elements that an index names, plus the index itself."""

from __future__ import annotations

from math import prod

import msgspec

from gpudiag.model.cost import Cost
from gpudiag.model.signature import Input, Signature
from gpudiag.roofline.costs.arguments import flag, given_output, ints, present, tensor
from gpudiag.roofline.costs.registry import costs, require
from gpudiag.roofline.costs.shapes import size_of


def _taken(source: Input, index: Input, taken: int) -> Cost:
    """Return the bytes of reading `taken` elements (no more than there are) and the index, and of writing them."""
    return Cost(bytes=size_of(min(taken, source.numel) + taken, source.dtype) + index.distinct_bytes)


@costs("aten::index_select")
def index_select(signature: Signature) -> Cost:
    """Return the cost of taking slices along one dimension (dim 1, index 2)."""
    source, index = tensor(signature, 0, "self"), tensor(signature, 2, "index")
    dim, rank = signature.value(1, 0), len(source.shape)
    out = given_output(signature, 3)
    if out is not None:
        return _taken(source, index, out.numel)
    if signature.value(1) is None:
        return _most_taken(source, index)
    require(type(dim) is int and -rank <= dim < rank, "dim is none of self's dimensions")
    size = source.shape[dim] if type(dim) is int else 0
    return _taken(source, index, source.numel // size * index.numel if size else 0)


def _most_taken(source: Input, index: Input) -> Cost:
    """Return the cost of taking slices along a dimension that was not recorded: the first, as of rows in a table (`derived`)."""
    rows = source.shape[0] if source.shape else 0
    cost = _taken(source, index, source.numel // rows * index.numel if rows else 0)
    return msgspec.structs.replace(cost, provenance="derived")


@costs("aten::gather", "aten::take", "aten::take_along_dim")
def gather(signature: Signature) -> Cost:
    """Return the cost of taking one element for each index (aten::gather: index 2; aten::take: index 1)."""
    source = tensor(signature, 0, "self")
    index = signature.tensor(2) or tensor(signature, 1, "index")
    return _taken(source, index, index.numel)


@costs("aten::index", "aten::_unsafe_index", generic=False)
def index(signature: Signature) -> Cost:
    """Return the cost of advanced indexing, known only where the call has an `out=` tensor: torch records no shapes of the indices."""
    source, out = tensor(signature, 0, "self"), given_output(signature, 2)
    require(out is not None, "torch records no shapes for the list of indices, so the result's size is unknown")
    return Cost(bytes=2 * out.distinct_bytes if out else source.distinct_bytes, provenance="derived")


def index_by_view(own: Signature, view: Signature) -> Cost:
    """Return the cost of aten::index by the aten::as_strided inside it: the source seen in the shape of the result, with stride 0 where
    the indices decide (restride_src of TensorAdvancedIndexing.cpp). The indices' own bytes are not recorded (`derived`)."""
    source = tensor(own, 0, "self")
    shape, strides = (ints(view, at, "size and stride of the view (Concrete Inputs)") for at in (1, 2))
    require(0 in strides and all(size >= 0 for size in shape), "the view inside is not that of the indexed source")
    taken = prod(shape)
    return Cost(bytes=size_of(min(taken, source.numel) + taken, source.dtype), provenance="derived")


@costs("aten::_index_put_impl_", "aten::index_put_")
def index_put(signature: Signature) -> Cost:
    """Return the cost of writing values (2) at indices: values read and written, with accumulate (3) also what was there.

    The index tensors' shapes are not recorded, so their bytes are missing (`derived`).
    """
    target, values = tensor(signature, 0, "self"), tensor(signature, 2, "values")
    accumulate = isinstance(signature.value(3), bool) and flag(signature, 3, "accumulate")
    touched = size_of(min(values.numel, target.numel), target.dtype)
    moved = values.distinct_bytes + touched * (2 if accumulate else 1)
    return Cost(vector_flops=values.numel if accumulate else 0, bytes=moved, provenance="derived")


def _updated(signature: Signature, source: Input, index: Input, in_place: bool, adds: bool) -> Cost:
    """Return the cost of updating self from `source`: touched elements read (when added to) and written, or all of self copied."""
    target = tensor(signature, 0, "self")
    touched = size_of(min(source.numel, target.numel), target.dtype) * (2 if adds else 1)
    whole = target.distinct_bytes + size_of(target.numel, target.dtype)
    moved = source.distinct_bytes + index.distinct_bytes + (touched if in_place else whole)
    return Cost(vector_flops=source.numel if adds else 0, bytes=moved)


_UPDATES = (
    ("index_add", True), ("index_copy", False), ("index_reduce", True), ("scatter_add", True), ("scatter", False), ("scatter_reduce", True),
)  # fmt: skip


def _register() -> None:
    for name, adds in _UPDATES:
        for in_place in (True, False):

            def formula(signature: Signature, adds: bool = adds, in_place: bool = in_place) -> Cost:
                index = tensor(signature, 2, "index")
                source = next(iter(present(signature, 3)), None)
                return _updated(signature, source or index_as_value(signature, index), index, in_place, adds)

            costs(f"aten::{name}_" if in_place else f"aten::{name}")(formula)


def index_as_value(signature: Signature, index: Input) -> Input:
    """Return the source of a scatter of one number: as many elements as indices, none of them read (stride 0)."""
    target = tensor(signature, 0, "self")
    return Input(dtype=target.dtype, shape=index.shape, strides=(0,) * len(index.shape))


_register()


def _filled(signature: Signature, in_place: bool) -> Cost:
    target, index = tensor(signature, 0, "self"), tensor(signature, 2, "index")
    dim, rank = signature.value(1), len(target.shape)
    require(type(dim) is int and -rank <= dim < rank, "dim was not recorded (Concrete Inputs)")
    size = target.shape[dim] if type(dim) is int else 0
    written = min(target.numel // size * index.numel, target.numel) if size else 0
    whole = target.distinct_bytes + size_of(target.numel, target.dtype)
    return Cost(bytes=index.distinct_bytes + (size_of(written, target.dtype) if in_place else whole))


@costs("aten::index_fill_")
def index_fill_(signature: Signature) -> Cost:
    """Return the bytes of overwriting slices with one number: the index read, the slices written."""
    return _filled(signature, in_place=True)


@costs("aten::index_fill")
def index_fill(signature: Signature) -> Cost:
    """Return the bytes of the same into a copy of self."""
    return _filled(signature, in_place=False)


@costs("aten::put_")
def put_(signature: Signature) -> Cost:
    """Return the cost of writing elements at flat positions (index 1, source 2, accumulate 3)."""
    adds = isinstance(signature.value(3), bool) and flag(signature, 3, "accumulate")
    return _updated(signature, tensor(signature, 2, "source"), tensor(signature, 1, "index"), in_place=True, adds=adds)


@costs("aten::masked_select")
def masked_select(signature: Signature) -> Cost:
    """Return the bytes of reading self and mask; how much is selected depends on the data and is not counted (`derived`)."""
    source, mask = tensor(signature, 0, "self"), tensor(signature, 1, "mask")
    return Cost(vector_flops=mask.numel, bytes=source.distinct_bytes + mask.distinct_bytes, provenance="derived")


@costs("aten::masked_scatter_", "aten::masked_scatter")
def masked_scatter(signature: Signature) -> Cost:
    """Return the bytes of filling masked places from `source` in order: mask and source read, as much written (`derived`: all fits)."""
    target, mask, source = (tensor(signature, index, name) for index, name in enumerate(("self", "mask", "source")))
    return Cost(bytes=mask.distinct_bytes + 2 * size_of(min(source.numel, target.numel), target.dtype), provenance="derived")


@costs("aten::nonzero", "aten::nonzero_static")
def nonzero(signature: Signature) -> Cost:
    """Return the bytes of reading self; how many positions are written depends on the data and is not counted (`derived`)."""
    x = tensor(signature, 0, "self")
    return Cost(vector_flops=x.numel, bytes=x.distinct_bytes, provenance="derived")
