"""Fused attention, forward and backward (op_costs section 3; flash-attention benchmarks/benchmark_flash_attention.py).

Forward: two products, 2 * B*H*pairs * (Dqk + Dv) FLOP; backward: five (scores again, dV, dP, dQ, dK), 2 * B*H*pairs * (3 Dqk + 2 Dv).
Pairs are discounted where the mask is causal (attention_shapes). Bytes: q, k, v, the result, a given mask or bias, and the fp32
log-sum-exp; scores never reach memory. The softmax's vector FLOPs are not charged: no peak of the exponential units is tabulated.

Alignment of the causal triangle when Sq != Sk: aten SDPA ops, cuDNN and the CPU kernel: top-left (torch's is_causal). aten flash ops
and flash_attn: bottom-right (flash-attention >= 2.1; SDPA itself never picks flash for a non-square causal call). Efficient attention
says it by number: 1 top-left, 2 bottom-right.

Schemas of libraries: torch/nn/attention/varlen.py (torch 2.13); flash_attn/flash_attn_interface.py (flash-attention 2.7) and
hopper/flash_api.cpp (3); vLLM's fork, csrc/flash_attn/flash_api_torch_lib.cpp; xFormers xformers/csrc/attention/attention.cpp and
xformers/ops/fmha/flash.py; AITER aiter/ops/mha.py; segment_anything_fast/flash_4.py.
"""

from __future__ import annotations

from math import prod
from typing import Literal

import msgspec

from gpudiag.model.ops import Cost, Input, NotModelledError, Provenance, Signature
from gpudiag.roofline.costs.gemm import build_matrix_cost
from gpudiag.roofline.costs.registry import backward_costs, costs, count_read_bytes, require, size_of

Mask = Literal["none", "top_left", "bottom_right"]
"""Alignment of the causal triangle when queries and keys differ in number: query i sees keys up to i (top_left), or the last query
sees all keys (bottom_right). torch's is_causal is top_left; flash-attention >= 2.1 is bottom_right."""

_MISFIT = "query, key and value shapes do not fit attention"

PAGED = "a cache holds the keys: how many of them each query sees was not recorded"


Dimensions = Literal["heads_first", "length_first"]
"""[batch, heads, length, dim] (torch SDPA; leading dimensions fold into the batch) or [batch, length, heads, dim] (flash-attention,
xFormers)."""


def count_pairs_twice(queries: int, keys: int, mask: Mask, window: int | None = None) -> int:
    """Return twice the number of (query, key) pairs that are computed (twice, so that half of an odd count stays whole).

    causal: sum over queries i of min(keys, i + keys - queries) for bottom_right, of min(keys, i) for top_left; square: exactly half of
    all pairs (the convention of flash-attention's benchmark). `window` keys per query (sliding window): queries * window (op_costs
    section 3), less the triangle of what the first queries of a causal one lack.
    """
    if window is not None and 0 < window < keys:
        short = 0 if mask == "none" else max(window - 1 - (max(keys - queries, 0) if mask == "bottom_right" else 0), 0)
        short, left = min(short, queries), max(short - queries, 0)  # queries that lack keys; what the last of them lacks
        return 2 * queries * window - short * (short + 1 + 2 * left)
    if mask == "none":
        return 2 * queries * keys
    if queries == keys:
        return queries * keys
    shorter = min(queries, keys)
    triangle = shorter * (shorter + 1)
    if mask == "top_left":
        return triangle + 2 * max(queries - keys, 0) * keys
    return triangle if queries > keys else 2 * queries * keys - queries * (queries - 1)


class Packing(msgspec.Struct, frozen=True):
    """How sequences are packed: their number, the longest queries and keys, and the sliding window if there is one."""

    sequences: int
    longest: tuple[int, int]
    window: int | None = None


def count_window_keys(left: object, right: object, causal: bool) -> int | None:
    """Return how many keys a query sees in a sliding window (left + itself + right), None where a needed side has no limit."""
    if type(left) is not int or left < 0:
        return None
    if causal:
        return left + 1
    return left + 1 + right if type(right) is int and right >= 0 else None


_LSE = 4  # bytes of one fp32 log-sum-exp


def read_query_key_value(signature: Signature, first: int) -> tuple[Input, Input, Input]:
    """Return query, key and value, the first at `first`; raises NotModelledError where one was not recorded."""
    query, key, value = (signature.need(first + i, name) for i, name in enumerate(("query", "key", "value")))
    return query, key, value


def estimate_dense(
    dimensions: Dimensions, qkv: tuple[Input, Input, Input], mask: Mask, others: list[Input], window: int | None = None,
    *, lse: bool = True, backwards: bool = False,
) -> Cost:  # fmt: skip
    """Estimate the cost of a fused forward (`lse`: the log-sum-exp is written) or backward.

    `others`: a bias, and out and grad_out of a backward, which are read beside q, k, v and (by a backward) the log-sum-exp.
    """
    q, k, v = qkv
    if dimensions == "heads_first":
        require(min(len(q.shape), len(k.shape), len(v.shape)) >= 3, _MISFIT)
        batch, heads, kv_heads, queries, keys = prod(q.shape[:-3]), q.shape[-3], k.shape[-3], q.shape[-2], k.shape[-2]
    else:
        require(len(q.shape) == len(k.shape) == len(v.shape) == 4, _MISFIT)
        batch, heads, kv_heads, queries, keys = q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1]
    require(kv_heads == heads or (0 < kv_heads < heads and heads % kv_heads == 0), _MISFIT)  # GQA and MQA: fewer
    width, value_width, rows = q.shape[-1], v.shape[-1], batch * heads
    twice = rows * count_pairs_twice(queries, keys, mask, window)
    moved = count_read_bytes((q, k, v, *others)) + (_LSE * rows * queries if lse or backwards else 0)
    moved += sum(size_of(item.numel, item.dtype) for item in qkv) if backwards else size_of(rows * queries * value_width, q.dtype)
    cost = build_matrix_cost(twice * (3 * width + 2 * value_width if backwards else width + value_width), q.dtype, moved)
    again = build_matrix_cost(twice * width, q.dtype, 0).matrix_flops // 2 if backwards else 0
    return Cost(matrix_flops=cost.matrix_flops // 2, bytes=moved, dtype=cost.dtype, recompute_flops=again)


def estimate_varlen(qkv: tuple[Input, Input, Input], packing: Packing, mask: Mask, others: list[Input], backwards: bool) -> Cost:
    """Estimate the cost of packed sequences [total, heads, dim], as if all were equally long (`derived`).

    The lengths stand in the cu_seqlens tensor, which a trace does not hold; its size tells how many there are. Equal lengths give the least
    FLOPs; they are exact where the longest sequences fill the total. The bytes are exact.
    """
    # the memory-efficient kernels pack as [1, total, heads, dim]
    q, k, v = ((Input(dtype=item.dtype, shape=item.shape[1:]) if len(item.shape) == 4 and item.shape[0] == 1 else item) for item in qkv)
    if not len(q.shape) == len(k.shape) == len(v.shape) == 3 or packing.sequences <= 0:
        raise NotModelledError("packed query, key and value have no [total, heads, dim] shapes")
    dims = 3 * q.shape[2] + 2 * v.shape[2] if backwards else q.shape[2] + v.shape[2]
    rows = q.shape[0] * q.shape[1]
    written = 2 * sum(item.numel * item.item_bytes for item in qkv) if backwards else size_of(rows * v.shape[2], q.dtype)
    moved = count_read_bytes((q, k, v, *others)) + written + _LSE * rows
    queries, keys = q.shape[0] / packing.sequences, k.shape[0] / packing.sequences
    filled = (queries, keys) == packing.longest
    window = packing.window
    if queries == int(queries) and keys == int(keys):
        mean_pairs = count_pairs_twice(int(queries), int(keys), mask, window) / 2
    elif window is not None and 0 < window < keys and queries >= 1:
        mean_pairs = queries / int(queries) * count_pairs_twice(int(queries), int(keys), mask, window) / 2
    else:
        mean_pairs = queries * keys / (1 if mask == "none" else 2)
    pairs = packing.sequences * q.shape[1] * mean_pairs
    again = round(2 * pairs * q.shape[2]) if backwards else 0
    flops = round(2 * pairs * dims)
    provenance: Provenance = "exact" if filled else "derived"
    return Cost(matrix_flops=flops, bytes=moved, dtype=q.dtype or "", provenance=provenance, recompute_flops=again)


class AttentionLayout(msgspec.Struct, frozen=True):
    """Positions of an attention op's arguments in its schema."""

    causal: int | None
    """is_causal; None: no mask."""
    aligned: Mask = "top_left"
    """How the causal triangle lies."""
    dense: Dimensions | None = "heads_first"
    """How tensors of dense calls are laid out; None: all calls are packed."""
    query: int = 0
    """Key and value follow it."""
    others: tuple[int, ...] = ()
    """Further tensors that are read: a bias; of a backward out and its gradient."""
    lse: int | bool = True
    """Whether the log-sum-exp is written, or the position of the flag that says it."""
    window: int | None = None
    """Keys to the left in a sliding window, with those to the right behind it, or both in one list."""
    ends: int | None = None
    """cu_seqlens of the queries: there in packed calls."""
    longest: int = -1
    """max_q, with max_k behind it."""
    backward: bool = False
    flat: bool = False
    """cu_seqlens may be there in dense calls too: packed ones have three dimensions."""
    untold: tuple[int, ...] = ()
    """Tensors with which the sizes of the others do not tell the work: used lengths, page tables, a second query."""


def estimate_attention(signature: Signature, layout: AttentionLayout, *, of_forward: bool = False) -> Cost:
    """Estimate the cost of a fused attention whose arguments stand where `layout` says.

    `of_forward`: that of its backward, which reads result and gradient too, by the inputs of a packed forward.
    """
    require(not signature.tensors(*layout.untold), PAGED)
    mask: Mask = "none"
    if layout.causal is not None and signature.flag(layout.causal, "is_causal (Concrete Inputs)"):
        mask = layout.aligned
    qkv, others = read_query_key_value(signature, layout.query), signature.tensors(*layout.others)
    if of_forward:
        others += 2 * [Input(dtype=qkv[0].dtype, shape=(*qkv[0].shape[:-1], qkv[2].shape[-1]))]
    window = None
    if layout.window is not None:
        sides = signature.value(layout.window)
        left, right = sides if isinstance(sides, tuple) and len(sides) == 2 else (sides, signature.value(layout.window + 1))
        window = count_window_keys(left, right, mask != "none")
    given = layout.ends is not None and signature.tensor(layout.ends) is not None and (not layout.flat or len(qkv[0].shape) == 3)
    if layout.ends is not None and (given or layout.dense is None):
        longest = (signature.integer(layout.longest, "max_q"), signature.integer(layout.longest + 1, "max_k"))
        packing = Packing(signature.need(layout.ends, "cu_seqlens").numel - 1, longest, window)
        return estimate_varlen(qkv, packing, mask, others, layout.backward or of_forward)
    lse = layout.lse if isinstance(layout.lse, bool) else signature.flag(layout.lse, "compute_log_sumexp")
    return estimate_dense(layout.dense or "length_first", qkv, mask, others, window, lse=lse, backwards=layout.backward)


_TORCH_VARLEN = AttentionLayout(7, "bottom_right", None, window=9, ends=3, longest=5)
_FLASH_VARLEN = AttentionLayout(9, "bottom_right", None, window=10, ends=3, longest=5)
_FLASH = AttentionLayout(8, "bottom_right", "length_first", window=11, ends=3, longest=5)
_FLASH_3 = AttentionLayout(24, "bottom_right", "length_first", window=25, ends=7, longest=12, untold=(3, 5, 10, 11, 14))
_WITH_LSE_FLAG = AttentionLayout(6, others=(3,), lse=4)
_CUDNN_BACKWARD = AttentionLayout(14, query=1, others=(0, 4, 8), ends=9, longest=11, backward=True)

ATTENTION_LAYOUTS: dict[str, AttentionLayout] = {
    # as a fused kernel would have it; the children carry the cost wherever they are recorded
    "aten::scaled_dot_product_attention": AttentionLayout(5, others=(3,), lse=False),
    "aten::_scaled_dot_product_flash_attention": AttentionLayout(4, "bottom_right"),
    "aten::_scaled_dot_product_flash_attention_for_cpu": AttentionLayout(4, others=(5,)),
    "aten::_scaled_dot_product_fused_attention_overrideable": AttentionLayout(5, others=(3,)),
    "aten::_scaled_dot_product_efficient_attention": _WITH_LSE_FLAG,
    "aten::_scaled_dot_product_cudnn_attention": _WITH_LSE_FLAG,
    "aten::_cudnn_attention_forward": AttentionLayout(10, others=(3,), lse=8, ends=4, longest=6),
    # into a given tensor, which stands before the query (cuDNN: torch 2.15)
    "aten::_flash_attention_forward_no_dropout_inplace": AttentionLayout(
        9, "bottom_right", "length_first", query=1, window=12, ends=4, longest=6
    ),
    "aten::_cudnn_attention_forward_no_dropout_inplace": AttentionLayout(8, dense=None, query=1, ends=4, longest=6),
    "aten::_triton_scaled_dot_attention": AttentionLayout(None, lse=False),  # block-sparse inputs, counted as dense
    "flash_attn_3::fwd": _FLASH_3,
    "_vllm_fa3_C::fwd": _FLASH_3,
    "sgl_kernel::fwd": _FLASH_3,
    "_vllm_fa2_C::varlen_fwd": AttentionLayout(15, "bottom_right", None, window=16, ends=4, longest=10, untold=(6, 8)),
    "xformers_flash::flash_fwd": AttentionLayout(10, "bottom_right", "length_first", window=11, ends=3, longest=6, untold=(5, 14)),
    "flash_attn::_flash_attn_forward": AttentionLayout(5, "bottom_right", "length_first", window=6),
    "flash_attn::_flash_attn_varlen_forward": _FLASH_VARLEN,
    "torch_attn::_varlen_attn": _TORCH_VARLEN,
    "torch_attn::_varlen_attn_out": AttentionLayout(8, "bottom_right", None, query=1, window=10, ends=4, longest=6),
    # grad_out 0, q k v 1-3, out 4 or as the others say
    "aten::_scaled_dot_product_flash_attention_backward": AttentionLayout(
        11, "bottom_right", query=1, others=(0, 4), ends=6, longest=8, backward=True, flat=True
    ),
    "aten::_flash_attention_backward": AttentionLayout(
        11, "bottom_right", "length_first", query=1, others=(0, 4), window=15, ends=6, longest=8, backward=True, flat=True
    ),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": AttentionLayout(7, query=1, others=(0, 4, 8), backward=True),
    "aten::_scaled_dot_product_efficient_attention_backward": AttentionLayout(11, query=1, others=(0, 4, 5), backward=True),
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": AttentionLayout(13, query=1, others=(0, 4, 6), backward=True),
    "aten::_scaled_dot_product_cudnn_attention_backward": _CUDNN_BACKWARD,
    "aten::_cudnn_attention_backward": _CUDNN_BACKWARD,
    "flash_attn::_flash_attn_backward": AttentionLayout(
        11, "bottom_right", "length_first", query=1, others=(0, 4), window=12, backward=True
    ),
    "flash_attn::_flash_attn_varlen_backward": AttentionLayout(
        15, "bottom_right", None, query=1, others=(0, 4), window=16, ends=9, longest=11, backward=True
    ),
    "flash_attn_3::bwd": AttentionLayout(
        16, "bottom_right", "length_first", query=1, others=(0, 4), window=17, ends=9, longest=13, backward=True, untold=(11, 12)
    ),
    "xformers_flash::flash_bwd": AttentionLayout(
        13, "bottom_right", "length_first", query=2, others=(1, 5), window=14, ends=7, longest=9, backward=True
    ),
    "torch_attn::_varlen_attn_backward": AttentionLayout(
        10, "bottom_right", None, query=1, others=(0, 4), window=13, ends=6, longest=8, backward=True
    ),
}

for _name, _layout in ATTENTION_LAYOUTS.items():
    costs(_name, generic=False, layout=_layout)(estimate_attention)
backward_costs("torch_attn::_varlen_attn", layout=_TORCH_VARLEN, of_forward=True)(estimate_attention)
backward_costs("flash_attn::_flash_attn_varlen_forward", layout=_FLASH_VARLEN, of_forward=True)(estimate_attention)


@costs("aten::_flash_attention_forward", generic=False)
def flash_forward(signature: Signature) -> Cost:
    """Return the cost of the flash kernel, which has three more arguments before the windows with fp8 scales."""
    return estimate_attention(signature, _FLASH if signature.tensor(10) is None else msgspec.structs.replace(_FLASH, window=14))


def read_efficient_mask(signature: Signature, index: int) -> Mask:
    """Read the mask that the memory-efficient kernels name by number; raises NotModelledError for one that is not known."""
    kind = signature.integer(index, "custom_mask_type (Concrete Inputs)")
    known: dict[int, Mask] = {0: "none", 1: "top_left", 2: "bottom_right"}
    if kind not in known:
        raise NotModelledError(f"custom_mask_type {kind} is not known")
    return known[kind]


@costs("aten::_efficient_attention_forward", generic=False)
def efficient_forward(signature: Signature) -> Cost:
    """Return the cost of the memory-efficient kernel: bias 3, cu_seqlens 4-5, max 6-7, dropout_p, custom_mask_type, compute_log_sumexp.

    torch before 2.3 had no max_seqlen_k, so the flag's place tells the version.
    """
    at = next((index for index in (10, 9) if isinstance(signature.value(index), bool)), None)
    if at is None:
        raise NotModelledError("custom_mask_type and compute_log_sumexp (Concrete Inputs) were not recorded")
    mask, others = read_efficient_mask(signature, at - 1), signature.tensors(3)
    ends, qkv = signature.tensor(4), read_query_key_value(signature, 0)
    if ends is not None:
        longest = (signature.integer(6, "max_q"), signature.integer(7 if at == 10 else 6, "max_k"))
        return estimate_varlen(qkv, Packing(ends.numel - 1, longest), mask, others, backwards=False)
    window = signature.value(13)
    keys = window if type(window) is int else None
    return estimate_dense("length_first", qkv, mask, others, keys, lse=signature.flag(at, "compute_log_sumexp"))


@costs("aten::_efficient_attention_backward", "xformers::efficient_attention_backward_cutlass", generic=False)
def efficient_backward(signature: Signature) -> Cost:
    """Return the cost of the memory-efficient backward kernel (bias 4, out 5, cu_seqlens 6-7, max 8-9, custom_mask_type 14)."""
    mask, others = read_efficient_mask(signature, 14), signature.tensors(0, 4, 5)
    ends, qkv = signature.tensor(6), read_query_key_value(signature, 1)
    if ends is not None:
        longest = (signature.integer(8, "max_q"), signature.integer(9, "max_k"))
        return estimate_varlen(qkv, Packing(ends.numel - 1, longest), mask, others, backwards=True)
    return estimate_dense("length_first", qkv, mask, others, backwards=True)


@costs("xformers::efficient_attention_forward_cutlass", generic=False)
def xformers_forward(signature: Signature) -> Cost:
    """Return the cost of xFormers' kernel (bias 3, seqstart 4-5, max_seqlen_q 6, compute_logsumexp 8, custom_mask_type 9, window 12)."""
    mask, others = read_efficient_mask(signature, 9), signature.tensors(3)
    window, ends, qkv = signature.value(12), signature.tensor(4), read_query_key_value(signature, 0)
    keys = window if type(window) is int else None
    if ends is not None:
        longest = signature.integer(6, "max_seqlen_q")
        return estimate_varlen(qkv, Packing(ends.numel - 1, (longest, longest), keys), mask, others, backwards=False)
    return estimate_dense("length_first", qkv, mask, others, keys, lse=signature.flag(8, "compute_logsumexp"))


@costs("aiter::mha_fwd", "aiter::fmha_v3_fwd", "aiter::mha_varlen_fwd", "aiter::fmha_v3_varlen_fwd", generic=False)
def aiter_forward(signature: Signature) -> Cost:
    """Return the cost of AITER's kernels (CK and assembly; the mask lies bottom-right).

    Their arguments moved from version to version, their flags did not: [zero_tensors of packed calls,] is_causal with the two sides of
    the window behind it, return_softmax_lse. A table of blocks is the one tensor of int32 with two dimensions.
    """
    flags = [index for index, item in enumerate(signature.inputs) if isinstance(item.value, bool)]
    packed = len(signature.need(0, "query").shape) == 3
    require(len(flags) > 1 + packed, "is_causal (Concrete Inputs) was not recorded")
    paged = [index for index, item in enumerate(signature.inputs) if item.dtype == "int32" and len(item.shape) == 2]
    causal = flags[1] if packed else flags[0]
    ends = {"dense": None, "ends": 3, "longest": 5} if packed else {}
    layout = AttentionLayout(causal, "bottom_right", "length_first", lse=flags[1 + packed], window=causal + 1, untold=tuple(paged))
    return estimate_attention(signature, msgspec.structs.replace(layout, **ends))


@costs("customflash::custom_flash_aligned", generic=False)
def custom_flash(signature: Signature) -> Cost:
    """Return the cost of segment-anything-fast's kernel: dense attention that also reads the relative positions (rel_h_w 3).

    Its callers pad the heads to a power of two; what was recorded is counted, padding included (`derived`).
    """
    cost = estimate_dense("heads_first", read_query_key_value(signature, 0), "none", signature.tensors(3), lse=False)
    return msgspec.structs.replace(cost, provenance="derived")
