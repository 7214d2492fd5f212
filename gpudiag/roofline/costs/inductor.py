"""Kernels that Inductor generated (fused, Triton templates): the ops that their names hold, and their cost from their operands.

Fused kernels. Bytes: each operand at its own width, read once and written once. FLOP: the operations an element of each fused op (the
constants of elementwise.py and reductions.py; norms and softmax as in op_costs sections 4 and 5) times the points of the kernel's loops.
Intermediate values stay in registers. Names: `get_fused_kernel_name` in torch/_inductor/utils.py joins the sorted original operators with
'_'.

Templates (`triton_tem_*`). FLOP: 2 m n k (op_costs section 1) and 2 * results * (C/groups) * window (section 2). Bytes: each operand once.

Plain traces: torch 2.2 and newer record a call as an op named like the kernel, with every argument of the kernel in its order
(in_out_ptr*, in_ptr*, out_ptr*, sizes; `KernelArgs.python_argdefs` in torch/_inductor/codegen/common.py); the sizes of the loops are the
last plain integers (xnumel, or ynumel and xnumel, or xnumel and r0_numel). Results are among the arguments, so nothing is added for them.
What is read, written or both is not recorded; a result in place of the first argument is seen where the last argument cannot be a result
(see `in_place`).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from operator import mul
from typing import NamedTuple

from gpudiag.model.finding import Missing
from gpudiag.model.ops import ITEM_BYTES, Cost, Input, Provenance, Shape, Signature
from gpudiag.roofline.costs import elementwise, reductions
from gpudiag.roofline.costs.registry import FORMULAS, VIEWS, WRAPPERS, split_names

_KERNEL_NAME = re.compile(r"(?:triton|cpp)_(?:([a-z]{3})_)?fused(?:_(.*?))??(?:_\d+)?")

MAX_NAME = 2000
"""Longer names are no names of Inductor (ten ops at most, config.kernel_name_max_ops)."""

MOVES = frozenset(
    split_names(
        """
        _to_copy to clone copy cat stack index index_select select_scatter slice_scatter diagonal_scatter as_strided_scatter gather
        embedding constant_pad_nd pad reflection_pad1d reflection_pad2d replication_pad2d convert_element_type full fill zeros ones
        zeros_like ones_like full_like new_zeros new_full new_ones arange iota flip roll repeat expand_copy scalar_tensor lift_fresh_copy
        _unsafe_index _unsafe_masked_index empty getitem contiguous slice_backward select_backward permute_copy tril triu
        device_put _local_scalar_dense upsample_nearest2d
        """
    )
)
"""Ops that move elements and compute nothing."""

_OPERATIONS = {
    **dict.fromkeys(split_names("native_layer_norm layer_norm native_group_norm group_norm native_batch_norm cudnn_batch_norm"), 8),
    **dict.fromkeys(split_names("miopen_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional batch_norm"), 8),
    **dict.fromkeys(split_names("_native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update"), 8),
    **dict.fromkeys(split_names("native_layer_norm_backward native_group_norm_backward native_batch_norm_backward"), 14),
    **dict.fromkeys(split_names("cudnn_batch_norm_backward miopen_batch_norm_backward batch_norm_backward"), 14),
    **dict.fromkeys(split_names("_fused_rms_norm rms_norm"), 4),
    "_fused_rms_norm_backward": 10,
    **dict.fromkeys(split_names("_softmax _log_softmax softmax log_softmax _safe_softmax"), 5),
    **dict.fromkeys(split_names("_softmax_backward_data _log_softmax_backward_data"), 4),
    **dict.fromkeys(split_names("native_dropout dropout mse_loss smooth_l1_loss huber_loss"), 2),
    "binary_cross_entropy_with_logits": 10,
}

# Original operators of compiled graphs that have no formula of their own here.
_OTHER_OPS = split_names(
    """
    bernoulli rand randn randint inductor_random inductor_seeds inductor_lookup_seed embedding_dense_backward index_put scatter scatter_add
    scatter_reduce masked_fill where convolution convolution_backward mm addmm bmm baddbmm linear _scaled_mm gelu_backward
    nll_loss_forward nll_loss_backward nll_loss2d_forward max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d
    avg_pool2d_backward adaptive_avg_pool2d _adaptive_avg_pool2d _adaptive_avg_pool2d_backward masked_fill unfold glu
    _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention_backward flex_attention flex_attention_backward
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    _foreach_add _foreach_mul _foreach_lerp _foreach_addcmul _foreach_addcdiv _foreach_sqrt _foreach_div _foreach_sub _foreach_pow
    """
)


class Operand(NamedTuple):
    """A tensor that a kernel is given: its shape, dtype, how often it passes the memory bus, the elements that are accessed at most."""

    shape: Shape
    dtype: str
    times: int = 1
    """1: read or written; 2: both."""
    touched: int | None = None

    @property
    def numel(self) -> int:
        """Return the elements of the tensor."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Return the bytes moved (0 for an unknown dtype)."""
        moved = self.numel if self.touched is None else min(self.numel, self.touched)
        return self.times * moved * ITEM_BYTES.get(self.dtype, 0)


def parse_kernel_name(name: str) -> tuple[str, tuple[str, ...]] | None:
    """Return (category such as 'poi', fused ops) of a generated kernel's name; None where it is no such name."""
    match = _KERNEL_NAME.fullmatch(name) if len(name) <= MAX_NAME else None
    if match is None:
        return None
    return match.group(1) or "", split_ops(match.group(2) or "")


@functools.lru_cache(maxsize=1)
def _build_vocabulary() -> frozenset[tuple[str, ...]]:
    known = {name.removeprefix("aten::") for name in (*FORMULAS, *VIEWS, *WRAPPERS) if name.startswith("aten::")}
    known |= MOVES | set(_OPERATIONS) | set(_OTHER_OPS)
    return frozenset(tuple(name.split("_")) for name in known if not name.endswith("_") or name.endswith("__"))


def split_ops(text: str) -> tuple[str, ...]:
    """Return the ops joined with '_' in `text`: the fewest unknown words, then the fewest ops (op names hold '_' themselves)."""
    parts = text.split("_") if text else []
    vocabulary = _build_vocabulary()
    longest = max(map(len, vocabulary))
    best: list[tuple[int, int, int]] = [(0, 0, 0)]  # (unknown words, ops, start of the last op) of each prefix
    for end in range(1, len(parts) + 1):
        unknown, ops, _ = best[end - 1]
        choices = [(unknown + 1, ops + 1, end - 1)]
        starts = range(max(0, end - longest), end)
        choices += [(best[start][0], best[start][1] + 1, start) for start in starts if tuple(parts[start:end]) in vocabulary]
        best.append(min(choices))
    found = []
    end = len(parts)
    while end:
        start = best[end][2]
        found.append("_".join(parts[start:end]))
        end = start
    return tuple(reversed(found))


def count_operations(op: str) -> int:
    """Return the operations an element that `op` adds to a fused kernel: 0 for views and moves, 1 where nothing else is known."""
    if op in _OPERATIONS:
        return _OPERATIONS[op]
    if op in MOVES or f"aten::{op}" in VIEWS:
        return 0
    if op in elementwise.POINTWISE:
        return elementwise.POINTWISE[op].operations
    return reductions.REDUCTIONS[op].operations if op in reductions.REDUCTIONS else 1


def estimate_fused_cost(ops: Sequence[str], operands: Sequence[Operand], points: int, provenance: Provenance) -> Cost:
    """Estimate the cost of a fused kernel whose loops have `points` points."""
    distinct = dict.fromkeys(ops)
    special = points * sum(op in elementwise.ELEMENTARY for op in distinct)
    flops = points * sum(count_operations(op) for op in distinct)
    return Cost(vector_flops=flops, bytes=sum(item.bytes for item in operands), special=special, provenance=provenance)


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm", "_int_mm", "matmul")


def estimate_template_cost(ops: Sequence[str], operands: Sequence[Operand]) -> Cost | Missing:
    """Estimate the cost of a template kernel; Missing where the operands do not tell its matrix work without doubt."""
    if any("attention" in op for op in ops):
        return Missing("a compiled attention: the blocks that its mask leaves out were not recorded")
    flops = None
    if "convolution" in ops:
        # 2 * results * (C/groups) * window of x[N, C, ...], weight[K, C/groups, window...] and a result [N, K, ...] at the end
        spatial = [item.shape for item in operands if len(item.shape) in (3, 4, 5)]
        if len(spatial) > 2 and len({len(shape) for shape in spatial}) == 1:
            x, weight, y = spatial[0], spatial[1], spatial[-1]
            fits = y[:2] == (x[0], weight[0]) and weight[1] > 0 and x[1] % weight[1] == 0
            flops = 2 * prod(y) * prod(weight[1:]) if fits else None
    elif any(op in _PRODUCTS for op in ops):
        # 2 b m n k where exactly one pair of neighbouring operands multiplies to a result of the last operand's size
        found = set()
        for left, right in pairwise(operands[:-1]):
            matrices = len(left.shape) == len(right.shape) in (2, 3) and left.numel * right.numel > 0
            fits = matrices and left.shape[-1] == right.shape[-2] and left.shape[:-2] == right.shape[:-2]
            if fits and left.numel // left.shape[-1] * right.shape[-1] == operands[-1].numel:
                found.add(2 * left.numel * right.shape[-1])
        flops = found.pop() if len(found) == 1 else None
    if flops is None:
        return Missing("a template kernel: the recorded operands do not tell the sizes of its product")
    matrix = next(item for item in operands if len(item.shape) >= 2)
    return Cost(matrix_flops=flops, bytes=sum(item.bytes for item in operands), dtype=matrix.dtype, provenance="derived")


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
    split_names(
        "embedding embedding_dense_backward index index_select index_put gather scatter scatter_add take _unsafe_index masked_select"
    )
)
"""Ops that touch at most one element of a table for each point of the loops."""

_PART = frozenset(split_names("slice select narrow slice_scatter select_scatter getitem copy as_strided diagonal unfold"))
"""Ops that leave a part of a tensor out: how much is not in the trace."""

_WRITES_ONLY = frozenset(split_names("zeros ones full arange iota rand randn randint inductor_random inductor_seeds fill scalar_tensor"))


def is_generated(name: str) -> bool:
    """Return whether `name` is that of a Triton kernel of Inductor."""
    return name.startswith("triton_")


def estimate_triton_cost(name: str, signature: Signature) -> Cost | Missing:
    """Estimate the cost of one recorded call: `derived` where the recorded sizes fit together, else `generic`; Missing without tensors.

    Templates (`tem`) have matrix FLOPs where their operands tell the sizes of the product, else no cost.
    """
    tensors = [item for item in signature.inputs if item.is_tensor]
    if not tensors:
        return Missing(NO_TENSORS)
    category, ops = parse_kernel_name(name) or ("", ())
    complete = all(item.is_tensor or not item.shape for item in signature.inputs)
    if category == "tem":
        return estimate_template_cost(ops, [_build_operand(item) for item in tensors])
    if category == "for":  # foreach: operands and results of all tensors, each an argument of its own; no sizes are passed
        cost = estimate_fused_cost((), [_build_operand(item) for item in tensors], 0, "derived" if complete else "generic")
        return Cost(vector_flops=sum(item.numel for item in tensors), bytes=cost.bytes, provenance=cost.provenance)
    points, reduction = _find_loop_points(category, tensors, signature)
    if points is None and category == "poi" and any(item.numel > max(tensors[0].numel, tensors[-1].numel) for item in tensors):
        return Missing(NO_LOOPS)
    loops = points or max(item.numel for item in tensors)
    twice = is_in_place(category, ops, tensors, loops, reduction)
    by_index, by_part = not _BY_INDEX.isdisjoint(ops), not _PART.isdisjoint(ops)
    whole, operands = complete and bool(ops) and points is not None, []
    for item in tensors:
        touched = None  # elements that the loops access at most; None: all of them
        # of a tensor that a view cuts, a point reads one element at least: no more is certain
        if points is not None and (by_index or (by_part and category == "poi") or item.numel > _MOST_LOADS * points):
            touched = points
        # whether the names of the ops say how much that is
        whole = whole and (item.numel <= loops or (not by_part and (by_index or touched is None)))
        operands.append(_build_operand(item, touched, 2 if twice and item is tensors[0] else 1))
    return estimate_fused_cost(ops or ("unknown",), operands, loops, "derived" if whole else "generic")


def _build_operand(item: Input, touched: int | None = None, times: int = 1) -> Operand:
    shape = item.shape
    if item.strides is not None and len(item.strides) == len(shape):
        shape = tuple(size for size, stride in zip(shape, item.strides, strict=True) if stride or not size)  # stride 0: one element
    return Operand(shape, item.dtype or "", times, touched)


def _find_loop_points(category: str, tensors: Sequence[Input], signature: Signature) -> tuple[int | None, int]:
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


def is_in_place(category: str, ops: Sequence[str], tensors: Sequence[Input], points: int, reduction: int) -> bool:
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
