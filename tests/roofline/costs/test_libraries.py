"""Fused kernels of other libraries: worked numbers on their public schemas, equal to torch's own ops where those exist."""

from __future__ import annotations

from collections.abc import Callable

from gpudiag.model.ops import Cost, Signature
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
