"""Fused kernels of libraries under their own operator names: varlen attention, flash-attention, xFormers, apex, vLLM, AITER.

Schemas of attention: torch/nn/attention/varlen.py (torch 2.13); flash_attn/flash_attn_interface.py (flash-attention 2.7); xFormers
xformers/csrc/attention/attention.cpp; segment_anything_fast/flash_4.py.

Schemas of the others: NVIDIA/apex apex/normalization/fused_layer_norm.py (autograd functions, recorded under their class names); vllm
csrc/torch_bindings.cpp (results come first and are written in place); ROCm/aiter's group norm as its calls are recorded.
"""

from __future__ import annotations

from functools import partial

import msgspec

from gpudiag.model.ops import Cost, Input, Signature
from gpudiag.roofline.costs.arguments import Flow, count_read_bytes, estimate_flow, flag, integer, present, register_flows, size_of, tensor
from gpudiag.roofline.costs.attention import (
    Mask,
    Packing,
    count_window_keys,
    estimate_forward,
    estimate_varlen,
    heads_first,
    length_first,
    read_causal_mask,
    read_efficient_mask,
    read_query_key_value,
)
from gpudiag.roofline.costs.gemm import build_matrix_cost, multiply_shapes
from gpudiag.roofline.costs.registry import backward_costs, costs


def _read_packing(signature: Signature, ends: int, longest: int, window: int | None) -> Packing:
    """Return how sequences are packed: cu_seqlens at `ends`, max_q and max_k at `longest` and behind it."""
    sizes = (integer(signature, longest, "max_q"), integer(signature, longest + 1, "max_k"))
    return Packing(tensor(signature, ends, "cu_seqlens").numel - 1, sizes, window)


def _read_window(signature: Signature, at: int, mask: Mask) -> int | None:
    value = signature.value(at)
    sides = value if isinstance(value, tuple) and len(value) == 2 else (None, None)
    return count_window_keys(sides[0], sides[1], mask != "none")


def _estimate_torch_varlen(signature: Signature, first: int) -> Cost:
    mask = read_causal_mask(signature, first + 7, "bottom_right")
    packing = _read_packing(signature, first + 3, first + 5, _read_window(signature, first + 9, mask))
    return estimate_varlen(read_query_key_value(signature, first), packing, mask, [], backwards=False)


@costs("torch_attn::_varlen_attn", generic=False)
def torch_varlen(signature: Signature) -> Cost:
    """Return the cost of torch's packed attention (cu_seq 3-4, max 5-6, is_causal 7, window_size 9)."""
    return _estimate_torch_varlen(signature, 0)


@costs("torch_attn::_varlen_attn_out", generic=False)
def torch_varlen_out(signature: Signature) -> Cost:
    """Return the cost of the same into a given tensor, which stands before the query."""
    return _estimate_torch_varlen(signature, 1)


@costs("torch_attn::_varlen_attn_backward", generic=False)
def torch_varlen_backward(signature: Signature) -> Cost:
    """Return the cost of its backward (grad_out 0, q k v 1-3, out 4, lse 5, cu_seq 6-7, max 8-9, is_causal 10)."""
    mask = read_causal_mask(signature, 10, "bottom_right")
    packing = _read_packing(signature, 6, 8, _read_window(signature, 13, mask))
    return estimate_varlen(read_query_key_value(signature, 1), packing, mask, present(signature, 0, 4), backwards=True)


def _estimate_flash_varlen(signature: Signature, *, backwards: bool) -> Cost:
    """Estimate the cost of flash-attention's packed kernels as the forward's inputs tell it (cu_seqlens 3-4, max 5-6, causal 9)."""
    mask = read_causal_mask(signature, 9, "bottom_right")
    packing = _read_packing(signature, 3, 5, count_window_keys(signature.value(10), signature.value(11), mask != "none"))
    query, key, value = read_query_key_value(signature, 0)
    result = Input(dtype=query.dtype, shape=(*query.shape[:-1], value.shape[-1]))
    return estimate_varlen((query, key, value), packing, mask, [result, result] if backwards else [], backwards)


@costs("flash_attn::_flash_attn_varlen_forward", generic=False)
def flash_varlen_forward(signature: Signature) -> Cost:
    """Return the cost of flash-attention 2's packed forward."""
    return _estimate_flash_varlen(signature, backwards=False)


@backward_costs("flash_attn::_flash_attn_varlen_forward")
def flash_varlen_from_forward(signature: Signature) -> Cost:
    """Return the cost of its backward from the forward's inputs."""
    return _estimate_flash_varlen(signature, backwards=True)


@costs("flash_attn::_flash_attn_varlen_backward", generic=False)
def flash_varlen_backward(signature: Signature) -> Cost:
    """Return the cost of the packed backward op (dout 0, q k v 1-3, out 4, cu_seqlens 9-10, max 11-12, causal 15, windows 16-17)."""
    mask = read_causal_mask(signature, 15, "bottom_right")
    packing = _read_packing(signature, 9, 11, count_window_keys(signature.value(16), signature.value(17), mask != "none"))
    return estimate_varlen(read_query_key_value(signature, 1), packing, mask, present(signature, 0, 4), backwards=True)


@costs("aten::_flash_attention_forward_no_dropout_inplace", generic=False)
def flash_inplace(signature: Signature) -> Cost:
    """Return the cost of torch's flash kernel into a given tensor (out 0, q k v 1-3, cum_seq 4-5, max 6-7, is_causal 9, windows 12-13)."""
    mask = read_causal_mask(signature, 9, "bottom_right")
    window = count_window_keys(signature.value(12), signature.value(13), mask != "none")
    qkv = read_query_key_value(signature, 1)
    if signature.tensor(4) is not None:
        return estimate_varlen(qkv, _read_packing(signature, 4, 6, window), mask, [], backwards=False)
    return estimate_forward(length_first, qkv, mask, [], lse=True, window=window)


@costs("aten::_cudnn_attention_forward_no_dropout_inplace", generic=False)
def cudnn_inplace(signature: Signature) -> Cost:
    """Return the cost of cuDNN's packed forward into a given tensor (out 0, q k v 1-3, cum_seq 4-5, max 6-7, is_causal 8; torch 2.15)."""
    mask = read_causal_mask(signature, 8, "top_left")
    return estimate_varlen(read_query_key_value(signature, 1), _read_packing(signature, 4, 6, None), mask, [], backwards=False)


@costs("xformers::efficient_attention_forward_cutlass", generic=False)
def xformers_forward(signature: Signature) -> Cost:
    """Return the cost of xFormers' kernel (bias 3, seqstart 4-5, max_seqlen_q 6, compute_logsumexp 8, custom_mask_type 9, window 12)."""
    mask, others = read_efficient_mask(signature, 9), present(signature, 3)
    window = signature.value(12)
    keys = window if type(window) is int else None
    if signature.tensor(4) is not None:
        longest = integer(signature, 6, "max_seqlen_q")
        packing = Packing(tensor(signature, 4, "seqstart_q").numel - 1, (longest, longest), keys)
        return estimate_varlen(read_query_key_value(signature, 0), packing, mask, others, backwards=False)
    return estimate_forward(length_first, read_query_key_value(signature, 0), mask, others, flag(signature, 8, "compute_logsumexp"), keys)


@costs("aten::_triton_scaled_dot_attention", generic=False)
def triton_attention(signature: Signature) -> Cost:
    """Return the cost of torch's Triton attention for block-sparse inputs, dense: [batch, heads, length, dim], no mask."""
    return estimate_forward(heads_first, read_query_key_value(signature, 0), "none", [], lse=False)


@costs("customflash::custom_flash_aligned", generic=False)
def custom_flash(signature: Signature) -> Cost:
    """Return the cost of segment-anything-fast's kernel: dense attention that also reads the relative positions (rel_h_w 3).

    Its callers pad the heads to a power of two; what was recorded is counted, padding included (`derived`).
    """
    cost = estimate_forward(heads_first, read_query_key_value(signature, 0), "none", present(signature, 3), lse=False)
    return msgspec.structs.replace(cost, provenance="derived")


@backward_costs("torch_attn::_varlen_attn")
def torch_varlen_from_forward(signature: Signature) -> Cost:
    """Return the cost of the packed backward from the forward's inputs."""
    mask = read_causal_mask(signature, 7, "bottom_right")
    packing = _read_packing(signature, 3, 5, _read_window(signature, 9, mask))
    query, key, value = read_query_key_value(signature, 0)
    result = Input(dtype=query.dtype, shape=(*query.shape[:-1], value.shape[-1]))
    return estimate_varlen((query, key, value), packing, mask, [result, result], backwards=True)


_LAYER_NORMS = {"FusedLayerNormAffineFunction": 2, "FusedLayerNormAffineMixedDtypesFunction": 2, "FusedLayerNormFunction": 0}
_RMS_NORMS = {"FusedRMSNormAffineFunction": 1, "FusedRMSNormAffineMixedDtypesFunction": 1, "FusedRMSNormFunction": 0}


# apex's norms: x and parameters read, y written; backward: dy, x and parameters read, dx and their gradients written.
for _table, _flop, _backward_flop in ((_LAYER_NORMS, 8, 14), (_RMS_NORMS, 4, 10)):
    for _name, _count in _table.items():
        _parameters = tuple(range(1, _count + 1))
        _backward = Flow(reads=(0, 0, *_parameters), writes=(0, *_parameters), operations=_backward_flop, provenance="derived")
        register_flows({_name: Flow(reads=(0, *_parameters), writes=(0,), operations=_flop, provenance="derived")})
        backward_costs(_name)(partial(estimate_flow, flow=_backward))

register_flows(
    {
        "aiter::_groupnorm_run": Flow(reads=(0, 2, 3), writes=(0,), operations=8),
        "_C::rms_norm": Flow(reads=(1, 2), writes=(0,), operations=4),
        "_C::fused_add_rms_norm": Flow(reads=(0, 1, 2), writes=(0, 1), operations=5),
        "_C::silu_and_mul": Flow(reads=(1,), writes=(0,), operations=6),
        "_C::mul_and_silu": Flow(reads=(1,), writes=(0,), operations=6),
        "_C::gelu_and_mul": Flow(reads=(1,), writes=(0,), operations=11),
        "_C::gelu_tanh_and_mul": Flow(reads=(1,), writes=(0,), operations=9),
        "_C::static_scaled_fp8_quant": Flow(reads=(1, 2), writes=(0,), operations=2),
        "_C::dynamic_scaled_fp8_quant": Flow(reads=(1,), writes=(0, 2), operations=3),
        "_C::dynamic_per_token_scaled_fp8_quant": Flow(reads=(1, 3), writes=(0, 2), operations=3),
    }
)


@costs("_C::rotary_embedding")
def rotary_embedding(signature: Signature) -> Cost:
    """Return the cost of rotating queries and keys in place (positions 0, query 1, key 2): 3 FLOP an element.

    The rows of the cosine and sine table are not counted: they depend on the positions (`derived`).
    """
    rotated = [tensor(signature, 1, "query"), *present(signature, 2)]
    moved = count_read_bytes((*rotated, *present(signature, 0))) + sum(size_of(item.numel, item.dtype) for item in rotated)
    return Cost(vector_flops=3 * sum(item.numel for item in rotated), bytes=moved, provenance="derived")


@costs("_C_cache_ops::reshape_and_cache_flash", "_C_cache_ops::reshape_and_cache")
def write_cache(signature: Signature) -> Cost:
    """Return the bytes of writing keys and values to the paged cache (key 0, value 1, caches 2-3 in their own dtype, slots 4)."""
    key, value, cache = tensor(signature, 0, "key"), tensor(signature, 1, "value"), tensor(signature, 2, "key_cache")
    return Cost(bytes=count_read_bytes((key, value, *present(signature, 4))) + size_of(key.numel + value.numel, cache.dtype))


@costs("_C::cutlass_scaled_mm", generic=False)
def cutlass_scaled_mm(signature: Signature) -> Cost:
    """Return the cost of vLLM's fp8 or int8 product (out 0, a 1, b 2, scales 3-4, bias 5)."""
    out, a, b = (tensor(signature, index, name) for index, name in enumerate(("out", "a", "b")))
    multiply_adds, _ = multiply_shapes(a.shape, b.shape)
    return build_matrix_cost(multiply_adds, a.dtype, count_read_bytes((a, b, *present(signature, 3, 4, 5))) + size_of(out.numel, out.dtype))
