"""How many (query, key) pairs an attention call attends to, and the sizes of its heads."""

from __future__ import annotations

from typing import Literal

import msgspec

from gpudiag.model.signature import Input
from gpudiag.roofline.costs.registry import require

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
    return _checked(_leading(q), q.shape[-3], k.shape[-3], q.shape[-2], k.shape[-2], q, v)


def length_first(q: Input, k: Input, v: Input) -> Heads:
    """Return the sizes of [batch, length, heads, dim] tensors (flash-attention, xFormers)."""
    require(len(q.shape) == len(k.shape) == len(v.shape) == 4, _MISFIT)
    return _checked(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], q, v)


def _leading(q: Input) -> int:
    count = 1
    for size in q.shape[:-3]:
        count *= size
    return count


def _checked(batch: int, heads: int, kv_heads: int, queries: int, keys: int, q: Input, v: Input) -> Heads:
    require(kv_heads == heads or (0 < kv_heads < heads and heads % kv_heads == 0), _MISFIT)
    return Heads(batch, heads, kv_heads, queries, keys, q.shape[-1], v.shape[-1])


def _causal(queries: int, keys: int, mask: Mask) -> int:
    """Return twice the pairs below the diagonal. Square: exactly half of all pairs (the convention of flash-attention's benchmark)."""
    if queries == keys:
        return queries * keys
    shorter = min(queries, keys)
    triangle = shorter * (shorter + 1)
    if mask == "top_left":
        return triangle + 2 * max(queries - keys, 0) * keys
    return triangle if queries > keys else 2 * queries * keys - queries * (queries - 1)


def pairs_twice(queries: int, keys: int, mask: Mask, window: int | None = None) -> int:
    """Return twice the number of (query, key) pairs that are computed (twice, so that half of an odd count stays whole).

    causal: sum over queries i of min(keys, i + keys - queries) for bottom_right, of min(keys, i) for top_left. `window` keys per
    query (sliding window): queries * min(keys, window), without the causal half (op_costs section 3).
    """
    if window is not None and 0 < window < keys:
        return 2 * queries * window
    return 2 * queries * keys if mask == "none" else _causal(queries, keys, mask)


class Packing(msgspec.Struct, frozen=True):
    """How sequences are packed: their number, the longest queries and keys, and the sliding window if there is one."""

    sequences: int
    longest: tuple[int, int]
    window: int | None = None


def mean_pairs(queries: float, keys: float, mask: Mask, window: int | None = None) -> float:
    """Return the pairs of one sequence of mean lengths, which need not be whole (`pairs_twice` / 2 where they are)."""
    if queries == int(queries) and keys == int(keys):
        return pairs_twice(int(queries), int(keys), mask, window) / 2
    if window is not None and 0 < window < keys:
        return queries * window
    return queries * keys / (1 if mask == "none" else 2)


def window_keys(left: object, right: object, causal: bool) -> int | None:
    """Return how many keys a query sees in a sliding window (left + itself + right), None where a needed side has no limit."""
    if type(left) is not int or left < 0:
        return None
    if causal:
        return left + 1
    return left + 1 + right if type(right) is int and right >= 0 else None
