"""Kernels that Inductor wrote in Triton, from a plain trace: their name and the arguments recorded with the call.

torch 2.2 and newer record a call as an op named like the kernel, with every argument of the kernel in its order (in_out_ptr*, in_ptr*,
out_ptr*, sizes; `KernelArgs.python_argdefs` in torch/_inductor/codegen/common.py); the sizes of the loops are the last plain integers
(xnumel, or ynumel and xnumel, or xnumel and r0_numel). Results are among the arguments, so nothing is added for them. What is read, written
or both is not recorded; a result in place of the first argument is seen where the last argument cannot be a result (see `in_place`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from operator import mul

from gpudiag.model.cost import Cost
from gpudiag.model.finding import Missing
from gpudiag.model.signature import Input, Signature
from gpudiag.roofline.costs.fused import MOVES, Operand, fused_cost, parse_name
from gpudiag.roofline.costs.registry import words
from gpudiag.roofline.costs.templates import template_cost

NO_TENSORS = "no tensor of this kernel was recorded (record_shapes=True)"

NO_LOOPS = (
    "the sizes of its loops were not recorded, and it is given a tensor that is larger than its result: how much is read is not known"
)

_MOST_LOADS = 125
"""Elements of one tensor that a point of the loops reads at most: larger pooling windows (5 x 5 x 5) and reductions of 8 elements are no
element-wise loops any more (torch/_inductor/lowering.py; config.unroll_reductions_threshold). Of a larger tensor they touch a part."""

_LOOPS = {"poi": (1, 2, 3), "red": (2, 3, 4), "per": (2, 3, 4)}
"""How many of the last integers are sizes of loops: x, y and z; reductions add one or two reduced dimensions."""

_BY_INDEX = frozenset(
    words("embedding embedding_dense_backward index index_select index_put gather scatter scatter_add take _unsafe_index masked_select")
)
"""Ops that touch at most one element of a table for each point of the loops."""

_PART = frozenset(words("slice select narrow slice_scatter select_scatter getitem copy as_strided diagonal unfold"))
"""Ops that leave a part of a tensor out: how much is not in the trace."""

_WRITES_ONLY = frozenset(words("zeros ones full arange iota rand randn randint inductor_random inductor_seeds fill scalar_tensor"))


def is_generated(name: str) -> bool:
    """Return whether `name` is that of a Triton kernel of Inductor."""
    return name.startswith("triton_")


def triton_cost(name: str, signature: Signature) -> Cost | Missing:
    """Return the cost of one recorded call: `derived` where the recorded sizes fit together, else `generic`; Missing without tensors.

    Templates (`tem`) have matrix FLOPs where their operands tell the sizes of the product, else no cost.
    """
    tensors = [item for item in signature.inputs if item.is_tensor]
    if not tensors:
        return Missing(NO_TENSORS)
    category, ops = parse_name(name) or ("", ())
    complete = all(item.is_tensor or not item.shape for item in signature.inputs)
    if category == "tem":
        return template_cost(ops, [_operand(item) for item in tensors])
    if category == "for":  # foreach: operands and results of all tensors, each an argument of its own; no sizes are passed
        cost = fused_cost((), [_operand(item) for item in tensors], 0, "derived" if complete else "generic")
        return Cost(vector_flops=sum(item.numel for item in tensors), bytes=cost.bytes, provenance=cost.provenance)
    points, reduction = _points(category, tensors, signature)
    if points is None and category == "poi" and any(item.numel > max(tensors[0].numel, tensors[-1].numel) for item in tensors):
        return Missing(NO_LOOPS)
    loops = points or max(item.numel for item in tensors)
    bounds = [_bound(item, ops, points) for item in tensors]
    twice = in_place(category, ops, tensors, loops, reduction)
    operands = [_operand(item, bound, 2 if twice and item is tensors[0] else 1) for item, bound in zip(tensors, bounds, strict=True)]
    whole = complete and bool(ops) and points is not None and all(_all_counted(item, ops, points) for item in tensors)
    return fused_cost(ops or ("unknown",), operands, loops, "derived" if whole else "generic")


def _bound(item: Input, ops: Sequence[str], points: int | None) -> int | None:
    """Return the elements of a tensor that loops of `points` points access at most; None: all of them."""
    if points is None:
        return None
    return points if _BY_INDEX.intersection(ops) or item.numel > _MOST_LOADS * points else None


def _all_counted(item: Input, ops: Sequence[str], points: int) -> bool:
    """Return whether the names of the ops say how much of a tensor loops of `points` points access."""
    if item.numel <= points or _PART.intersection(ops):
        return item.numel <= points
    return bool(_BY_INDEX.intersection(ops)) or item.numel <= _MOST_LOADS * points


def _operand(item: Input, touched: int | None = None, times: int = 1) -> Operand:
    shape = item.shape
    if item.strides is not None and len(item.strides) == len(shape):
        shape = tuple(size for size, stride in zip(shape, item.strides, strict=True) if stride or not size)  # stride 0: one element
    return Operand(shape, item.dtype or "", times, touched)


def _points(category: str, tensors: Sequence[Input], signature: Signature) -> tuple[int | None, int]:
    """Return (points of the loops, length of the reduction): the product of the last integers that is the size of a tensor.

    None where none fits. A reduction that was split over blocks is padded by less than one element a row.
    """
    sizes: list[int] = []
    for item in reversed(signature.inputs):
        if item.is_tensor or type(item.value) is not int or item.value < 1:
            break
        sizes.append(item.value)
    products = list(accumulate(sizes, mul))
    numels = {item.numel for item in tensors}
    for count in _LOOPS.get(category, ()):
        if count > len(products):
            break
        points, last = products[count - 1], sizes[0]
        rows = points // last if category != "poi" else 1
        if any(numel <= points < numel + rows for numel in numels):
            return points, last if category != "poi" else 1
    return None, 1


def in_place(category: str, ops: Sequence[str], tensors: Sequence[Input], points: int, reduction: int) -> bool:
    """Return whether the first argument must be read and written (Inductor's in_out_ptr0).

    Arguments in place come first and results of their own last. So the first is in place where the last cannot be the result: it is no
    result of the loops' size (a broadcast operand), or a matrix product's two-dimensional buffer where the first has the result's
    own shape; and where the kernel has one tensor only and an op that reads.
    """
    first, last = tensors[0], tensors[-1]
    if first.numel != points:
        return False
    if len(tensors) == 1:
        return bool(ops) and category == "poi" and not all(op in _WRITES_ONLY or op in MOVES for op in ops)
    if last.numel == points:
        return len(last.shape) < len(first.shape) and last.numel == first.numel
    if category == "poi":
        return prod(last.shape) < points
    return last.shape == (reduction,) and points != reduction * reduction
