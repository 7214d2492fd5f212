"""Mixtures of experts: fused experts and grouped products of vLLM, SGLang and AITER.

FLOP: 2 * rows * n * k of each product, a row for each chosen expert of each token: exact. Bytes: which experts are chosen is data. As if
the router spread the tokens evenly at random, t tokens that choose c of E experts touch E (1 - (1 - c/E)^t) of them (load-balancing losses
aim at it): `derived`. A router that prefers some experts reads less.

Schemas: vllm vllm/model_executor/layers/fused_moe/fused_moe.py, vllm/_aiter_ops.py, csrc/torch_bindings.cpp; sglang
srt/layers/moe/fused_moe_triton/fused_moe.py; sgl-kernel csrc/common_extension.cc; ROCm/aiter aiter/ops/moe_op.py.
"""

from __future__ import annotations

from functools import partial

from gpudiag.model.ops import Cost, Input, Signature
from gpudiag.roofline.costs.arguments import size_of, tensor, tensors
from gpudiag.roofline.costs.gemm import MISFIT, build_matrix_cost
from gpudiag.roofline.costs.registry import costs, require

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
    x, up, down, chosen = tensors(signature, "hidden_states", "w1", "w2", "topk_weights")
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
    x, weights, result = tensor(signature, a, "a"), tensor(signature, b, "b"), tensor(signature, out, "out")
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
    costs(*_names.split(), generic=False)(partial(estimate_grouped_rows, a=_a, b=_b, out=_out))
