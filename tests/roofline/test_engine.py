"""Which engine matrix work is judged against: names first, then recorded settings, then the rate, then the type."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from factories import A100, CPU
from handmade import call, costed, kernel, op, steps
from noticewords import format_notices

from gpudiag.model.bundle import Settings
from gpudiag.model.finding import Missing
from gpudiag.model.hardware import Device
from gpudiag.model.ops import Cost
from gpudiag.roofline.kernel_bounds import FAST_NAMES, SLOW_NAMES, list_engine_notices

CUBE = [[4096, 4096], [4096, 4096]]
CUBE_FLOP = 2 * 4096**3
CONV = [[32, 64, 56, 56], [64, 64, 3, 3], [], [], [], [], [], [], []]
CONV_ARGS = ["", "", "[1, 1]", "[1, 1]", "[1, 1]", "1", "False", "False", "True"]

FULL_A100 = msgspec.structs.replace(A100, peaks=A100.peaks | {"fp64": 9.7e12, "fp64_tensor": 19.5e12, "int8": 624e12})
V100 = msgspec.structs.replace(A100, name="V100", peaks={"fp32": 15.7e12, "fp16": 125e12, "fp64": 7.8e12})
RTX = msgspec.structs.replace(A100, name="RTX 4090", peaks={"fp32": 82.6e12, "tf32": 82.6e12, "fp16": 165.2e12, "fp16_fp16acc": 330.3e12})
MI300X = msgspec.structs.replace(
    A100,
    name="MI300X",
    vendor="amd",
    peaks={"fp32": 163.4e12, "fp32_tensor": 163.4e12, "tf32": 653.7e12, "fp64": 81.7e12, "fp64_tensor": 163.4e12, "bf16": 1307.4e12},
)
MI210 = msgspec.structs.replace(A100, name="MI210", vendor="amd", peaks={"fp32": 22.6e12, "fp32_tensor": 45.3e12, "bf16": 181e12})

TENSOR_CORES = [
    "ampere_s1688gemm_tf32_128x128_ldg8_f2f_stages_32x5_tn",  # cuBLAS 11
    "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize64x64x64_stage3_warpsize2x2x1_tensor16x8x8",  # cuBLAS 11, 12
    "cutlass_80_tensorop_s1688gemm_256x64_16x4_tn_align4",
    "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16",  # cuDNN 8
    "nvjet_sm90_ssst_128x256_64x4_1x2_h_bz_coopA_NTT",  # cuBLAS 12.6 and above
    "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float, ...)",
    "Cijk_Ailk_Bljk_S_MX_B_Bias_HA_S_SAV_UserArgs_MT128x128x32_MI16x16x1_SN",  # hipBLASLt, xf32
]  # fmt: skip
VECTOR_UNITS = [
    "ampere_sgemm_32x128_tn",
    "volta_sgemm_128x64_nn",
    "cutlass_80_simt_sgemm_64x64_8x5_tn_align1",
    "volta_scudnn_128x64_relu_interior_nn_v1",
    "maxwell_gcgemm_ffma_64x32",
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4",
    "void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int, int, int, float const*)",
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
    for name in ("triton_tem_fused_mm_0", "Cijk_Ailk_Bljk_SB_MT128x128x16_MI32x32x2x1", "attn_fwd"):
        assert not re.search(FAST_NAMES, name)
        assert not re.search(SLOW_NAMES, name)


def engine(
    kernels: str | tuple[str, ...] = "k",
    *,
    dtype: str = "float",
    device: Device | None = FULL_A100,
    settings: Settings | None = None,
    length: float = 20_000,
    **call_of: Any,
) -> tuple[str | None, str | None]:
    """Return (engine, what told it) of the first kernel of one matrix product (20 ms: 6.9 TFLOP/s) or of the given op."""
    names = (kernels,) if isinstance(kernels, str) else kernels
    launches = [call(10 + row, row + 1) for row in range(len(names))]
    runs = [kernel(100 + row * length, 100 + (row + 1) * length, row + 1, name) for row, name in enumerate(names)]
    made = op(call_of.pop("name", "aten::mm"), 5, 60, call_of.pop("shapes", CUBE), dtype=dtype, **call_of)
    row = costed(*steps(0, 100_000), made, *launches, *runs, device=device, settings=settings).kernels.row(0, named=True)
    assert row["flops"] > 0
    return row["engine"], row["engine_by"]


@pytest.mark.parametrize("name", TENSOR_CORES)
def test_a_name_comes_before_the_settings(name: str) -> None:
    forbidden = Settings(cuda_matmul_allow_tf32=False, float32_matmul_precision="highest")
    assert engine(name, settings=forbidden) == ("tf32", "name")


@pytest.mark.parametrize("name", VECTOR_UNITS)
def test_vector_units_by_name_though_tf32_is_allowed(name: str) -> None:
    assert engine(name, settings=Settings(cuda_matmul_allow_tf32=True)) == ("fp32", "name")


def test_settings_decide_where_the_name_does_not() -> None:
    assert engine(settings=Settings(cuda_matmul_allow_tf32=True)) == ("tf32", "settings")
    assert engine(settings=Settings(float32_matmul_precision="high")) == ("tf32", "settings")
    assert engine(settings=Settings(cuda_matmul_allow_tf32=False, cudnn_allow_tf32=True)) == ("fp32", "settings")
    assert engine() == ("fp32", "type")


def test_convolutions_heed_the_setting_of_cudnn() -> None:
    conv = {"name": "aten::cudnn_convolution", "shapes": CONV, "concrete": CONV_ARGS}
    assert engine(settings=Settings(cudnn_allow_tf32=True, cuda_matmul_allow_tf32=False), **conv) == ("tf32", "settings")
    assert engine(settings=Settings(cudnn_allow_tf32=False, cuda_matmul_allow_tf32=True), **conv) == ("fp32", "settings")


def test_a_rate_that_vector_units_cannot_reach_tells_tf32_also_against_the_settings() -> None:
    assert engine(length=1300) == ("tf32", "rate")  # 106 TFLOP/s
    assert engine(length=1300, settings=Settings(cuda_matmul_allow_tf32=False)) == ("tf32", "rate")


def test_no_tf32_before_ampere() -> None:
    for settings in (None, Settings(cuda_matmul_allow_tf32=True)):
        assert engine(device=V100, settings=settings, length=1300) == ("fp32", "type")


def test_16_bit_types_run_on_matrix_units_unless_the_name_says_otherwise() -> None:
    half, brain = "c10::Half", "c10::BFloat16"
    assert engine(dtype=brain) == ("bf16", "type")
    assert engine("ampere_bf16_s16816gemm_bf16_128x256_ldg8_relu_f2f_stages_64x3_tn", dtype=brain) == ("bf16", "name")
    assert engine("void precomputed_convolve_sgemm<__nv_bfloat16, 512, 6, 7, 4, 3, 5, 1, false>", dtype=brain) == ("fp32", "name")
    assert engine("void gemv2T_kernel_val<int, int, __half, __half, __half, float, 128, 16>", dtype=half) == ("fp32", "name")
    assert engine("volta_h884gemm_128x128_nn", dtype=half, device=V100) == ("fp16", "type")  # same rate with fp16 sums there


def test_a_call_with_one_tensor_core_kernel_is_judged_by_tensor_cores() -> None:
    names = ("ampere_sgemm_32x128_tn", "cutlass_80_tensorop_s1688gemm_256x64_16x4_tn_align4")
    assert engine(names) == ("tf32", "name")


def test_fp16_accumulation_on_geforce_by_name() -> None:
    assert engine("ampere_h16816gemm_128x128_ldg8_stages_64x3_tn", dtype="c10::Half", device=RTX) == ("fp16_fp16acc", "name")
    assert engine("ampere_fp16_s16816gemm_fp16_128x128_ldg8_tn", dtype="c10::Half", device=RTX) == ("fp16", "name")


def test_fp64_on_tensor_cores_unless_named_otherwise() -> None:
    assert engine(dtype="double") == ("fp64_tensor", "type")
    assert engine("cutlass_80_tensorop_d884gemm_128x64_16x3_nn_align1", dtype="double") == ("fp64_tensor", "name")
    assert engine("volta_dgemm_64x64_nn", dtype="double") == ("fp64", "name")
    assert engine(dtype="double", device=V100) == ("fp64", "type")


def test_amd_fp32_runs_on_matrix_instructions_where_the_name_has_one() -> None:
    matrix = "Cijk_Ailk_Bljk_S_B_Bias_HA_S_SAV_UserArgs_MT16x16x128_MI16x16x1_SN_LDSB1"
    vector = "Cijk_Ailk_Bljk_SB_MT64x64x8_SE_TT4_4_USFGRO0_VAW1_WG16_16_1"
    assert engine(matrix, device=MI210) == ("fp32_tensor", "type")
    assert engine(vector, device=MI210) == ("fp32", "name")
    assert engine("Cijk_Alik_Bljk_S_MX_B_MT128x128_MI32x32x1", device=MI300X) == ("tf32", "name")
    # allowing TF32 is not enough on ROCm
    assert engine(matrix, device=MI300X, settings=Settings(cuda_matmul_allow_tf32=True)) == ("fp32_tensor", "type")


def test_medium_precision_on_a_cpu_is_bf16_where_that_is_faster() -> None:
    def on_cpu(device: Device) -> Any:
        events = [*steps(0, 1000), op("aten::mm", 0, 900, [[64, 64], [64, 64]])]
        made = costed(*events, device=device, on_cpu=True, settings=Settings(float32_matmul_precision="medium"))
        return made.kernels.select("engine", "engine_by").row(0)

    assert on_cpu(msgspec.structs.replace(CPU, peaks={"fp32": 1e12, "bf16": 8e12})) == ("bf16", "settings")
    assert on_cpu(msgspec.structs.replace(CPU, peaks={"fp32": 1e12, "bf16": 0.5e12})) == ("fp32", "type")


def test_no_device_no_engine() -> None:
    assert engine("ampere_sgemm_32x128_tn", device=None) == (None, None)


def test_types_without_a_path_of_their_own_are_said() -> None:
    costs = [Cost(matrix_flops=1, dtype=dtype) for dtype in ("fp8", "fp8", "bf16", "fp64")] + [Cost(bytes=1), Missing("nothing known")]
    assert format_notices(list_engine_notices(costs, FULL_A100)) == (
        "A100 has no fp8 matrix path: such work is judged against its bf16 path",
    )
    assert format_notices(list_engine_notices(costs, V100)) == (
        "V100 has no bf16 matrix path: such work is judged against its vector units at the fp32 rate",
        "V100 has no fp8 matrix path: such work is judged against its fp16 path",
    )
    integers = [Cost(matrix_flops=1, dtype="int8")]
    assert format_notices(list_engine_notices(integers, V100)) == ("no int8 peak of V100 is known: matrix work of that type has no roof",)
    assert list_engine_notices(costs, None) == ()
