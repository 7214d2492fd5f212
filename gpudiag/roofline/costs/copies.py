"""Copies, casts and fills: what is read plus what is written, no FLOPs (op_costs sections 7 and 12)."""

from __future__ import annotations

from math import prod

from gpudiag.model.cost import Cost
from gpudiag.model.signature import Signature
from gpudiag.roofline.costs.arguments import given_output, ints, present, scalar_type, tensor
from gpudiag.roofline.costs.registry import costs, require
from gpudiag.roofline.costs.shapes import size_of


@costs("aten::copy_")
def copy_(signature: Signature) -> Cost:
    """Return the bytes of self.copy_(src): src read as stored, self written (and cast on the way)."""
    target, source = tensor(signature, 0, "self"), tensor(signature, 1, "src")
    return Cost(bytes=source.distinct_bytes + target.distinct_bytes)


@costs("aten::clone", "aten::roll", "aten::flip", "aten::rot90", "aten::tril", "aten::triu")
def same_size(signature: Signature) -> Cost:
    """Return the bytes of an op that writes as many elements as self has."""
    x = tensor(signature, 0, "self")
    return Cost(bytes=x.distinct_bytes + size_of(x.numel, x.dtype))


@costs("aten::tril_", "aten::triu_")
def triangle_(signature: Signature) -> Cost:
    """Return the bytes of an in-place triangle: self read and written."""
    return Cost(bytes=2 * tensor(signature, 0, "self").distinct_bytes)


@costs("aten::_to_copy")
def to_copy(signature: Signature) -> Cost:
    """Return the bytes of a cast: self read, the result written in the dtype asked for (argument 1)."""
    x = tensor(signature, 0, "self")
    return Cost(bytes=x.distinct_bytes + size_of(x.numel, scalar_type(signature, 1, x.dtype or "")))


@costs("aten::fill_", "aten::zero_")
def fill_(signature: Signature) -> Cost:
    """Return the bytes of overwriting self (which is not read)."""
    return Cost(bytes=tensor(signature, 0, "self").distinct_bytes)


@costs("aten::arange", "aten::linspace", "aten::randperm", "aten::eye")
def sequence(signature: Signature) -> Cost:
    """Return the bytes of writing a sequence; only the `out=` call records a tensor."""
    out = given_output(signature, 1)
    require(out is not None, "the result's size was not recorded")
    return Cost(bytes=out.distinct_bytes if out else 0)


@costs("aten::constant_pad_nd", "aten::reflection_pad1d", "aten::reflection_pad2d", "aten::reflection_pad3d")
def pad(signature: Signature) -> Cost:
    """Return the bytes of padding: x read, the padded result written (pad: pairs from the last dimension backwards)."""
    x = tensor(signature, 0, "self")
    amounts = ints(signature, 1, "pad (Concrete Inputs)")
    require(len(amounts) % 2 == 0 and len(amounts) <= 2 * len(x.shape), "pad has more pairs than self has dimensions")
    shape = list(x.shape)
    for index in range(len(amounts) // 2):
        shape[-1 - index] += amounts[2 * index] + amounts[2 * index + 1]
    require(all(size >= 0 for size in shape), "pad gives a negative size")
    return Cost(bytes=x.distinct_bytes + size_of(prod(shape), x.dtype))


@costs("aten::repeat")
def repeat(signature: Signature) -> Cost:
    """Return the bytes of tiling: x read once, every repetition written."""
    x = tensor(signature, 0, "self")
    times = ints(signature, 1, "repeats (Concrete Inputs)")
    require(all(count >= 0 for count in times), "repeats is negative")
    return Cost(bytes=x.distinct_bytes + size_of(x.numel * prod(times), x.dtype))


def joined(signature: Signature) -> Cost:
    """Return the bytes of cat and stack: every input read, the result written.

    torch does not record the dtype of a tensor list: known only from an `out=` tensor, else 4 bytes an element are assumed and the
    provenance is `generic`.
    """
    listed = signature.inputs[0].tensors if signature.inputs else None
    out = next(iter(present(signature, *range(1, len(signature.inputs)))), None)
    if out is not None:
        return Cost(bytes=2 * out.distinct_bytes)
    require(listed is not None, "sizes of the tensor list were not recorded")
    elements = sum(prod(shape) for shape in listed or ())
    return Cost(bytes=2 * size_of(elements, "fp32"), provenance="generic")


costs("aten::cat", "aten::_cat", "aten::concat", "aten::concatenate", "aten::stack", "aten::_stack")(joined)
