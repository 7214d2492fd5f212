"""Typed access to the recorded inputs of a call, by position in the operator schema. What is absent raises NotModelledError."""

from __future__ import annotations

from gpudiag.model.signature import Input, Shape, Signature
from gpudiag.roofline.costs.registry import NotModelledError, require

# c10::ScalarType as "Concrete Inputs" writes it (a number) -> our dtype name. Source: c10/core/ScalarType.h (torch 2.13).
SCALAR_TYPES = {
    0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "fp16", 6: "fp32", 7: "fp64", 9: "complex64", 10: "complex128",
    11: "bool", 15: "bf16", 23: "fp8", 24: "fp8", 25: "fp8", 26: "fp8", 44: "fp8", 45: "fp4",
}  # fmt: skip


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


def tensor(signature: Signature, index: int, what: str) -> Input:
    """Return the tensor at `index`; raises NotModelledError where there is none."""
    found = signature.tensor(index)
    if found is None:
        raise NotModelledError(f"shape or dtype of {what} was not recorded")
    return found


def present(signature: Signature, *indices: int) -> list[Input]:
    """Return the tensors among `indices` (optional tensors that were given)."""
    return [found for index in indices if (found := signature.tensor(index)) is not None]


def integer(signature: Signature, index: int, what: str) -> int:
    """Return the integer at `index`; raises NotModelledError where there is none."""
    value = signature.value(index)
    if type(value) is not int:
        raise NotModelledError(f"{what} was not recorded")
    return value


def flag(signature: Signature, index: int, what: str) -> bool:
    """Return the boolean at `index`; raises NotModelledError where there is none."""
    value = signature.value(index)
    if not isinstance(value, bool):
        raise NotModelledError(f"{what} was not recorded")
    return value


def flags(signature: Signature, index: int, what: str) -> tuple[bool, ...]:
    """Return the list of booleans at `index` (such as an output mask); raises NotModelledError where there is none."""
    value = signature.value(index)
    if not isinstance(value, tuple) or not value or not all(isinstance(item, bool) for item in value):
        raise NotModelledError(f"{what} was not recorded")
    return tuple(bool(item) for item in value)


def ints(signature: Signature, index: int, what: str, rank: int | None = None) -> Shape:
    """Return the list of integers at `index`; with `rank`, one number stands for all dimensions, as in torch.

    Raises NotModelledError where there is no such list or it has another length.
    """
    value = signature.value(index)
    items = value if isinstance(value, tuple) else (value,)
    numbers = tuple(item for item in items if type(item) is int)
    if len(numbers) != len(items):
        raise NotModelledError(f"{what} was not recorded")
    if rank is not None and len(numbers) == 1:
        numbers *= rank
    require(rank is None or len(numbers) == rank, f"{what} has {len(numbers)} entries for {rank} dimensions")
    return numbers


def scalar_type(signature: Signature, index: int, default: str) -> str:
    """Return the dtype that argument `index` (ScalarType) names, or `default` where it was None or not recorded."""
    value = signature.value(index)
    return SCALAR_TYPES.get(value, default) if type(value) is int else default


def given_output(signature: Signature, functional: int) -> Input | None:
    """Return the tensor of an `out=` call: a tensor behind the `functional` arguments of the plain schema; None: a plain call."""
    last = len(signature.inputs) - 1
    return signature.tensor(last) if last >= functional else None
