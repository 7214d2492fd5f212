"""Fused attention under other names than torch's own SDPA ops: torch.nn.attention.varlen, flash-attention, xFormers, segment-anything-fast.

Schemas: torch/nn/attention/varlen.py (torch 2.13); flash_attn/flash_attn_interface.py (flash-attention 2.7); xFormers
xformers/csrc/attention/attention.cpp; segment_anything_fast/flash_4.py.
"""

from __future__ import annotations

import msgspec

from gpudiag.model.cost import Cost
from gpudiag.model.signature import Input, Signature
from gpudiag.roofline.costs.arguments import flag, integer, present, tensor
from gpudiag.roofline.costs.attention import causal_mask, efficient_mask, forward, query_key_value, varlen
from gpudiag.roofline.costs.attention_shapes import Mask, Packing, heads_first, length_first, window_keys
from gpudiag.roofline.costs.registry import backward_costs, costs


def _packing(signature: Signature, ends: int, longest: int, window: int | None) -> Packing:
    """Return how sequences are packed: cu_seqlens at `ends`, max_q and max_k at `longest` and behind it."""
    sizes = (integer(signature, longest, "max_q"), integer(signature, longest + 1, "max_k"))
    return Packing(tensor(signature, ends, "cu_seqlens").numel - 1, sizes, window)


def _window(signature: Signature, at: int, mask: Mask) -> int | None:
    value = signature.value(at)
    sides = value if isinstance(value, tuple) and len(value) == 2 else (None, None)
    return window_keys(sides[0], sides[1], mask != "none")


def _torch_varlen(signature: Signature, first: int) -> Cost:
    mask = causal_mask(signature, first + 7, "bottom_right")
    packing = _packing(signature, first + 3, first + 5, _window(signature, first + 9, mask))
    return varlen(query_key_value(signature, first), packing, mask, [], backwards=False)


@costs("torch_attn::_varlen_attn", generic=False)
def torch_varlen(signature: Signature) -> Cost:
    """Return the cost of torch's packed attention (cu_seq 3-4, max 5-6, is_causal 7, window_size 9)."""
    return _torch_varlen(signature, 0)


@costs("torch_attn::_varlen_attn_out", generic=False)
def torch_varlen_out(signature: Signature) -> Cost:
    """Return the cost of the same into a given tensor, which stands before the query."""
    return _torch_varlen(signature, 1)


@costs("torch_attn::_varlen_attn_backward", generic=False)
def torch_varlen_backward(signature: Signature) -> Cost:
    """Return the cost of its backward (grad_out 0, q k v 1-3, out 4, lse 5, cu_seq 6-7, max 8-9, is_causal 10)."""
    mask = causal_mask(signature, 10, "bottom_right")
    packing = _packing(signature, 6, 8, _window(signature, 13, mask))
    return varlen(query_key_value(signature, 1), packing, mask, present(signature, 0, 4), backwards=True)


def _flash_varlen(signature: Signature, *, backwards: bool) -> Cost:
    """Return the cost of flash-attention's packed kernels as the forward's inputs tell it (cu_seqlens 3-4, max 5-6, causal 9)."""
    mask = causal_mask(signature, 9, "bottom_right")
    packing = _packing(signature, 3, 5, window_keys(signature.value(10), signature.value(11), mask != "none"))
    query, key, value = query_key_value(signature, 0)
    result = Input(dtype=query.dtype, shape=(*query.shape[:-1], value.shape[-1]))
    return varlen((query, key, value), packing, mask, [result, result] if backwards else [], backwards)


@costs("flash_attn::_flash_attn_varlen_forward", generic=False)
def flash_varlen_forward(signature: Signature) -> Cost:
    """Return the cost of flash-attention 2's packed forward."""
    return _flash_varlen(signature, backwards=False)


@backward_costs("flash_attn::_flash_attn_varlen_forward")
def flash_varlen_from_forward(signature: Signature) -> Cost:
    """Return the cost of its backward from the forward's inputs."""
    return _flash_varlen(signature, backwards=True)


@costs("flash_attn::_flash_attn_varlen_backward", generic=False)
def flash_varlen_backward(signature: Signature) -> Cost:
    """Return the cost of the packed backward op (dout 0, q k v 1-3, out 4, cu_seqlens 9-10, max 11-12, causal 15, windows 16-17)."""
    mask = causal_mask(signature, 15, "bottom_right")
    packing = _packing(signature, 9, 11, window_keys(signature.value(16), signature.value(17), mask != "none"))
    return varlen(query_key_value(signature, 1), packing, mask, present(signature, 0, 4), backwards=True)


@costs("aten::_flash_attention_forward_no_dropout_inplace", generic=False)
def flash_inplace(signature: Signature) -> Cost:
    """Return the cost of torch's flash kernel into a given tensor (out 0, q k v 1-3, cum_seq 4-5, max 6-7, is_causal 9, windows 12-13)."""
    mask = causal_mask(signature, 9, "bottom_right")
    window = window_keys(signature.value(12), signature.value(13), mask != "none")
    qkv = query_key_value(signature, 1)
    if signature.tensor(4) is not None:
        return varlen(qkv, _packing(signature, 4, 6, window), mask, [], backwards=False)
    return forward(length_first, qkv, mask, [], lse=True, window=window)


@costs("aten::_cudnn_attention_forward_no_dropout_inplace", generic=False)
def cudnn_inplace(signature: Signature) -> Cost:
    """Return the cost of cuDNN's packed forward into a given tensor (out 0, q k v 1-3, cum_seq 4-5, max 6-7, is_causal 8; torch 2.15)."""
    mask = causal_mask(signature, 8, "top_left")
    return varlen(query_key_value(signature, 1), _packing(signature, 4, 6, None), mask, [], backwards=False)


@costs("xformers::efficient_attention_forward_cutlass", generic=False)
def xformers_forward(signature: Signature) -> Cost:
    """Return the cost of xFormers' kernel (bias 3, seqstart 4-5, max_seqlen_q 6, compute_logsumexp 8, custom_mask_type 9, window 12)."""
    mask, others = efficient_mask(signature, 9), present(signature, 3)
    window = signature.value(12)
    keys = window if type(window) is int else None
    if signature.tensor(4) is not None:
        longest = integer(signature, 6, "max_seqlen_q")
        packing = Packing(tensor(signature, 4, "seqstart_q").numel - 1, (longest, longest), keys)
        return varlen(query_key_value(signature, 0), packing, mask, others, backwards=False)
    return forward(length_first, query_key_value(signature, 0), mask, others, flag(signature, 8, "compute_logsumexp"), keys)


@costs("aten::_triton_scaled_dot_attention", generic=False)
def triton_attention(signature: Signature) -> Cost:
    """Return the cost of torch's Triton attention for block-sparse inputs, dense: [batch, heads, length, dim], no mask."""
    return forward(heads_first, query_key_value(signature, 0), "none", [], lse=False)


@costs("customflash::custom_flash_aligned", generic=False)
def custom_flash(signature: Signature) -> Cost:
    """Return the cost of segment-anything-fast's kernel: dense attention that also reads the relative positions (rel_h_w 3).

    Its callers pad the heads to a power of two; what was recorded is counted, padding included (`derived`).
    """
    cost = forward(heads_first, query_key_value(signature, 0), "none", present(signature, 3), lse=False)
    return msgspec.structs.replace(cost, provenance="derived")


@backward_costs("torch_attn::_varlen_attn")
def torch_varlen_from_forward(signature: Signature) -> Cost:
    """Return the cost of the packed backward from the forward's inputs."""
    mask = causal_mask(signature, 7, "bottom_right")
    packing = _packing(signature, 3, 5, _window(signature, 9, mask))
    query, key, value = query_key_value(signature, 0)
    result = Input(dtype=query.dtype, shape=(*query.shape[:-1], value.shape[-1]))
    return varlen((query, key, value), packing, mask, [result, result], backwards=True)
