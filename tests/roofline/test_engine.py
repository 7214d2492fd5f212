"""What kernel names tell about the engine of fp32 matrix work."""

from __future__ import annotations

import re

import pytest

from gpudiag.roofline.engine import FAST_NAMES, SLOW_NAMES

TENSOR_CORES = [
    "ampere_s1688gemm_tf32_128x128_ldg8_f2f_stages_32x5_tn",  # cuBLAS 11
    "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize64x64x64_stage3_warpsize2x2x1_tensor16x8x8",  # cuBLAS 11, 12
    "cutlass_80_tensorop_s1688gemm_256x64_16x4_tn_align4",
    "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16",  # cuDNN 8
]  # fmt: skip
VECTOR_UNITS = [
    "ampere_sgemm_32x128_tn",
    "volta_sgemm_128x64_nn",
    "cutlass_80_simt_sgemm_64x64_8x5_tn_align1",
    "volta_scudnn_128x64_relu_interior_nn_v1",
    "maxwell_gcgemm_ffma_64x32",
]


@pytest.mark.parametrize("name", TENSOR_CORES)
def test_names_of_tf32_kernels(name: str) -> None:
    assert re.search(FAST_NAMES, name)
    assert not re.search(SLOW_NAMES, name)


@pytest.mark.parametrize("name", VECTOR_UNITS)
def test_names_of_fp32_kernels(name: str) -> None:
    assert re.search(SLOW_NAMES, name)
    assert not re.search(FAST_NAMES, name)


def test_a_name_that_says_neither_decides_nothing() -> None:
    for name in ("nvjet_sm90_ssst_128x256", "Cijk_Ailk_Bljk_SB_MT128x128x16"):
        assert not re.search(FAST_NAMES, name)
        assert not re.search(SLOW_NAMES, name)
