"""Quantised, sparse and grouped products, products of lists, regions of images: worked numbers on their schemas."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpudiag.model.ops import Cost

CostOf = Callable[..., Cost]
M, K, N = 32, 256, 128
FLOP = 2 * M * K * N


def test_int4_weights(cost: CostOf) -> None:
    """Half a byte a weight, a scale and a zero a group of 64: torch packs [n/8, k/128, 32, 4] int32."""
    x, packed, scales = ("bf16", (M, K)), ("int32", (N // 8, K // 128, 32, 4)), ("bf16", (K // 64, N, 2))
    found = cost("aten::_weight_int4pack_mm", x, packed, 64, scales)
    assert (found.matrix_flops, found.dtype) == (FLOP, "bf16")
    assert found.bytes == 2 * M * K + N * K // 2 + 2 * 2 * (K // 64) * N + 2 * M * N
    on_cpu = cost("aten::_weight_int4pack_mm_for_cpu", x, ("int8", (N, K // 2)), 64, scales)
    assert on_cpu == found


def test_int8_weights(cost: CostOf) -> None:
    found = cost("aten::_weight_int8pack_mm", ("bf16", (M, K)), ("int8", (N, K)), ("bf16", (N,)))
    assert (found.matrix_flops, found.bytes) == (FLOP, 2 * M * K + N * K + 2 * N + 2 * M * N)


def test_prepacked_linear_layers(cost: CostOf) -> None:
    mkl = cost("mkl::_mkl_linear", ("fp32", (M, K)), ("fp32", (1,)), ("fp32", (N, K)), None, M)
    assert (mkl.matrix_flops, mkl.bytes) == (FLOP, 4 * (M * K + N * K + M * N))
    scale = ("fp32", (N,))
    rest = (None, 1.0, 0, 6, "none", [], "")
    onednn = cost("onednn::qlinear_pointwise", ("int8", (M, K)), 0.1, 0, ("int8", (K, N)), scale, ("int32", (N,)), *rest)
    assert (onednn.matrix_flops, onednn.dtype) == (FLOP, "int8")
    assert onednn.bytes == M * K + K * N + 4 * N + 4 * N + 4 * M * N


def test_half_sparse_weights_do_half_of_the_work(cost: CostOf) -> None:
    weight, meta = ("fp16", (N, K // 2)), ("int16", (N, K // 16))
    linear = cost("aten::_sparse_semi_structured_linear", ("fp16", (M, K)), weight, meta, None)
    assert (2 * linear.matrix_flops, linear.provenance) == (FLOP, "derived")
    assert linear.bytes == 2 * (M * K + N * K // 2 + M * N) + 2 * N * K // 16
    product = cost("aten::_sparse_semi_structured_mm", weight, meta, ("fp16", (K, M)))
    assert (product.matrix_flops, product.bytes) == (linear.matrix_flops, linear.bytes)


def test_scaled_products_with_lists_of_scales(cost: CostOf) -> None:
    a, b, scales = ("fp8", (M, K)), ("fp8", (K, N), (1, K)), [(M, K // 32)]
    found = cost("aten::_scaled_mm_v2", a, b, scales, [1], [0], scales, [1], [0], None, 15, [], False)
    assert (found.matrix_flops, found.bytes) == (FLOP, M * K + K * N + 2 * M * N)
    for name in ("aten::_scaled_addmm", "aten::_scaled_addmm_"):
        added = cost(name, ("bf16", (M, N)), a, b, scales, [1], [0], scales, [1], [0], [], 1, 1, False)
        assert (added.matrix_flops, added.bytes, added.dtype) == (FLOP, M * K + K * N + 4 * M * N, "fp8")
    experts = ("fp8", (4, K, N), (K * N, 1, K))
    rest = (("int32", (4,)), None, 15, [], False)
    grouped = cost("aten::_scaled_grouped_mm_v2", a, experts, scales, [1], [0], scales, [1], [0], *rest)
    assert grouped.matrix_flops == FLOP  # every row meets one expert


def test_products_of_lists_and_two_products_at_once(cost: CostOf) -> None:
    listed = cost("aten::_foreach_mm", [(M, K), (2, 3)], [(K, N), (3, 5)])
    assert (listed.matrix_flops, listed.provenance) == (FLOP + 2 * 2 * 3 * 5, "derived")
    a, b = ("bf16", (M, K)), ("bf16", (K, N))
    both = cost("inductor::_mm_plus_mm", a, b, a, b, ("bf16", (M, N)))
    assert (both.matrix_flops, both.bytes) == (2 * FLOP, 2 * (2 * M * K + 2 * K * N + M * N))


@pytest.mark.parametrize(("name", "passes"), [("acos", 2), ("log1p_", 2), ("frac", 2), ("zero", 1), ("powsum", 1)])
def test_foreach_ops(name: str, passes: int, cost: CostOf) -> None:
    found = cost(f"aten::_foreach_{name}", [(1000,), (500, 2)])
    assert found.bytes == 4 * (passes * 2000 + (2 if name == "powsum" else 0))


def test_a_number_to_the_power_of_a_list(cost: CostOf) -> None:
    assert cost("aten::_foreach_pow", 2.0, [(1000,)]).bytes == 2 * 4 * 1000


def test_regions_of_interest(cost: CostOf) -> None:
    """100 boxes of 7 x 7 bins and 2 x 2 samples from a 256-channel image: each sample blends four pixels."""
    image, boxes = ("fp32", (2, 256, 200, 300)), ("fp32", (100, 5))
    found = cost("torchvision::roi_align", image, boxes, 0.25, 7, 7, 2, True)
    outputs = 100 * 256 * 49
    assert found.vector_flops == 8 * 4 * outputs
    assert found.bytes == min(4 * 2 * 256 * 200 * 300, 4 * 4 * 4 * outputs) + 4 * 500 + 4 * outputs
    back = cost("torchvision::_roi_align_backward", ("fp32", (100, 256, 7, 7)), boxes, 0.25, 7, 7, 2, 256, 200, 300, 2, True)
    assert back.bytes == 4 * outputs + 4 * 500 + 4 * 2 * 256 * 200 * 300
    pairs = cost("torchvision::nms", ("fp32", (1000, 4)), ("fp32", (1000,)), 0.5)
    assert pairs.vector_flops == 13 * 1000 * 1000 // 2


def test_deformable_convolution_has_the_flops_of_a_convolution(cost: CostOf) -> None:
    x, weight, offset = ("fp32", (2, 8, 16, 16)), ("fp32", (4, 8, 3, 3)), ("fp32", (2, 18, 16, 16))
    plain = cost("aten::convolution", x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    found = cost("torchvision::deform_conv2d", x, weight, offset, ("fp32", (2, 9, 16, 16)), ("fp32", (4,)))
    assert found.matrix_flops == plain.matrix_flops
    assert found.bytes == plain.bytes + 4 * 2 * (18 + 9) * 256 + 4 * 4


def test_transforms_have_five_n_log_n(cost: CostOf) -> None:
    """1024 complex points: 5 * 1024 * 10 FLOP; a real transform has half."""
    assert cost("aten::_fft_c2c", ("fp32", (8, 1024)), [1], 0, True).vector_flops == 8 * 5 * 1024 * 10
    assert cost("aten::_fft_r2c", ("fp32", (8, 1024)), [1], 0, True).vector_flops == 8 * 5 * 1024 * 10 // 2


def test_factorisations(cost: CostOf) -> None:
    """Leading orders of LAPACK Working Note 41 for n = 300."""
    a, b = ("fp64", (300, 300)), ("fp64", (300, 7))
    assert cost("aten::linalg_cholesky_ex", a, False, False).matrix_flops == 300**3 // 3
    assert cost("aten::linalg_lu_factor_ex", a, True, False).matrix_flops == 2 * 300**3 // 3
    assert cost("aten::_linalg_solve_ex", a, b, True, False).matrix_flops == 2 * 300**3 // 3 + 2 * 300**2 * 7
    assert cost("aten::linalg_solve_triangular", a, b, True, True, False).matrix_flops == 300**2 * 7


def test_ctc_lattice(cost: CostOf) -> None:
    """50 steps, batch 4, targets of at most 10: 21 states a step."""
    x = ("fp32", (50, 4, 30))
    found = cost("aten::_ctc_loss", x, ("int64", (4, 12)), [50] * 4, [10, 9, 8, 7], 0, False)
    cells = 50 * 4 * 21
    assert (found.vector_flops, found.provenance) == (6 * cells, "exact")
    assert found.bytes == 4 * cells + 8 * 48 + 4 * (cells + 4)
    unknown = cost("aten::_ctc_loss", x, ("int64", (4, 12)), ("int64", (4,)), ("int64", (4,)), 0, False)
    assert (unknown.vector_flops, unknown.provenance) == (6 * 50 * 4 * 25, "derived")


def test_sharded_parameters_are_copied_once(cost: CostOf) -> None:
    """FSDP's copies around its collectives: read once, written once."""
    assert cost("fsdp::split_with_sizes_copy", ("bf16", (8, 1000)), [600, 400], 1).bytes == 2 * 2 * 8000
    assert cost("fsdp::chunk_cat", [(1000,), (24,)], 0, 8, ("fp32", (8, 128))).bytes == 2 * 4 * 1024
