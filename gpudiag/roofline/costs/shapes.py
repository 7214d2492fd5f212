"""Shapes and dtypes of results by torch's rules, and the bytes of tensors that were not recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from gpudiag.model.signature import ITEM_BYTES, Input, Shape

# Order of torch's type promotion: categories first, size within. Source: PyTorch docs, "Tensor Attributes".
_CATEGORY = {"bool": 0, "uint8": 1, "int8": 1, "int16": 1, "int32": 1, "int64": 1, "complex64": 3, "complex128": 3}
_WIDTH = {
    "bool": 0, "uint8": 1, "int8": 1, "int16": 2, "int32": 3, "int64": 4, "fp4": 4, "fp8": 5, "fp16": 6, "bf16": 6, "fp32": 7,
    "fp64": 8, "complex64": 9, "complex128": 10,
}  # fmt: skip
_FLOATING = 2


def category(dtype: str) -> int:
    """Return 0 for bool, 1 for integers, 2 for floating point, 3 for complex."""
    return _CATEGORY.get(dtype, _FLOATING)


def _wider(first: str, second: str) -> str:
    if {first, second} == {"fp16", "bf16"}:
        return "fp32"
    return max((first, second), key=lambda dtype: (category(dtype), _WIDTH.get(dtype, 0)))


def _joined(dtypes: Iterable[str]) -> str:
    result = ""
    for dtype in dtypes:
        result = _wider(result, dtype) if result else dtype
    return result


def promoted(inputs: Sequence[Input]) -> str:
    """Return the dtype of the result of an element-wise op ('' where no input is a tensor).

    Tensors with dimensions decide; a zero-dimensional one (also a Python number) counts only where its category is higher, and a
    Python float beside integers then gives the default dtype fp32.
    """
    solid = _joined(item.dtype for item in inputs if item.dtype and item.shape)
    loose = _joined(item.dtype for item in inputs if item.dtype and not item.shape)
    if not solid or not loose:
        return solid or loose
    if category(loose) <= category(solid):
        return solid
    return "fp32" if loose == "fp64" else loose


def broadcast(shapes: Iterable[Shape]) -> Shape | None:
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


def reduced(shape: Shape, dims: Sequence[int]) -> int | None:
    """Return the number of elements left when `dims` are reduced (all where empty); None where a dimension does not exist."""
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


def read_bytes(inputs: Iterable[Input | None]) -> int:
    """Return the bytes of the distinct elements of all tensors given (None is skipped)."""
    return sum(item.distinct_bytes for item in inputs if item is not None)
