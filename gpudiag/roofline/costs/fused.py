"""A kernel that a compiler fused: which ops its name holds, and its cost from its operands.

Bytes: each operand at its own width, read once and written once. FLOP: the operations an element of each fused op (the constants of
elementwise.py and reductions.py; norms and softmax as in op_costs sections 4 and 5) times the points of the kernel's loops. Intermediate
values stay in registers. Names: `get_fused_kernel_name` in torch/_inductor/utils.py joins the sorted original operators with '_'.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

from gpudiag.model.cost import Cost, Provenance
from gpudiag.model.signature import ITEM_BYTES, Shape
from gpudiag.roofline.costs import elementwise, reductions
from gpudiag.roofline.costs.kinds import VIEWS, WRAPPERS
from gpudiag.roofline.costs.registry import FORMULAS, words

_NAME = re.compile(r"(?:triton|cpp)_(?:([a-z]{3})_)?fused(?:_(.*?))??(?:_\d+)?")

MAX_NAME = 2000
"""Longer names are no names of Inductor (ten ops at most, config.kernel_name_max_ops)."""

MOVES = frozenset(
    words(
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
    **dict.fromkeys(words("native_layer_norm layer_norm native_group_norm group_norm native_batch_norm cudnn_batch_norm"), 8),
    **dict.fromkeys(words("miopen_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional batch_norm"), 8),
    **dict.fromkeys(words("_native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update"), 8),
    **dict.fromkeys(words("native_layer_norm_backward native_group_norm_backward native_batch_norm_backward"), 14),
    **dict.fromkeys(words("cudnn_batch_norm_backward miopen_batch_norm_backward batch_norm_backward"), 14),
    **dict.fromkeys(words("_fused_rms_norm rms_norm"), 4),
    "_fused_rms_norm_backward": 10,
    **dict.fromkeys(words("_softmax _log_softmax softmax log_softmax _safe_softmax"), 5),
    **dict.fromkeys(words("_softmax_backward_data _log_softmax_backward_data"), 4),
    **dict.fromkeys(words("native_dropout dropout mse_loss smooth_l1_loss huber_loss"), 2),
    "binary_cross_entropy_with_logits": 10,
}

# Original operators of compiled graphs that have no formula of their own here.
_OTHERS = words(
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
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def bytes(self) -> int:
        """Return the bytes moved (0 for an unknown dtype)."""
        moved = self.numel if self.touched is None else min(self.numel, self.touched)
        return self.times * moved * ITEM_BYTES.get(self.dtype, 0)


def parse_name(name: str) -> tuple[str, tuple[str, ...]] | None:
    """Return (category such as 'poi', fused ops) of a generated kernel's name; None where it is no such name."""
    match = _NAME.fullmatch(name) if len(name) <= MAX_NAME else None
    if match is None:
        return None
    return match.group(1) or "", split_ops(match.group(2) or "")


@functools.lru_cache(maxsize=1)
def _vocabulary() -> frozenset[tuple[str, ...]]:
    known = {name.removeprefix("aten::") for name in (*FORMULAS, *VIEWS, *WRAPPERS) if name.startswith("aten::")}
    known |= MOVES | set(_OPERATIONS) | set(_OTHERS)
    return frozenset(tuple(name.split("_")) for name in known if not name.endswith("_") or name.endswith("__"))


def split_ops(text: str) -> tuple[str, ...]:
    """Return the ops joined with '_' in `text`: the fewest unknown words, then the fewest ops (op names hold '_' themselves)."""
    parts = text.split("_") if text else []
    vocabulary = _vocabulary()
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


def operations(op: str) -> int:
    """Return the operations an element that `op` adds to a fused kernel: 0 for views and moves, 1 where nothing else is known."""
    if op in _OPERATIONS:
        return _OPERATIONS[op]
    if op in MOVES or f"aten::{op}" in VIEWS:
        return 0
    if op in elementwise.TABLE:
        return elementwise.TABLE[op].operations
    return reductions.TABLE[op].operations if op in reductions.TABLE else 1


def fused_cost(ops: Sequence[str], operands: Sequence[Operand], points: int, provenance: Provenance) -> Cost:
    """Return the cost of a fused kernel whose loops have `points` points."""
    per_point = sum(operations(op) for op in dict.fromkeys(ops))
    return Cost(vector_flops=per_point * points, bytes=sum(item.bytes for item in operands), provenance=provenance)
