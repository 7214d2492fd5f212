"""Copies, casts and fills (no FLOP: op_costs sections 7 and 12), gather and scatter (section 12), and work on sparse tensors of rows (the
gradient of an embedding).

The profiler records the size that a sparse tensor stands for, never the rows that it holds; those are read from the calls inside
(`count_rows_inside`), which record them as dense tensors. Every cost is `derived`: indices are int64, rows that occur twice count twice.
Source: SparseTensorMath.cpp, SparseTensor.cpp and SparseCUDATensorMath.cu of torch (add: spcadd, coalesce, sparse_mask).
"""

from __future__ import annotations

from math import ceil, prod

import msgspec

from gpudiag.model.ops import Cost, Input, NotModelledError, Shape, Signature
from gpudiag.roofline.costs.elementwise import POINTWISE
from gpudiag.roofline.costs.registry import (
    FORMULAS,
    LARGEST,
    Flow,
    costs,
    is_sparse_tensor,
    register_flows,
    reject,
    require,
    size_of,
    split_names,
)

_PADS = ("reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d", "replication_pad3d")

# Copies that write as many elements as self has; the zero fill of diag_embed is an op of its own.
_SAME_SIZE = """
    aten::clone aten::roll aten::flip aten::rot90 aten::tril aten::triu aten::diag_embed aten::view_copy aten::_reshape_copy
    aten::permute_copy aten::transpose_copy aten::t_copy aten::alias_copy aten::detach_copy aten::squeeze_copy aten::unsqueeze_copy
    aten::_reshape_alias_copy aten::view_as_real_copy aten::view_as_complex_copy aten::lift_fresh_copy
    """

register_flows(
    {
        # src read as stored, self written (and cast on the way)
        "aten::copy_": Flow(reads=(0, 1), writes=(), operations=0, required=(1,)),
        "aten::_to_copy": Flow(reads=(0,), writes=(0,), operations=0, dtype=1),
        _SAME_SIZE: Flow(reads=(0,), writes=(0,), operations=0),
        # self in place, or its parts: its distinct elements read and written
        "aten::tril_ aten::triu_": Flow(reads=(0, 0), writes=(), operations=0),
        "aten::split_with_sizes_copy aten::split_copy aten::unbind_copy fsdp::split_with_sizes_copy": Flow((0, 0), (), operations=0),
        # fills overwrite the distinct elements of self, which are not read
        "aten::fill_ aten::zero_ aten::fill aten::zero": Flow(reads=(0,), writes=(), operations=0),
        " ".join(f"aten::{name}_backward" for name in _PADS): Flow(reads=(0,), writes=(1,)),
    }
)

_LONGEST = 1e18
"""Elements; a longer range is a broken record."""

_TENSOR_OPTIONS = 4
"""dtype, layout, device, pin_memory: the last arguments of a factory; an `out=` call has the tensor alone instead."""


@costs("aten::arange")
def arange(signature: Signature) -> Cost:
    """Return the bytes of writing a range: its length by its numbers (end; start, end; start, end, step).

    An `out=` is resized only after its shape was recorded.
    """
    out = signature.output(1)
    numbers = len(signature.inputs) - (_TENSOR_OPTIONS if out is None else 1)
    values = [item.value for item in signature.inputs[: max(min(numbers, 3), 0)] if item.value is not None]
    given, length = [float(value) for value in values if isinstance(value, (int, float))], -1.0
    if given and len(given) == len(values):
        start, end = (0.0, given[0]) if len(given) == 1 else (given[0], given[1])
        step = given[2] if len(given) > 2 else 1.0
        length = (end - start) / step if step else -1.0
    known = 0 <= length < _LONGEST
    if out is not None:
        return Cost(bytes=size_of(ceil(length), out.dtype) if known else out.distinct_bytes)
    require(known, "the result's size was not recorded")
    whole = all(type(item.value) is int for item in signature.inputs[:numbers])
    return Cost(bytes=size_of(ceil(length), signature.scalar_type(numbers, "int64" if whole else "fp32")))


def estimate_sequence(signature: Signature, size_at: int = -1, dtype_at: int = -1, dtype: str = "") -> Cost:
    """Estimate the bytes of writing a sequence: the `out=` tensor's, else the number of elements asked for."""
    out = signature.output(1)
    if out is not None:
        return Cost(bytes=out.distinct_bytes)
    length = signature.integer(size_at, "the result's size")
    require(0 <= length < _LONGEST, "the result's size is none")
    return Cost(bytes=size_of(length, signature.scalar_type(dtype_at, dtype)))


# positions of torch 2.13
costs("aten::eye", "aten::tril_indices", "aten::triu_indices")(estimate_sequence)
costs("aten::linspace", size_at=2, dtype_at=3, dtype="fp32")(estimate_sequence)
costs("aten::logspace", size_at=2, dtype_at=4, dtype="fp32")(estimate_sequence)
costs("aten::randperm", size_at=0, dtype_at=1, dtype="int64")(estimate_sequence)


@costs("aten::_local_scalar_dense")
def to_host(signature: Signature) -> Cost:
    """Return the bytes of one number that the host asks for (aten::item)."""
    return Cost(bytes=signature.need(0, "self").item_bytes)


@costs("aten::constant_pad_nd", *(f"aten::{name}" for name in _PADS))
def pad(signature: Signature) -> Cost:
    """Return the bytes of padding: x read, the padded result written (pad: pairs from the last dimension backwards)."""
    x = signature.need(0, "self")
    amounts = signature.integers(1, "pad (Concrete Inputs)")
    require(len(amounts) % 2 == 0 and len(amounts) <= 2 * len(x.shape), "pad has more pairs than self has dimensions")
    shape = list(x.shape)
    for index in range(len(amounts) // 2):
        shape[-1 - index] += amounts[2 * index] + amounts[2 * index + 1]
    require(all(size >= 0 for size in shape), "pad gives a negative size")
    return Cost(bytes=x.distinct_bytes + size_of(prod(shape), x.dtype))


@costs("aten::repeat")
def repeat(signature: Signature) -> Cost:
    """Return the bytes of tiling: x read once, every repetition written."""
    x = signature.need(0, "self")
    times = signature.integers(1, "repeats (Concrete Inputs)")
    require(all(count >= 0 for count in times), "repeats is negative")
    return Cost(bytes=x.distinct_bytes + size_of(x.numel * prod(times), x.dtype))


# fsdp:: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py: gathers parameters into one buffer, and gradients for reduce-scatter
@costs(
    "aten::cat",
    "aten::_cat",
    "aten::concat",
    "aten::concatenate",
    "aten::stack",
    "aten::_stack",
    "aten::_chunk_cat",
    "aten::block_diag",
    "fsdp::chunk_cat",
    "fsdp::all_gather_copy_in",
)
def join(signature: Signature) -> Cost:
    """Return the bytes of cat and stack: every input read, the result written.

    The sizes stand in the tensor list, its dtype does not (torch records none): 4 bytes an element are assumed (`derived`), unless an
    `out=` tensor tells.
    """
    listed = signature.inputs[0].tensors if signature.inputs else None
    out = next(iter(signature.tensors(*range(1, len(signature.inputs)))), None)
    if out is not None:
        return Cost(bytes=2 * out.distinct_bytes)
    require(listed is not None, "sizes of the tensor list were not recorded")
    elements = sum(prod(shape) for shape in listed or ())
    return Cost(bytes=2 * size_of(elements, "fp32"), provenance="derived")


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
    accumulate = signature.value(3) is True
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
    adds = signature.value(3) is True
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
