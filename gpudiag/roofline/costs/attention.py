"""Fused attention, forward and backward (op_costs section 3; flash-attention benchmarks/benchmark_flash_attention.py).

Forward: two products, 2 * B*H*pairs * (Dqk + Dv) FLOP; backward: five (scores again, dV, dP, dQ, dK), 2 * B*H*pairs * (3 Dqk + 2 Dv).
Pairs are discounted where the mask is causal (attention_shapes). Bytes: q, k, v, the result, a given mask or bias, and the fp32
log-sum-exp; scores never reach memory. The softmax's vector FLOPs are not charged: no peak of the exponential units is tabulated.

Alignment of the causal triangle when Sq != Sk: aten SDPA ops, cuDNN and the CPU kernel: top-left (torch's is_causal). aten flash ops
and flash_attn: bottom-right (flash-attention >= 2.1; SDPA itself never picks flash for a non-square causal call). Efficient attention
says it by number: 1 top-left, 2 bottom-right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from gpudiag.model.ops import Cost, Input, Provenance, Signature
from gpudiag.roofline.costs.arguments import count_read_bytes, flag, integer, present, size_of, tensor
from gpudiag.roofline.costs.gemm import build_matrix_cost
from gpudiag.roofline.costs.registry import NotModelledError, costs, require

Mask = Literal["none", "top_left", "bottom_right"]
"""Alignment of the causal triangle when queries and keys differ in number: query i sees keys up to i (top_left), or the last query
sees all keys (bottom_right). torch's is_causal is top_left; flash-attention >= 2.1 is bottom_right."""

_MISFIT = "query, key and value shapes do not fit attention"


class Heads(msgspec.Struct, frozen=True):
    """Sizes of one attention call; GQA and MQA: `kv_heads` below `heads`."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    query_dim: int
    value_dim: int


def heads_first(q: Input, k: Input, v: Input) -> Heads:
    """Return the sizes of [batch, heads, length, dim] tensors (torch SDPA); leading dimensions fold into the batch."""
    require(min(len(q.shape), len(k.shape), len(v.shape)) >= 3, _MISFIT)
    return _check_sizes(_count_batch(q), q.shape[-3], k.shape[-3], q.shape[-2], k.shape[-2], q, v)


def length_first(q: Input, k: Input, v: Input) -> Heads:
    """Return the sizes of [batch, length, heads, dim] tensors (flash-attention, xFormers)."""
    require(len(q.shape) == len(k.shape) == len(v.shape) == 4, _MISFIT)
    return _check_sizes(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], q, v)


def _count_batch(q: Input) -> int:
    count = 1
    for size in q.shape[:-3]:
        count *= size
    return count


def _check_sizes(batch: int, heads: int, kv_heads: int, queries: int, keys: int, q: Input, v: Input) -> Heads:
    require(kv_heads == heads or (0 < kv_heads < heads and heads % kv_heads == 0), _MISFIT)
    return Heads(batch, heads, kv_heads, queries, keys, q.shape[-1], v.shape[-1])


def _count_causal_twice(queries: int, keys: int, mask: Mask) -> int:
    """Return twice the pairs below the diagonal. Square: exactly half of all pairs (the convention of flash-attention's benchmark)."""
    if queries == keys:
        return queries * keys
    shorter = min(queries, keys)
    triangle = shorter * (shorter + 1)
    if mask == "top_left":
        return triangle + 2 * max(queries - keys, 0) * keys
    return triangle if queries > keys else 2 * queries * keys - queries * (queries - 1)


def count_pairs_twice(queries: int, keys: int, mask: Mask, window: int | None = None) -> int:
    """Return twice the number of (query, key) pairs that are computed (twice, so that half of an odd count stays whole).

    causal: sum over queries i of min(keys, i + keys - queries) for bottom_right, of min(keys, i) for top_left. `window` keys per
    query (sliding window): queries * min(keys, window), without the causal half (op_costs section 3).
    """
    if window is not None and 0 < window < keys:
        return 2 * queries * window
    return 2 * queries * keys if mask == "none" else _count_causal_twice(queries, keys, mask)


class Packing(msgspec.Struct, frozen=True):
    """How sequences are packed: their number, the longest queries and keys, and the sliding window if there is one."""

    sequences: int
    longest: tuple[int, int]
    window: int | None = None


def count_mean_pairs(queries: float, keys: float, mask: Mask, window: int | None = None) -> float:
    """Return the pairs of one sequence of mean lengths, which need not be whole (`count_pairs_twice` / 2 where they are)."""
    if queries == int(queries) and keys == int(keys):
        return count_pairs_twice(int(queries), int(keys), mask, window) / 2
    if window is not None and 0 < window < keys:
        return queries * window
    return queries * keys / (1 if mask == "none" else 2)


def count_window_keys(left: object, right: object, causal: bool) -> int | None:
    """Return how many keys a query sees in a sliding window (left + itself + right), None where a needed side has no limit."""
    if type(left) is not int or left < 0:
        return None
    if causal:
        return left + 1
    return left + 1 + right if type(right) is int and right >= 0 else None


Sizes = Callable[[Input, Input, Input], Heads]
_LSE = 4  # bytes of one fp32 log-sum-exp


def read_query_key_value(signature: Signature, first: int) -> tuple[Input, Input, Input]:
    """Return query, key and value, the first at `first`; raises NotModelledError where one was not recorded."""
    query, key, value = (tensor(signature, first + i, name) for i, name in enumerate(("query", "key", "value")))
    return query, key, value


def read_causal_mask(signature: Signature, index: int, aligned: Mask) -> Mask:
    """Return `aligned` where is_causal (argument `index`) is set; raises NotModelledError where it was not recorded."""
    return aligned if flag(signature, index, "is_causal (Concrete Inputs)") else "none"


def estimate_forward(
    sizes: Sizes, qkv: tuple[Input, Input, Input], mask: Mask, others: list[Input], lse: bool, window: int | None = None
) -> Cost:
    """Return the cost of a fused forward; `lse`: the log-sum-exp is written."""
    q, k, v = qkv
    heads = sizes(q, k, v)
    rows = heads.batch * heads.heads
    twice = rows * count_pairs_twice(heads.queries, heads.keys, mask, window)
    written = size_of(rows * heads.queries * heads.value_dim, q.dtype) + (_LSE * rows * heads.queries if lse else 0)
    multiply_adds_twice = twice * (heads.query_dim + heads.value_dim)
    return _halve_twice(multiply_adds_twice, q.dtype, count_read_bytes((q, k, v, *others)) + written)


def estimate_backward(sizes: Sizes, qkv: tuple[Input, Input, Input], mask: Mask, others: list[Input], window: int | None = None) -> Cost:
    """Return the cost of a fused backward; `others`: out, grad_out and a bias, which are read beside q, k, v and the log-sum-exp."""
    q, k, v = qkv
    heads = sizes(q, k, v)
    rows = heads.batch * heads.heads
    twice = rows * count_pairs_twice(heads.queries, heads.keys, mask, window)
    moved = count_read_bytes((q, k, v, *others)) + _LSE * rows * heads.queries
    moved += sum(size_of(item.numel, item.dtype) for item in qkv)
    return _halve_twice(twice * (3 * heads.query_dim + 2 * heads.value_dim), q.dtype, moved, scores_twice=twice * heads.query_dim)


def _halve_twice(multiply_adds_twice: int, dtype: str | None, moved: int, scores_twice: int = 0) -> Cost:
    cost = build_matrix_cost(multiply_adds_twice, dtype, moved)
    again = build_matrix_cost(scores_twice, dtype, 0).matrix_flops // 2
    return Cost(matrix_flops=cost.matrix_flops // 2, bytes=moved, dtype=cost.dtype, recompute_flops=again)


def estimate_varlen(qkv: tuple[Input, Input, Input], packing: Packing, mask: Mask, others: list[Input], backwards: bool) -> Cost:
    """Return the cost of packed sequences [total, heads, dim], as if all were equally long (`derived`).

    The lengths stand in the cu_seqlens tensor, which a trace does not hold; its size tells how many there are. Equal lengths give the least
    FLOPs; they are exact where the longest sequences fill the total. The bytes are exact.
    """
    q, k, v = (_drop_batch(item) for item in qkv)
    if not len(q.shape) == len(k.shape) == len(v.shape) == 3 or packing.sequences <= 0:
        raise NotModelledError("packed query, key and value have no [total, heads, dim] shapes")
    dims = 3 * q.shape[2] + 2 * v.shape[2] if backwards else q.shape[2] + v.shape[2]
    rows = q.shape[0] * q.shape[1]
    written = 2 * sum(item.numel * item.item_bytes for item in qkv) if backwards else size_of(rows * v.shape[2], q.dtype)
    moved = count_read_bytes((q, k, v, *others)) + written + _LSE * rows
    queries, keys = q.shape[0] / packing.sequences, k.shape[0] / packing.sequences
    filled = (queries, keys) == packing.longest
    pairs = packing.sequences * q.shape[1] * count_mean_pairs(queries, keys, mask, packing.window)
    again = round(2 * pairs * q.shape[2]) if backwards else 0
    flops = round(2 * pairs * dims)
    provenance: Provenance = "exact" if filled else "derived"
    return Cost(matrix_flops=flops, bytes=moved, dtype=q.dtype or "", provenance=provenance, recompute_flops=again)


def _drop_batch(item: Input) -> Input:
    """Return [1, total, heads, dim] as [total, heads, dim] (the memory-efficient kernels pack so)."""
    return Input(dtype=item.dtype, shape=item.shape[1:]) if len(item.shape) == 4 and item.shape[0] == 1 else item


@costs("aten::scaled_dot_product_attention", generic=False)
def scaled_dot_product_attention(signature: Signature) -> Cost:
    """Return the cost of SDPA as a fused kernel would have it (its children carry the cost wherever they are recorded)."""
    mask = read_causal_mask(signature, 5, "top_left")
    return estimate_forward(heads_first, read_query_key_value(signature, 0), mask, present(signature, 3), lse=False)


@costs("aten::_scaled_dot_product_flash_attention", generic=False)
def sdpa_flash(signature: Signature) -> Cost:
    """Return the cost of SDPA's flash forward (dropout_p 3, is_causal 4)."""
    return estimate_forward(heads_first, read_query_key_value(signature, 0), read_causal_mask(signature, 4, "bottom_right"), [], lse=True)


@costs("aten::_scaled_dot_product_flash_attention_for_cpu", generic=False)
def sdpa_flash_cpu(signature: Signature) -> Cost:
    """Return the cost of the CPU kernel (dropout_p 3, is_causal 4, attn_mask 5)."""
    return estimate_forward(
        heads_first, read_query_key_value(signature, 0), read_causal_mask(signature, 4, "top_left"), present(signature, 5), lse=True
    )


@costs("aten::_scaled_dot_product_fused_attention_overrideable", generic=False)
def sdpa_overrideable(signature: Signature) -> Cost:
    """Return the cost of a backend's own fused forward (attn_bias 3, dropout_p 4, is_causal 5)."""
    return estimate_forward(
        heads_first, read_query_key_value(signature, 0), read_causal_mask(signature, 5, "top_left"), present(signature, 3), lse=True
    )


@costs("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention", generic=False)
def sdpa_efficient(signature: Signature) -> Cost:
    """Return the cost of SDPA's memory-efficient or cuDNN forward (attn_bias 3, compute_log_sumexp 4, dropout_p 5, is_causal 6)."""
    lse = flag(signature, 4, "compute_log_sumexp")
    return estimate_forward(
        heads_first, read_query_key_value(signature, 0), read_causal_mask(signature, 6, "top_left"), present(signature, 3), lse
    )


@costs("aten::_cudnn_attention_forward", generic=False)
def cudnn_forward(signature: Signature) -> Cost:
    """Return the cost of the cuDNN forward (attn_bias 3, cum_seq 4-5, compute_log_sumexp 8, is_causal 10)."""
    mask = read_causal_mask(signature, 10, "top_left")
    if signature.tensor(4) is not None:
        return _estimate_packed(signature, 0, 4, (6, 7), mask, present(signature, 3))
    return estimate_forward(
        heads_first, read_query_key_value(signature, 0), mask, present(signature, 3), flag(signature, 8, "compute_log_sumexp")
    )


def _estimate_packed(
    signature: Signature, first: int, ends: int, longest: tuple[int, int], mask: Mask, others: list[Input], window: int | None = None
) -> Cost:
    """Return the cost of a packed call: `ends` is the position of the queries' cu_seqlens; a forward has query at 0."""
    sizes = (integer(signature, longest[0], "max_q"), integer(signature, longest[1], "max_k"))
    packing = Packing(tensor(signature, ends, "cu_seqlens").numel - 1, sizes, window)
    return estimate_varlen(read_query_key_value(signature, first), packing, mask, others, backwards=first == 1)


@costs("aten::_flash_attention_forward", generic=False)
def flash_forward(signature: Signature) -> Cost:
    """Return the cost of the flash kernel (cum_seq 3-4, max 5-6, is_causal 8, windows 11-12; three more before them with fp8 scales)."""
    mask = read_causal_mask(signature, 8, "bottom_right")
    at = 14 if signature.tensor(10) is not None else 11
    window = count_window_keys(signature.value(at), signature.value(at + 1), mask != "none")
    if signature.tensor(3) is not None:
        return _estimate_packed(signature, 0, 3, (5, 6), mask, [], window)
    return estimate_forward(length_first, read_query_key_value(signature, 0), mask, [], lse=True, window=window)


def read_efficient_mask(signature: Signature, index: int) -> Mask:
    """Return the mask that the memory-efficient kernels name by number; raises NotModelledError for one that is not known."""
    kind = integer(signature, index, "custom_mask_type (Concrete Inputs)")
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
    mask = read_efficient_mask(signature, at - 1)
    others = present(signature, 3)
    if signature.tensor(4) is not None:
        return _estimate_packed(signature, 0, 4, (6, 7 if at == 10 else 6), mask, others)
    window = signature.value(13)
    keys = window if type(window) is int else None
    return estimate_forward(length_first, read_query_key_value(signature, 0), mask, others, flag(signature, at, "compute_log_sumexp"), keys)


@costs("flash_attn::_flash_attn_forward", generic=False)
def flash_attn_forward(signature: Signature) -> Cost:
    """Return the cost of flash-attention 2's op (dropout_p 3, softmax_scale 4, causal 5, windows 6-7)."""
    mask = read_causal_mask(signature, 5, "bottom_right")
    window = count_window_keys(signature.value(6), signature.value(7), mask != "none")
    return estimate_forward(length_first, read_query_key_value(signature, 0), mask, [], lse=True, window=window)


@costs("aten::_scaled_dot_product_flash_attention_backward", generic=False)
def sdpa_flash_backward(signature: Signature) -> Cost:
    """Return the cost of SDPA's flash backward (grad_out 0, q k v 1-3, out 4, is_causal 11)."""
    mask = read_causal_mask(signature, 11, "bottom_right")
    if signature.tensor(6) is not None and len(read_query_key_value(signature, 1)[0].shape) == 3:
        return _estimate_packed(signature, 1, 6, (8, 9), mask, present(signature, 0, 4))
    return estimate_backward(heads_first, read_query_key_value(signature, 1), mask, present(signature, 0, 4))


@costs("aten::_flash_attention_backward", generic=False)
def flash_backward(signature: Signature) -> Cost:
    """Return the cost of the flash backward kernel (grad_out 0, q k v 1-3, out 4, is_causal 11, windows 15-16)."""
    mask, qkv, others = read_causal_mask(signature, 11, "bottom_right"), read_query_key_value(signature, 1), present(signature, 0, 4)
    window = count_window_keys(signature.value(15), signature.value(16), mask != "none")
    if len(qkv[0].shape) == 3:
        return _estimate_packed(signature, 1, 6, (8, 9), mask, others, window)
    return estimate_backward(length_first, qkv, mask, others, window)


@costs("aten::_scaled_dot_product_flash_attention_for_cpu_backward", generic=False)
def sdpa_flash_cpu_backward(signature: Signature) -> Cost:
    """Return the cost of the CPU backward (grad_out 0, q k v 1-3, out 4, is_causal 7, attn_mask 8)."""
    return estimate_backward(
        heads_first, read_query_key_value(signature, 1), read_causal_mask(signature, 7, "top_left"), present(signature, 0, 4, 8)
    )


@costs("aten::_scaled_dot_product_efficient_attention_backward", generic=False)
def sdpa_efficient_backward(signature: Signature) -> Cost:
    """Return the cost of SDPA's memory-efficient backward (bias 4, out 5, is_causal 11)."""
    return estimate_backward(
        heads_first, read_query_key_value(signature, 1), read_causal_mask(signature, 11, "top_left"), present(signature, 0, 4, 5)
    )


@costs("aten::_efficient_attention_backward", "xformers::efficient_attention_backward_cutlass", generic=False)
def efficient_backward(signature: Signature) -> Cost:
    """Return the cost of the memory-efficient backward kernel (bias 4, out 5, cu_seqlens 6-7, custom_mask_type 14)."""
    mask = read_efficient_mask(signature, 14)
    others = present(signature, 0, 4, 5)
    if signature.tensor(6) is not None:
        return _estimate_packed(signature, 1, 6, (8, 9), mask, others)
    return estimate_backward(length_first, read_query_key_value(signature, 1), mask, others)


@costs("aten::_scaled_dot_product_cudnn_attention_backward", "aten::_cudnn_attention_backward", generic=False)
def cudnn_backward(signature: Signature) -> Cost:
    """Return the cost of the cuDNN backward (grad_out 0, q k v 1-3, out 4, attn_bias 8, cum_seq 9-10, max 11-12, is_causal 14)."""
    mask = read_causal_mask(signature, 14, "top_left")
    if signature.tensor(9) is not None:
        return _estimate_packed(signature, 1, 9, (11, 12), mask, present(signature, 0, 4, 8))
    return estimate_backward(heads_first, read_query_key_value(signature, 1), mask, present(signature, 0, 4, 8))


@costs("aten::_scaled_dot_product_fused_attention_overrideable_backward", generic=False)
def overrideable_backward(signature: Signature) -> Cost:
    """Return the cost of a backend's own fused backward (attn_bias 4, out 6, is_causal 13)."""
    return estimate_backward(
        heads_first, read_query_key_value(signature, 1), read_causal_mask(signature, 13, "top_left"), present(signature, 0, 4, 6)
    )


@costs("flash_attn::_flash_attn_backward", generic=False)
def flash_attn_backward(signature: Signature) -> Cost:
    """Return the cost of flash-attention 2's backward op (dout 0, q k v 1-3, out 4, causal 11, windows 12-13)."""
    mask = read_causal_mask(signature, 11, "bottom_right")
    window = count_window_keys(signature.value(12), signature.value(13), mask != "none")
    return estimate_backward(length_first, read_query_key_value(signature, 1), mask, present(signature, 0, 4), window)
