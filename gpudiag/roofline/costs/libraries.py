"""Fused kernels of libraries for training and of inference servers under their own operator names (attention: attention.py).

Mixtures of experts. FLOP: 2 * rows * n * k of each product, a row for each chosen expert of each token: exact. Bytes: which experts are
chosen is data. As if the router spread the tokens evenly at random, t tokens that choose c of E experts touch E (1 - (1 - c/E)^t) of them
(load-balancing losses aim at it): `derived`. A router that prefers some experts reads less.

Schemas. apex: NVIDIA/apex apex/normalization/fused_layer_norm.py; Liger: linkedin/Liger-Kernel src/liger_kernel/ops (autograd functions,
recorded under their class names); Transformer Engine: NVIDIA/TransformerEngine transformer_engine/pytorch/csrc/ts_fp8_op.cpp (1.x; later
versions bind their products without an operator, so that nothing is recorded of them); vllm csrc/torch_bindings.cpp,
csrc/moe/torch_bindings.cpp, vllm/_aiter_ops.py, vllm/model_executor/layers/fused_moe/fused_moe.py; sglang
srt/layers/moe/fused_moe_triton/fused_moe.py; sgl-kernel csrc/common_extension.cc; ROCm/aiter aiter/ops (its group norm as its calls
are recorded). Mostly, results of servers come first and are written in place: they are not counted twice.
"""

from __future__ import annotations

from itertools import pairwise

from gpudiag.model.ops import Cost, Input, Signature
from gpudiag.roofline.costs.gemm import MISFIT, build_matrix_cost, estimate_linear, multiply_shapes
from gpudiag.roofline.costs.registry import (
    Flow,
    backward_costs,
    costs,
    count_read_bytes,
    estimate_flow,
    register_flows,
    reject,
    require,
    size_of,
)

_LAYER_NORMS = {"FusedLayerNormAffineFunction": 2, "FusedLayerNormAffineMixedDtypesFunction": 2, "FusedLayerNormFunction": 0}
_LAYER_NORMS["LigerLayerNormFunction"] = 2
_RMS_NORMS = {"FusedRMSNormAffineFunction": 1, "FusedRMSNormAffineMixedDtypesFunction": 1, "FusedRMSNormFunction": 0}
_RMS_NORMS["LigerRMSNormFunction"] = 1


# Norms of apex and Liger: x and parameters read, y written; backward: dy, x and parameters read, dx and their gradients written.
for _table, _flop, _backward_flop in ((_LAYER_NORMS, 8, 14), (_RMS_NORMS, 4, 10)):
    for _name, _count in _table.items():
        _parameters = tuple(range(1, _count + 1))
        _backward = Flow(reads=(0, 0, *_parameters), writes=(0, *_parameters), operations=_backward_flop, provenance="derived")
        register_flows({_name: Flow(reads=(0, *_parameters), writes=(0,), operations=_flop, provenance="derived")})
        backward_costs(_name, flow=_backward)(estimate_flow)

# Liger's gated units (a, b): both read, one written; backward: dc, a and b read, da and db written.
for _name, _flop, _backward_flop in (("LigerSiLUMulFunction", 6, 10), ("LigerGELUMulFunction", 9, 14)):
    register_flows({_name: Flow(reads=(0, 1), writes=(0,), operations=_flop)})
    backward_costs(_name, flow=Flow(reads=(0, 0, 1), writes=(0, 1), operations=_backward_flop, provenance="derived"))(estimate_flow)

register_flows(
    {
        "LigerFusedAddRMSNormFunction": Flow(reads=(0, 1, 2), writes=(0, 0), operations=5),
        # the loss and, in the same pass, its gradient in place of the logits
        "LigerCrossEntropyFunction": Flow(reads=(0, 1), writes=(0,), operations=8, provenance="derived"),
    }
)


def estimate_rotation(signature: Signature, rotated: tuple[int, ...], tables: tuple[int, ...]) -> Cost:
    """Estimate the cost of rotating tensors in place: 3 FLOP an element. `tables`: positions, or the cosines and sines of these rows."""
    turned = [signature.need(rotated[0], "query"), *signature.tensors(*rotated[1:])]
    moved = count_read_bytes((*turned, *signature.tensors(*tables))) + sum(size_of(item.numel, item.dtype) for item in turned)
    return Cost(vector_flops=3 * sum(item.numel for item in turned), bytes=moved, provenance="derived")


costs("LigerRopeFunction", rotated=(0, 1), tables=(2, 3))(estimate_rotation)
backward_costs("LigerRopeFunction", rotated=(0, 1), tables=(2, 3))(estimate_rotation)


@costs("tex_ts::te_gemm_ts", generic=False)
def te_gemm(signature: Signature) -> Cost:
    """Return the cost of Transformer Engine's product: A 0, transa 4, B 5, D 10, bias 14, accumulate 20. cuBLAS lays out by columns, so
    that D [m, n] = B [m, k] A^T [k, n] for transa. Operands of a byte are fp8, which it stores as such; the workspace is none of the work.
    """
    a, b, d = (signature.need(index, name) for index, name in ((0, "A"), (5, "B"), (10, "D")))
    require(len(a.shape) == len(b.shape) == len(d.shape) == 2, MISFIT)
    k = a.shape[1] if signature.integer(4, "transa") else a.shape[0]
    require(d.numel * k * k == a.numel * b.numel, MISFIT)
    written = (2 if signature.value(20) else 1) * size_of(d.numel, d.dtype)
    dtype = "fp8" if a.dtype == "uint8" else a.dtype
    return build_matrix_cost(d.numel * k, dtype, count_read_bytes((a, b, *signature.tensors(14))) + written)


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
        # keys and values, and latent ones with their rotated part, written to a paged cache in its own dtype; slots read
        "_C_cache_ops::reshape_and_cache_flash _C_cache_ops::reshape_and_cache sglang::store_cache": Flow(
            reads=(0, 1, 4), writes=(0, 1), operations=0, like=2
        ),
        "_C_cache_ops::concat_and_cache_mla": Flow(reads=(0, 1, 3), writes=(0, 1), operations=0, like=2),
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
costs("_C::rotary_embedding", "sgl_kernel::rotary_embedding", rotated=(1, 2), tables=(0,))(estimate_rotation)


def estimate_scaled_product(signature: Signature, first: int, out: int | None, dtype: int | None = None, *, rows: bool = False) -> Cost:
    """Estimate the cost of a product of quantised operands at `first` and behind it; what follows (scales, a bias) is read.

    The result is the tensor at `out`, or of the ScalarType at `dtype` (bf16 where that is not recorded: `derived`). `rows`: the second
    operand is the weight [n, k] of a linear layer. Two values of fp4 stand in a byte, in both operands.
    """
    a, b = signature.need(first, "a"), signature.need(first + 1, "b")
    multiply_adds, elements = multiply_shapes(a.shape, b.shape[::-1] if rows else b.shape)
    result = signature.tensor(out) if out is not None else None
    name = result.dtype if result is not None else signature.scalar_type(dtype or -1, "bf16")
    others = [index for index in range(first + 2, len(signature.inputs)) if index != out]
    packed = a.dtype in ("uint8", "fp4")
    moved = count_read_bytes((a, b, *signature.tensors(*others))) + size_of(elements, name)
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
costs(*_INTO.split(), generic=False, first=1, out=0)(estimate_scaled_product)
costs(*_INTO_ROWS.split(), generic=False, first=1, out=0, rows=True)(estimate_scaled_product)
costs(*_RETURNED.split(), generic=False, first=0, out=None, dtype=4)(estimate_scaled_product)
costs(*_AITER.split(), generic=False, first=0, out=4, rows=True)(estimate_scaled_product)
costs("vllm::rocm_aiter_triton_gemm_a8w8_blockscale", generic=False, first=0, out=None, dtype=4, rows=True)(estimate_scaled_product)
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
    a = signature.need(0, "a")
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
    a, scales = signature.need(0, "a"), next((item for item in signature.tensors(2, 3) if item.dtype in ("fp16", "bf16")), None)
    require(scales is not None and len(scales.shape) == 2, "scales were not recorded")
    return estimate_packed_product(a, signature, scales.shape[1] if scales is not None else 0)


_OUTSIDE = """
    vllm::moe_forward vllm::moe_forward_shared vllm::gdn_attention_core vllm::mamba_mixer vllm::mamba_mixer2 vllm::unified_attention
    vllm::unified_attention_with_output vllm::unified_mla_attention vllm::unified_mla_attention_with_output
    _C::paged_attention_v1 _C::paged_attention_v2
    """
costs(
    *_OUTSIDE.split(),
    generic=False,
    reason="the layer's weights or its cache are no arguments: what it reads and multiplies was not recorded",
)(reject)


PACKED = ("uint8", "fp4", "int32")
"""Types of weights that hold several values in an element."""


def count_touched_bytes(weights: Input, tokens: int, chosen: int) -> int:
    """Count the bytes of `weights` [experts, ...] that are read where each of `tokens` chooses so many experts, all alike likely."""
    require(len(weights.shape) == 3 and weights.shape[0] >= chosen > 0, MISFIT)
    return round(weights.distinct_bytes * (1 - (1 - chosen / weights.shape[0]) ** tokens))


@costs(
    "vllm::inplace_fused_experts",
    "vllm::outplace_fused_experts",
    "vllm::fused_experts",
    "sglang::inplace_fused_experts",
    "sglang::outplace_fused_experts",
    "vllm::rocm_aiter_fused_moe",
    "aiter::fused_moe_",
    generic=False,
)
def fused_experts(signature: Signature) -> Cost:
    """Return the cost of two products with an activation between: x 0, w1 1 [E, 1 or 2 I, H], w2 2 [E, H, I], weights of the chosen 3.

    Where a map or mask of experts is given, other ranks do a part that was not recorded.
    """
    x, up, down, chosen = signature.need_all("hidden_states", "w1", "w2", "topk_weights")
    require(len(x.shape) == 2 and len(chosen.shape) == 2 and len(up.shape) == len(down.shape) == 3, MISFIT)
    mapped = any(item.dtype in ("int32", "int64") and len(item.shape) == 1 for item in signature.inputs[5:])
    require(not mapped, "a map of experts: which of the tokens go to other ranks was not recorded")
    (tokens, hidden), choices = x.shape, chosen.shape[1]
    values = hidden // max(up.shape[2], 1)  # in one stored element of the weights
    require(
        values * up.shape[2] == hidden and down.shape[1] == hidden and up.shape[1] in (down.shape[2] * values * gated for gated in (1, 2)),
        MISFIT,
    )
    inner = down.shape[2] * values
    # between the products nothing has to reach memory
    moved = 2 * x.distinct_bytes + chosen.distinct_bytes + sum(count_touched_bytes(item, tokens, choices) for item in (up, down))
    dtype = up.dtype if up.dtype in ("fp8", "int8") else "fp4" if values == 2 and up.dtype in PACKED else x.dtype
    return build_matrix_cost(tokens * choices * hidden * (up.shape[1] + inner), dtype, moved, "derived")


def estimate_grouped_rows(signature: Signature, a: int, b: int, out: int) -> Cost:
    """Estimate the cost of rows that are sorted by expert: a [rows, k], b [E, ...] and out [rows, n] at these positions."""
    x, weights, result = signature.need(a, "a"), signature.need(b, "b"), signature.need(out, "out")
    require(len(x.shape) == 2 and len(result.shape) == 2 and x.shape[0] == result.shape[0] and len(weights.shape) == 3, MISFIT)
    values = 2 if x.dtype in ("uint8", "fp4") else 1
    k, n = x.shape[1] * values, result.shape[1]
    require(k * n in (weights.numel // weights.shape[0] * packed for packed in (1, 2)), MISFIT)
    moved = x.distinct_bytes + size_of(result.numel, result.dtype) + count_touched_bytes(weights, x.shape[0], 1)
    return build_matrix_cost(x.shape[0] * k * n, "fp4" if values == 2 else x.dtype, moved, "derived")


for _names, _a, _b, _out in (
    ("_C::cutlass_moe_mm _C::cutlass_fp4_group_mm sgl_kernel::cutlass_fp4_group_mm sgl_kernel::cutlass_w4a8_moe_mm", 1, 2, 0),
    ("_C::cutlass_mxfp8_grouped_mm", 0, 1, 4),
    ("sgl_kernel::fp8_blockwise_scaled_grouped_mm", 6, 7, 0),
):
    costs(*_names.split(), generic=False, a=_a, b=_b, out=_out)(estimate_grouped_rows)
