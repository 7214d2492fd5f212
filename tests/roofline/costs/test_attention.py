"""Which (query, key) pairs attention computes, counted one by one, and the sizes of its calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.model.finding import Missing
from gpudiag.model.ops import Cost, Signature
from gpudiag.roofline.costs import estimate_cost
from gpudiag.roofline.costs.attention import count_pairs_twice, count_window_keys
from gpudiag.roofline.costs.registry import BACKWARD_FORMULAS

CostOf = Callable[..., Cost]
LENGTH = st.integers(1, 60)


@given(queries=LENGTH, keys=LENGTH)
def test_causal_pairs_counted_one_by_one(queries: int, keys: int) -> None:
    top = sum(key <= query for query in range(queries) for key in range(keys))
    bottom = sum(key <= query + keys - queries for query in range(queries) for key in range(keys))
    if queries == keys:  # convention: exactly half, the diagonal's other half is left out
        assert count_pairs_twice(queries, keys, "top_left") == count_pairs_twice(queries, keys, "bottom_right") == queries * keys
        assert top == bottom == (queries * keys + queries) / 2
    else:
        assert count_pairs_twice(queries, keys, "top_left") == 2 * top
        assert count_pairs_twice(queries, keys, "bottom_right") == 2 * bottom
    assert count_pairs_twice(queries, keys, "none") == 2 * queries * keys


def test_window() -> None:
    assert count_window_keys(127, 0, causal=True) == 128
    assert count_window_keys(-1, 0, causal=True) is None
    assert count_window_keys(64, 64, causal=False) == 129
    assert count_window_keys(64, -1, causal=False) is None
    assert count_pairs_twice(1000, 1000, "none", 128) == 2 * 1000 * 128
    assert count_pairs_twice(100, 100, "bottom_right", 128) == 100 * 100  # wider than the sequence: plain causal


@given(queries=LENGTH, more=st.integers(0, 60), window=LENGTH)
def test_pairs_of_a_causal_window_counted_one_by_one(queries: int, more: int, window: int) -> None:
    keys = queries + more
    seen = sum(min(window, query + more + 1) for query in range(queries))
    if window < keys:
        assert count_pairs_twice(queries, keys, "bottom_right", window) == 2 * seen


def _flash(cost: CostOf, queries: int, keys: int, causal: bool, heads: int = 8, kv_heads: int = 8) -> Cost:
    q, kv = ("bf16", (2, heads, queries, 64)), ("bf16", (2, kv_heads, keys, 64))
    return cost("aten::_scaled_dot_product_flash_attention", q, kv, kv, 0.0, causal, False, None)


def test_decoding_and_chunked_prefill(cost: CostOf) -> None:
    """Bottom-right: one new query sees the whole cache; 64 queries on 512 keys see almost all of them."""
    assert _flash(cost, 1, 512, True).flops == _flash(cost, 1, 512, False).flops
    chunk = _flash(cost, 64, 512, True)
    assert chunk.flops == 4 * 2 * 8 * 64 * (64 * 512 - 64 * 63 // 2)


def test_alignment_differs_between_backends(cost: CostOf) -> None:
    """torch's is_causal is top-left: with more keys than queries the keys behind the triangle are never seen."""
    q, kv = ("bf16", (1, 1, 4, 64)), ("bf16", (1, 1, 16, 64))
    efficient = cost("aten::_scaled_dot_product_efficient_attention", q, kv, kv, None, False, 0.0, True, None)
    assert efficient.flops == 4 * 64 * (1 + 2 + 3 + 4)
    flash = cost("aten::_scaled_dot_product_flash_attention", q, kv, kv, 0.0, True, False, None)
    assert flash.flops == 4 * 64 * (13 + 14 + 15 + 16)


def test_grouped_heads_change_bytes_not_flops(cost: CostOf) -> None:
    full, grouped = _flash(cost, 128, 128, False), _flash(cost, 128, 128, False, kv_heads=2)
    assert full.flops == grouped.flops
    assert full.bytes - grouped.bytes == 2 * 2 * (2 * 6 * 128 * 64)


def test_value_heads_of_another_size(cost: CostOf) -> None:
    """Multi-head latent attention: keys of 192, values of 128."""
    q, k, v = ("bf16", (1, 4, 32, 192)), ("bf16", (1, 4, 32, 192)), ("bf16", (1, 4, 32, 128))
    found = cost("aten::_scaled_dot_product_flash_attention", q, k, v, 0.0, False, False, None)
    assert found.flops == 2 * 4 * 32 * 32 * (192 + 128)
    assert found.bytes == 2 * 4 * 32 * (192 + 192 + 128 + 128) + 4 * 4 * 32
    out, state = ("bf16", (1, 4, 32, 128)), ("int64", ())
    name = "aten::_scaled_dot_product_flash_attention_backward"
    back = cost(name, out, q, k, v, out, ("fp32", (1, 4, 32)), None, None, 32, 32, 0.0, False, state, state, None)
    assert back.flops == 2 * 4 * 32 * 32 * (3 * 192 + 2 * 128)
    assert back.bytes == 2 * 4 * 32 * (2 * (192 + 192 + 128) + 2 * 128) + 4 * 4 * 32


def test_efficient_attention_in_both_schemas(cost: CostOf) -> None:
    """torch before 2.3 had no max_seqlen_k; custom_mask_type 1 is top-left, 2 bottom-right."""
    q, bias = ("bf16", (25, 196, 16, 80)), ("bf16", (25, 16, 196, 196))
    old = cost("aten::_efficient_attention_forward", q, q, q, bias, None, None, None, 0.0, 0, False, None, None, None)
    new = cost("aten::_efficient_attention_forward", q, q, q, bias, None, None, None, None, 0.0, 0, False, None, None, None)
    assert old == new
    assert (old.matrix_flops, old.bytes) == (4917248000, 50176000 + 25 * 16 * 196 * 196 * 2)
    causal = cost("aten::_efficient_attention_forward", q, q, q, None, None, None, None, None, 0.0, 1, True, None, None, None)
    assert 2 * causal.matrix_flops == old.matrix_flops
    assert causal.bytes == 50176000 + 4 * 25 * 16 * 196


def test_packed_sequences_count_as_equally_long(cost: CostOf) -> None:
    """Four sequences of 100 packed are four of 100. Where the longest is longer than the mean, equal lengths are the least: `derived`."""
    q, ends = ("bf16", (400, 8, 64)), ("int32", (5,))
    packed = cost("aten::_flash_attention_forward", q, q, q, ends, ends, 100, 100, 0.0, True, False, None, None, None)
    q4 = ("bf16", (4, 100, 8, 64))
    padded = cost("aten::_flash_attention_forward", q4, q4, q4, None, None, 100, 100, 0.0, True, False, None, None, None)
    assert packed == padded
    uneven = cost("aten::_flash_attention_forward", q, q, q, ends, ends, 250, 250, 0.0, True, False, None, None, None)
    assert (uneven.matrix_flops, uneven.provenance) == (padded.matrix_flops, "derived")
    lengths = (250, 50, 50, 50)
    assert uneven.matrix_flops <= sum(2 * 8 * 64 * length * length for length in lengths)
    odd = cost("aten::_flash_attention_forward", ("bf16", (401, 8, 64)), q, q, ends, ends, 250, 250, 0.0, False, False, None, None, None)
    assert odd.matrix_flops == 4 * 8 * 64 * 401 * 100


def test_every_library_names_the_same_packed_attention(cost: CostOf) -> None:
    q, ends, lse, state = ("bf16", (400, 8, 64)), ("int32", (5,)), ("fp32", (8, 400)), ("int64", (2,))
    sizes = (ends, ends, 100, 100)
    forward = cost("aten::_flash_attention_forward", q, q, q, *sizes, 0.0, True, False, None, None, None)
    assert cost("flash_attn::_flash_attn_varlen_forward", q, q, q, *sizes, 0.0, 0.125, True, -1, -1, 0.0, None, False) == forward
    assert cost("torch_attn::_varlen_attn", q, q, q, *sizes, True, None, [-1, -1]) == forward
    assert cost("torch_attn::_varlen_attn_out", q, q, q, q, *sizes, True, None, [-1, -1]) == forward
    assert cost("aten::_flash_attention_forward_no_dropout_inplace", q, q, q, q, *sizes, 0.0, True, False, None, None, None) == forward
    assert cost("aten::_cudnn_attention_forward_no_dropout_inplace", q, q, q, q, *sizes, True) == forward  # squares: either corner
    xformers = ("bf16", (1, 400, 8, 64))
    rest = (None, ends, ends, 100, 0.0, True, 1, None, None, None)
    assert cost("xformers::efficient_attention_forward_cutlass", xformers, xformers, xformers, *rest) == forward
    backward = cost("aten::_flash_attention_backward", q, q, q, q, q, lse, *sizes, 0.0, True, state, state, None, None, None)
    assert (2 * backward.matrix_flops, 2 * backward.recompute_flops) == (5 * forward.matrix_flops, forward.matrix_flops)
    assert cost("torch_attn::_varlen_attn_backward", q, q, q, q, q, lse, *sizes, True, state, None, [-1, -1]) == backward
    name = "flash_attn::_flash_attn_varlen_backward"
    assert cost(name, q, q, q, q, q, lse, q, q, q, *sizes, 0.0, 0.125, True, -1, -1, 0.0, None, False, state) == backward


def test_a_packed_window_sees_no_more_keys(cost: CostOf) -> None:
    q, ends = ("bf16", (400, 8, 64)), ("int32", (5,))
    found = cost("flash_attn::_flash_attn_varlen_forward", q, q, q, ends, ends, 100, 100, 0.0, 0.125, True, 15, 0, 0.0, None, False)
    assert found.matrix_flops == 4 * 8 * 64 * 4 * (100 * 16 - 15 * 16 // 2)


def test_backwards_from_the_forward_are_those_of_their_own_ops(recorded: Callable[..., Signature], cost: CostOf) -> None:
    """A node without shapes costs what its own op would."""
    q, ends, lse, state = ("bf16", (400, 8, 64)), ("int32", (5,)), ("fp32", (8, 400)), ("int64", (2,))
    sizes = (ends, ends, 100, 100)
    own = cost("aten::_flash_attention_backward", q, q, q, q, q, lse, *sizes, 0.0, True, state, state, None, None, None)
    forward = recorded(q, q, q, *sizes, 0.0, 0.125, True, -1, -1, 0.0, None, False)
    assert BACKWARD_FORMULAS["flash_attn::_flash_attn_varlen_forward"](forward) == own
    assert BACKWARD_FORMULAS["torch_attn::_varlen_attn"](recorded(q, q, q, *sizes, True, None, [-1, -1])) == own


def test_relative_positions_are_read_once(cost: CostOf) -> None:
    """segment-anything-fast: 16 heads of 4096 x 4096 x 128, and a fourth operand of the query's size."""
    q = ("bf16", (1, 16, 4096, 128))
    found = cost("customflash::custom_flash_aligned", q, q, q, q, 0.1118)
    assert (found.matrix_flops, found.bytes) == (4 * 16 * 4096 * 4096 * 128, 5 * 2 * 16 * 4096 * 128)


def test_sliding_window(cost: CostOf) -> None:
    q = ("bf16", (1, 1000, 8, 64))
    rest = (None, None, 1000, 1000, 0.0, True, False, None)
    windowed = cost("aten::_flash_attention_forward", q, q, q, *rest, 127, 0)
    assert windowed.matrix_flops == 4 * 8 * 64 * (1000 * 128 - 127 * 128 // 2)
    assert windowed == cost("flash_attn::_flash_attn_forward", q, q, q, 0.0, 0.125, True, 127, 0, 0.0, None, False)
    assert windowed == cost("flash_attn_3::fwd", q, q, q, *20 * [None], 0.125, True, 127, 0, 0, 0.0, False, None, 0, None, 0)
    assert windowed == cost("aiter::mha_fwd", q, q, q, 0.0, 0.125, True, 127, 0, True, False)


def test_a_cache_does_not_tell_its_keys(recorded: Callable[..., Signature]) -> None:
    """One page table more, and the sizes of key and value are those of the whole cache: no cost, and the reason."""
    q, cache, ends = ("bf16", (32, 8, 64)), ("bf16", (1000, 16, 8, 64)), ("int32", (33,))
    pages = (ends, ends, ("int32", (32,)), None, ("int32", (32, 100)))
    call = recorded(q, cache, cache, q, *pages, None, 1, 500, 0.0, 0.125, False, True, -1, -1, 0.0, False, 0, None)
    found = estimate_cost("_vllm_fa2_C::varlen_fwd", call)
    assert isinstance(found, Missing)
    assert "cache" in found.reason
    arguments = (q, q, q, q, ends, ends, *4 * [None], 1, 1, 0.0, 0.125, False, True, -1, -1, 0.0, False, 0, None)
    packed = estimate_cost("_vllm_fa2_C::varlen_fwd", recorded(*arguments))
    assert isinstance(packed, Cost)
    assert packed.matrix_flops == 4 * 32 * 8 * 64 // 2


@pytest.mark.parametrize("concrete", [True, False])
def test_unknown_causality_has_no_cost(concrete: bool, recorded: Callable[..., Signature]) -> None:
    q = ("bf16", (1, 8, 128, 64))
    found = estimate_cost("aten::_scaled_dot_product_flash_attention", recorded(q, q, q, 0.0, None, False, None, concrete=concrete))
    assert isinstance(found, Missing)
    assert "is_causal" in found.reason
