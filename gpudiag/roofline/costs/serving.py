"""Fused kernels of inference servers under their own operator names: vLLM, SGLang, AITER (attention: attention.py, experts: experts.py).

Schemas: vllm csrc/torch_bindings.cpp, csrc/moe/torch_bindings.cpp and vllm/_aiter_ops.py; sgl-kernel csrc/common_extension.cc; ROCm/aiter
aiter/ops (its group norm as its calls are recorded). Mostly, results come first and are written in place: they are not counted twice.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from gpudiag.model.ops import Cost, Input, Signature
from gpudiag.roofline.costs.arguments import (
    Flow,
    count_read_bytes,
    estimate_flow,
    present,
    register_flows,
    scalar_type,
    size_of,
    tensor,
    tensors,
)
from gpudiag.roofline.costs.gemm import MISFIT, build_matrix_cost, estimate_linear, multiply_shapes
from gpudiag.roofline.costs.libraries import estimate_rotation
from gpudiag.roofline.costs.registry import costs, reject, require


def _name_all(namespaces: str, names: str) -> str:
    return " ".join(f"{space}::{name}" for space in namespaces.split() for name in names.split())


register_flows(
    {
        "aiter::_groupnorm_run": Flow(reads=(0, 2, 3), writes=(0,), operations=8),
        # norms: into a given result, or (x, weight); with the sum of x and residual written too
        "_C::rms_norm sgl_kernel::rmsnorm sgl_kernel::gemma_rmsnorm aiter::rmsnorm": Flow(reads=(1, 2), writes=(0,), operations=4),
        "aiter::rms_norm aiter::rmsnorm2d_fwd_ck vllm::rocm_aiter_rms_norm": Flow(reads=(0, 1), writes=(0,), operations=4),
        "_C::fused_add_rms_norm sgl_kernel::fused_add_rmsnorm sgl_kernel::gemma_fused_add_rmsnorm": Flow(
            reads=(0, 1, 2), writes=(0, 1), operations=5
        ),
        "aiter::rmsnorm2d_fwd_with_add_ck aiter::add_rmsnorm": Flow(reads=(1, 2, 4), writes=(0, 3), operations=5),
        "vllm::rocm_aiter_rmsnorm2d_fwd_with_add": Flow(reads=(0, 1, 2), writes=(0, 1), operations=5),
        "_C::rms_norm_static_fp8_quant": Flow(reads=(1, 2, 3), writes=(0,), operations=6),
        "_C::fused_add_rms_norm_static_fp8_quant": Flow(reads=(1, 2, 3, 4), writes=(0, 2), operations=7),
        # activations: (result, input); gates halve their input
        _name_all("_C sgl_kernel aiter", "silu_and_mul") + " _C::mul_and_silu _C::silu_and_mul_quant": Flow(
            reads=(1, 2), writes=(0,), operations=6
        ),
        _name_all("_C sgl_kernel aiter", "gelu_and_mul"): Flow(reads=(1,), writes=(0,), operations=11),
        _name_all("_C sgl_kernel aiter", "gelu_tanh_and_mul"): Flow(reads=(1,), writes=(0,), operations=9),
        "_C::swigluoai_and_mul": Flow(reads=(1,), writes=(0,), operations=8),
        "_C::fatrelu_and_mul": Flow(reads=(1,), writes=(0,), operations=2),
        "_C::gelu_new _C::gelu_fast": Flow(reads=(1,), writes=(0,), operations=8),
        "_C::gelu_quick": Flow(reads=(1,), writes=(0,), operations=6),
        # quantisation: (result, input, scales) or (input, result, scales)
        "_C::static_scaled_fp8_quant _C::static_scaled_int8_quant": Flow(reads=(1, 2), writes=(0,), operations=2),
        "_C::dynamic_scaled_fp8_quant _C::dynamic_scaled_int8_quant": Flow(reads=(1,), writes=(0, 2), operations=3),
        "_C::dynamic_per_token_scaled_fp8_quant": Flow(reads=(1, 3), writes=(0, 2), operations=3),
        "_C::silu_and_mul_per_block_quant": Flow(reads=(1,), writes=(0, 2), operations=9),
        _name_all(
            "sgl_kernel",
            "sgl_per_token_group_quant_8bit sgl_per_token_group_quant_fp8 sgl_per_token_group_quant_int8 sgl_per_token_quant_fp8"
            " sgl_per_tensor_quant_fp8",
        ): Flow(reads=(0,), writes=(1, 2), operations=3),
        # routing of experts: the weights and numbers of the chosen ones of each token; the sum of what they gave
        "_moe_C::topk_softmax": Flow(reads=(3,), writes=(0, 1, 2), operations=5, per=3),
        "sgl_kernel::topk_softmax": Flow(reads=(2,), writes=(0, 1), operations=5, per=2),
        "_moe_C::moe_sum sgl_kernel::moe_sum sgl_kernel::moe_sum_reduce": Flow(reads=(0,), writes=(1,)),
    }
)


@costs("_C::rms_norm_dynamic_per_token_quant", "_C::rms_norm_per_block_quant")
def rms_norm_quant(signature: Signature) -> Cost:
    """Return the cost of a norm with quantisation: result 0, input 1, weight 2, scales 3; a residual (6), where given, is written too."""
    given = (6,) if signature.tensor(6) is not None else ()
    return estimate_flow(signature, Flow(reads=(1, 2, 5, *given), writes=(0, 3, *given), operations=7))


# positions 0, query 1, key 2; the rows of the cosine and sine table are not counted, which depend on the positions
costs("_C::rotary_embedding", "sgl_kernel::rotary_embedding")(partial(estimate_rotation, rotated=(1, 2), tables=(0,)))


@costs("_C_cache_ops::reshape_and_cache_flash", "_C_cache_ops::reshape_and_cache", "sglang::store_cache")
def write_cache(signature: Signature) -> Cost:
    """Return the bytes of writing keys and values to the paged cache (key 0, value 1, caches 2-3 in their own dtype, slots 4)."""
    key, value, cache = tensors(signature, "key", "value", "key_cache")
    return Cost(bytes=count_read_bytes((key, value, *present(signature, 4))) + size_of(key.numel + value.numel, cache.dtype))


@costs("_C_cache_ops::concat_and_cache_mla")
def write_latent_cache(signature: Signature) -> Cost:
    """Return the bytes of writing latent keys and values (0) and the rotated part (1) to one cache (2), at the slots 3."""
    latent, rotated, cache = tensors(signature, "kv_c", "k_pe", "kv_cache")
    return Cost(bytes=count_read_bytes((latent, rotated, *present(signature, 3))) + size_of(latent.numel + rotated.numel, cache.dtype))


def estimate_scaled_product(signature: Signature, first: int, out: int | None, dtype: int | None = None, *, rows: bool = False) -> Cost:
    """Estimate the cost of a product of quantised operands at `first` and behind it; what follows (scales, a bias) is read.

    The result is the tensor at `out`, or of the ScalarType at `dtype` (bf16 where that is not recorded: `derived`). `rows`: the second
    operand is the weight [n, k] of a linear layer. Two values of fp4 stand in a byte, in both operands.
    """
    a, b = tensor(signature, first, "a"), tensor(signature, first + 1, "b")
    multiply_adds, elements = multiply_shapes(a.shape, b.shape[::-1] if rows else b.shape)
    result = signature.tensor(out) if out is not None else None
    name = result.dtype if result is not None else scalar_type(signature, dtype or -1, "bf16")
    others = [index for index in range(first + 2, len(signature.inputs)) if index != out]
    packed = a.dtype in ("uint8", "fp4")
    moved = count_read_bytes((a, b, *present(signature, *others))) + size_of(elements, name)
    known = result is not None or type(signature.value(dtype or -1)) is int
    return build_matrix_cost(multiply_adds * (2 if packed else 1), "fp4" if packed else a.dtype, moved, "exact" if known else "derived")


_INTO = "_C::cutlass_scaled_mm _C::cutlass_scaled_mm_azp _C::dsv3_fused_a_gemm sgl_kernel::dsv3_fused_a_gemm"
_INTO_ROWS = "_C::cutlass_scaled_fp4_mm sgl_kernel::cutlass_scaled_fp4_mm sgl_kernel::dsv3_router_gemm"
_RETURNED = "sgl_kernel::fp8_scaled_mm sgl_kernel::int8_scaled_mm sgl_kernel::fp8_blockwise_scaled_mm"
_AITER = _name_all(
    "aiter",
    "gemm_a8w8_ck gemm_a8w8_bpreshuffle_ck gemm_a8w8_blockscale_ck gemm_a8w8_blockscale_cktile gemm_a8w8_blockscale_bpreshuffle_ck"
    " gemm_a8w8_blockscale_bpreshuffle_cktile flatmm_a8w8_blockscale_asm",
)
costs(*_INTO.split(), generic=False)(partial(estimate_scaled_product, first=1, out=0))
costs(*_INTO_ROWS.split(), generic=False)(partial(estimate_scaled_product, first=1, out=0, rows=True))
costs(*_RETURNED.split(), generic=False)(partial(estimate_scaled_product, first=0, out=None, dtype=4))
costs(*_AITER.split(), generic=False)(partial(estimate_scaled_product, first=0, out=4, rows=True))
costs("vllm::rocm_aiter_triton_gemm_a8w8_blockscale", generic=False)(
    partial(estimate_scaled_product, first=0, out=None, dtype=4, rows=True)
)
costs("aiter::gemm_a16w16", generic=False)(estimate_linear)


def estimate_packed_product(a: Input, signature: Signature, columns: int) -> Cost:
    """Estimate the cost of x (0) times a packed weight with `columns` outputs: multiplied in the type of x, packed values read once."""
    require(bool(a.shape) and columns > 0, MISFIT)
    rows = a.numel // max(a.shape[-1], 1)
    packed = [item for item in signature.inputs if item.is_tensor and item is not a]
    moved = a.distinct_bytes + count_read_bytes(packed) + size_of(rows * columns, a.dtype)
    return build_matrix_cost(rows * a.shape[-1] * columns, a.dtype, moved, "derived")


_NO_COLUMNS = "size_n was not recorded"


@costs("_C::marlin_gemm", "_C::gptq_marlin_gemm", "sgl_kernel::gptq_marlin_gemm", generic=False)
def marlin_gemm(signature: Signature) -> Cost:
    """Return the cost of Marlin's product: a 0; sizes m, n and k stand behind the type of the weights, after the last tensor.

    A result (1) that is given and the workspace are left out of what is read.
    """
    a = tensor(signature, 0, "a")
    require(len(a.shape) == 2, MISFIT)
    sizes = [(at, item.value) for at, item in enumerate(signature.inputs) if isinstance(item.value, int) and type(item.value) is int]
    require(all(later - at == 1 for (at, _), (later, _) in pairwise(sizes)), _NO_COLUMNS)
    found = [n for (_, m), (_, n), (_, k) in zip(sizes, sizes[1:], sizes[2:], strict=False) if (m, k) == a.shape]
    require(len(found) == 1, _NO_COLUMNS)
    vector = [item.dtype == "int32" and len(item.shape) == 1 for item in signature.inputs]
    read = Signature(tuple(item for at, item in enumerate(signature.inputs) if at != 1 and not vector[at]))
    return estimate_packed_product(read.inputs[0], read, found[0])


@costs("_C::awq_gemm", "_C::gptq_gemm", generic=False)
def weight_only_gemm(signature: Signature) -> Cost:
    """Return the cost of the product with scales 2 [groups, n] (AWQ) or 3 (GPTQ: zeros stand before them)."""
    a, scales = tensor(signature, 0, "a"), next((item for item in present(signature, 2, 3) if item.dtype in ("fp16", "bf16")), None)
    require(scales is not None and len(scales.shape) == 2, "scales were not recorded")
    return estimate_packed_product(a, signature, scales.shape[1] if scales is not None else 0)


_OUTSIDE = """
    vllm::moe_forward vllm::moe_forward_shared vllm::gdn_attention_core vllm::mamba_mixer vllm::mamba_mixer2 vllm::unified_attention
    vllm::unified_attention_with_output vllm::unified_mla_attention vllm::unified_mla_attention_with_output
    _C::paged_attention_v1 _C::paged_attention_v2
    """
costs(*_OUTSIDE.split(), generic=False)(
    partial(reject, reason="the layer's weights or its cache are no arguments: what it reads and multiplies was not recorded")
)
