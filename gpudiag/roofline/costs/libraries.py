"""Fused kernels of libraries under their own operator names: apex, vLLM, AITER (their attention: attention.py).

Schemas: NVIDIA/apex apex/normalization/fused_layer_norm.py (autograd functions, recorded under their class names); vllm
csrc/torch_bindings.cpp (results come first and are written in place); ROCm/aiter's group norm as its calls are recorded.
"""

from __future__ import annotations

from functools import partial

from gpudiag.model.ops import Cost, Signature
from gpudiag.roofline.costs.arguments import Flow, count_read_bytes, estimate_flow, present, register_flows, size_of, tensor, tensors
from gpudiag.roofline.costs.gemm import build_matrix_cost, multiply_shapes
from gpudiag.roofline.costs.registry import backward_costs, costs

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
    key, value, cache = tensors(signature, "key", "value", "key_cache")
    return Cost(bytes=count_read_bytes((key, value, *present(signature, 4))) + size_of(key.numel + value.numel, cache.dtype))


@costs("_C::cutlass_scaled_mm", generic=False)
def cutlass_scaled_mm(signature: Signature) -> Cost:
    """Return the cost of vLLM's fp8 or int8 product (out 0, a 1, b 2, scales 3-4, bias 5)."""
    out, a, b = tensors(signature, "out", "a", "b")
    multiply_adds, _ = multiply_shapes(a.shape, b.shape)
    return build_matrix_cost(multiply_adds, a.dtype, count_read_bytes((a, b, *present(signature, 3, 4, 5))) + size_of(out.numel, out.dtype))
