"""The recorded inputs of a call by position in the operator schema, shapes, dtypes and bytes by torch's rules, and costs that follow from
sizes alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import msgspec

from gpudiag.model.ops import ITEM_BYTES, Cost, Input, NotModelledError, Provenance, Shape, Signature
from gpudiag.roofline.costs.registry import costs

# Order of torch's type promotion: categories first, size within. Source: PyTorch docs, "Tensor Attributes".
_CATEGORY = {"bool": 0, "uint8": 1, "int8": 1, "int16": 1, "int32": 1, "int64": 1, "complex64": 3, "complex128": 3}
_WIDTH = {
    "bool": 0, "uint8": 1, "int8": 1, "int16": 2, "int32": 3, "int64": 4, "fp4": 4, "fp8": 5, "fp16": 6, "bf16": 6, "fp32": 7,
    "fp64": 8, "complex64": 9, "complex128": 10,
}  # fmt: skip
_FLOATING = 2


def find_dtype_category(dtype: str) -> int:
    """Return 0 for bool, 1 for integers, 2 for floating point, 3 for complex."""
    return _CATEGORY.get(dtype, _FLOATING)


def _join_dtypes(dtypes: Iterable[str]) -> str:
    """Return the widest of `dtypes`, '' for none; fp16 and bf16 together give fp32."""
    widest = ""
    for dtype in dtypes:
        if {widest, dtype} == {"fp16", "bf16"}:
            widest = "fp32"
        elif not widest or (find_dtype_category(dtype), _WIDTH.get(dtype, 0)) > (find_dtype_category(widest), _WIDTH.get(widest, 0)):
            widest = dtype
    return widest


def promote_dtypes(inputs: Sequence[Input]) -> str:
    """Return the dtype of the result of an element-wise op ('' where no input is a tensor).

    Tensors with dimensions decide; a zero-dimensional one (also a Python number) counts only where its category is higher, and a
    Python float beside integers then gives the default dtype fp32.
    """
    solid = _join_dtypes(item.dtype for item in inputs if item.dtype and item.shape)
    loose = _join_dtypes(item.dtype for item in inputs if item.dtype and not item.shape)
    if not solid or not loose:
        return solid or loose
    if find_dtype_category(loose) <= find_dtype_category(solid):
        return solid
    return "fp32" if loose == "fp64" else loose


def broadcast_shapes(shapes: Iterable[Shape]) -> Shape | None:
    """Return the shape to which `shapes` broadcast, None where they do not."""
    result: list[int] = []
    for shape in shapes:
        if len(shape) > len(result):
            result = [1] * (len(shape) - len(result)) + result
        for back, size in enumerate(reversed(shape), start=1):
            if result[-back] == 1:
                result[-back] = size
            elif size not in (1, result[-back]):
                return None
    return tuple(result)


def count_broadcast(inputs: Iterable[Input]) -> int:
    """Count the elements of the shape to which `inputs` broadcast; raises NotModelledError where they do not."""
    shape = broadcast_shapes(item.shape for item in inputs)
    if shape is None:
        raise NotModelledError("operand shapes do not broadcast")
    return prod(shape)


def count_reduced(shape: Shape, dims: Sequence[int]) -> int | None:
    """Count the elements left when `dims` are reduced (all where empty); None where a dimension does not exist."""
    rank = len(shape)
    if not dims:
        return 1
    if rank == 0:
        return 1 if all(dim in (0, -1) for dim in dims) else None
    if any(not -rank <= dim < rank for dim in dims):
        return None
    gone = {dim % rank for dim in dims}
    return prod(size for index, size in enumerate(shape) if index not in gone)


def size_of(numel: int, dtype: str | None) -> int:
    """Return the bytes of `numel` elements of `dtype` (0 for an unknown dtype)."""
    return numel * ITEM_BYTES.get(dtype or "", 0)


def count_read_bytes(inputs: Iterable[Input | None]) -> int:
    """Count the bytes of the distinct elements of all tensors given (None is skipped)."""
    return sum(item.distinct_bytes for item in inputs if item is not None)


_OPAQUE = ("mkldnn::", "mkl::", "onednn::", "quantized::", "aten::mkldnn_", "aten::_mkldnn_", "aten::to_dense", "aten::to_mkldnn")
"""Names of ops whose operands may be packed by a library: those have no strides either, but are dense."""


def is_sparse_tensor(item: Input) -> bool:
    """Return whether an argument is a sparse tensor (COO, CSR ...): the profiler records its sizes but no strides ([]).

    A zero-dimensional tensor has none either and is dense; strides that were not recorded at all say nothing. Source:
    torch/csrc/profiler/collection.cpp, InputOutputEncoder (strides of tensors with layout kStrided alone).
    """
    return item.is_tensor and len(item.shape) > 0 and item.strides == ()


def is_sparse(name: str, signature: Signature) -> bool:
    """Return whether an operand of op `name` is sparse. The number of values that it holds is recorded nowhere."""
    return not name.startswith(_OPAQUE) and any(is_sparse_tensor(item) for item in signature.inputs)


class Flow(msgspec.Struct, frozen=True):
    """What a call reads and writes, by position in its schema. Optional tensors that were not given are skipped among the reads."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    """Arguments that have the shape and dtype of one result each (an in-place result too)."""
    operations: int = 1
    """FLOP per element of argument `per`."""
    per: int = 0
    provenance: Provenance = "exact"
    required: tuple[int, ...] = ()
    """Further arguments without which the sizes tell nothing."""
    dtype: int | None = None
    """Position of the ScalarType that the results are written in, where it is given."""
    draws: bool = False
    """Whether a random number is drawn for each element of argument `per`."""
    beside: int = 0
    """Bytes written beside the results for each element of argument `per`: a mask, int64 positions."""
    broadcast: bool = False
    """Whether each result has the shape to which the reads broadcast, and `operations` are an element of that."""
    like: int | None = None
    """Argument whose dtype the results have, where it is not their own."""


def estimate_flow(signature: Signature, flow: Flow) -> Cost:
    """Estimate the cost of a call by its `flow`; raises NotModelledError where a size that decides was not recorded."""
    written, read = [signature.need(index, f"argument {index}") for index in flow.writes], signature.tensors(*flow.reads)
    elements, *_ = (signature.need(index, f"argument {index}").numel for index in (flow.per, *flow.required))
    elements = count_broadcast(read) if flow.broadcast else elements
    moved = count_read_bytes(read) + flow.beside * elements
    for item in written:
        dtype = item.dtype if flow.like is None else signature.need(flow.like, f"argument {flow.like}").dtype
        dtype = dtype if flow.dtype is None else signature.scalar_type(flow.dtype, dtype or "")
        moved += size_of(elements if flow.broadcast else item.numel, dtype)
    return Cost(vector_flops=flow.operations * elements, bytes=moved, provenance=flow.provenance, draws=elements * flow.draws)


def register_flows(table: Mapping[str, Flow]) -> None:
    """Register one formula for the blank-separated full schema names of each key of `table`."""
    for names, flow in table.items():
        costs(*names.split(), flow=flow)(estimate_flow)
