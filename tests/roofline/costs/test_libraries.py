"""Fused kernels of other libraries: worked numbers on their public schemas, equal to torch's own ops where those exist."""

from __future__ import annotations

from collections.abc import Callable

from gpudiag.model.finding import Missing
from gpudiag.model.ops import Cost, Signature
from gpudiag.roofline.costs import estimate_cost
from gpudiag.roofline.costs.registry import BACKWARD_FORMULAS

CostOf = Callable[..., Cost]
X, GAMMA = ("bf16", (512, 1024)), ("bf16", (1024,))
SIZE = 2 * 512 * 1024


def test_norms(cost: CostOf, recorded: Callable[..., Signature]) -> None:
    """apex's layer norm is torch's but for the statistics, which stay within the library."""
    torch_norm = cost("aten::native_layer_norm", X, [1024], GAMMA, GAMMA, 1e-5)
    apex = cost("FusedLayerNormAffineFunction", X, GAMMA, GAMMA, None, None)
    assert apex.vector_flops == torch_norm.vector_flops
    assert torch_norm.bytes - apex.bytes == 2 * 4 * 512
    back = BACKWARD_FORMULAS["FusedRMSNormAffineFunction"](recorded(X, GAMMA, None, None))
    assert (back.bytes, back.vector_flops) == (3 * SIZE + 2 * 2 * 1024, 10 * 512 * 1024)
    assert cost("_C::rms_norm", X, X, GAMMA, 1e-6).bytes == 2 * SIZE + 2048
    assert cost("_C::fused_add_rms_norm", X, X, GAMMA, 1e-6).bytes == 4 * SIZE + 2048
    image = ("bf16", (1, 512, 32, 32))
    assert cost("aiter::_groupnorm_run", image, 32, ("bf16", (512,)), ("bf16", (512,)), 1e-6).bytes == 2 * (2 * 512 * 1024 + 2 * 512)


def test_gated_units_halve_their_input(cost: CostOf) -> None:
    assert cost("_C::silu_and_mul", X, ("bf16", (512, 2048))).bytes == 3 * SIZE


def test_rotation_is_in_place(cost: CostOf) -> None:
    query, key = ("bf16", (512, 4096)), ("bf16", (512, 1024))
    found = cost("_C::rotary_embedding", ("int64", (512,)), query, key, 128, ("bf16", (8192, 128)), True)
    assert found.bytes == 2 * 2 * 512 * (4096 + 1024) + 8 * 512
    without_key = cost("_C::rotary_embedding", ("int64", (512,)), query, None, 128, ("bf16", (8192, 128)), True)
    assert without_key.bytes == 2 * 2 * 512 * 4096 + 8 * 512


def test_quantised_caches_and_products(cost: CostOf) -> None:
    key, cache = ("bf16", (512, 8, 128)), ("fp8", (100, 16, 8, 128))
    written = cost("_C_cache_ops::reshape_and_cache_flash", key, key, cache, cache, ("int64", (512,)), "fp8", None, None)
    assert written.bytes == 2 * SIZE + 8 * 512 + SIZE
    scale = ("fp32", (1,))
    found = cost("_C::cutlass_scaled_mm", ("bf16", (512, 256)), ("fp8", (512, 1024)), ("fp8", (1024, 256), (1, 1024)), scale, scale, None)
    assert (found.matrix_flops, found.dtype) == (2 * 512 * 1024 * 256, "fp8")
    assert found.bytes == 512 * 1024 + 1024 * 256 + 8 + 2 * 512 * 256


def test_scaled_products_in_the_layouts_of_the_libraries(cost: CostOf) -> None:
    """The same product of 512 x 1024 by 1024 x 256: weights as columns or as rows, the result given, named or neither."""
    a, rows, columns, out, scale = (
        ("fp8", (512, 1024)),
        ("fp8", (256, 1024)),
        ("fp8", (1024, 256), (1, 1024)),
        ("bf16", (512, 256)),
        ("fp32", (1,)),
    )
    vllm = cost("_C::cutlass_scaled_mm", out, a, columns, scale, scale, None)
    assert vllm == cost("sgl_kernel::fp8_scaled_mm", a, columns, scale, scale, 15, None)
    assert vllm == cost("aiter::gemm_a8w8_blockscale_ck", a, rows, scale, scale, out)
    unnamed = cost("vllm::rocm_aiter_triton_gemm_a8w8_blockscale", a, rows, scale, scale, None)
    assert (unnamed.bytes, unnamed.provenance, vllm.provenance) == (vllm.bytes, "derived", "exact")
    half, quarter = ("uint8", (512, 512)), ("uint8", (256, 512))
    fp4 = cost("_C::cutlass_scaled_fp4_mm", out, half, quarter, scale, scale, scale)
    assert (fp4.matrix_flops, fp4.dtype) == (vllm.matrix_flops, "fp4")
    x, empty = ("bf16", (512, 1024)), ("bf16", (0,))
    engine = cost(
        "tex_ts::te_gemm_ts",
        rows,
        scale,
        0,
        6,
        1,
        a,
        scale,
        0,
        6,
        0,
        out,
        scale,
        5,
        scale,
        empty,
        5,
        empty,
        0,
        ("uint8", (4194304,)),
        4194304,
        0,
        0,
    )
    assert (engine.matrix_flops, engine.dtype) == (vllm.matrix_flops, "fp8")
    assert vllm.bytes - engine.bytes == 2 * 4  # the scales; nothing of the workspace
    packed, workspace = ("int32", (64, 512)), ("int32", (132,))
    tail = (None, None, None, workspace, 1125899906909960, 512, 256, 1024, True, False, True, False)
    marlin = cost("_C::gptq_marlin_gemm", x, None, packed, ("bf16", (8, 256)), None, *tail)
    assert (marlin.matrix_flops, marlin.dtype) == (vllm.matrix_flops, "bf16")
    assert marlin.bytes == 2 * 512 * 1024 + 4 * 64 * 512 + 2 * 8 * 256 + 2 * 512 * 256


def test_experts_read_what_their_tokens_choose(cost: CostOf, recorded: Callable[..., Signature]) -> None:
    """One token reads exactly the experts that it chooses, many tokens all of them; a map of experts leaves tokens to other ranks."""
    up, down = ("bf16", (64, 2048, 512)), ("bf16", (64, 512, 1024))
    one_expert = 2 * (2048 * 512 + 512 * 1024)
    for tokens, experts in ((1, 4.0), (10000, 64.0)):
        found = cost("vllm::outplace_fused_experts", ("bf16", (tokens, 512)), up, down, ("fp32", (tokens, 4)), ("int32", (tokens, 4)), None)
        assert found.matrix_flops == 2 * tokens * 4 * 512 * (2048 + 1024)
        assert found.bytes == 2 * 2 * tokens * 512 + 4 * tokens * 4 + experts * one_expert
        assert found.provenance == "derived"
    mapped = (("bf16", (8, 512)), up, down, ("fp32", (8, 4)), ("int32", (8, 4)), ("int32", (64,)))
    assert isinstance(estimate_cost("vllm::rocm_aiter_fused_moe", recorded(*mapped)), Missing)
    rows, wide = ("fp8", (4096, 512)), ("fp8", (64, 512, 2048))
    grouped = cost("_C::cutlass_moe_mm", ("bf16", (4096, 2048)), rows, wide, ("fp32", (1,)), ("fp32", (64,)))
    assert (grouped.matrix_flops, grouped.dtype) == (2 * 4096 * 512 * 2048, "fp8")


def test_what_stands_in_no_argument_has_no_cost(recorded: Callable[..., Signature]) -> None:
    for name in ("vllm::moe_forward", "vllm::unified_attention_with_output"):
        assert isinstance(estimate_cost(name, recorded(X, X, X, X)), Missing)


def test_liger(cost: CostOf, recorded: Callable[..., Signature]) -> None:
    assert cost("LigerRMSNormFunction", X, GAMMA, 1e-6).bytes == 2 * SIZE + 2048
    assert cost("LigerSiLUMulFunction", X, X).bytes == 3 * SIZE
    assert BACKWARD_FORMULAS["LigerSiLUMulFunction"](recorded(X, X)).bytes == 5 * SIZE
