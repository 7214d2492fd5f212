"""Copies, casts and fills: what is read plus what is written, no FLOPs (op_costs sections 7 and 12)."""

from __future__ import annotations

from math import ceil, prod

from gpudiag.model.ops import Cost, Signature
from gpudiag.roofline.costs.arguments import Flow, register_flows, size_of
from gpudiag.roofline.costs.registry import costs, require

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
