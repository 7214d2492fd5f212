"""Types of tensors from the names of kernels, where a recording holds sizes alone."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from noticewords import format_notices
from nsysfile import NsysFile

from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.steps import find_steps
from gpudiag.model.trace import Trace
from gpudiag.roofline.attributed_ops import find_attributed_ops
from gpudiag.roofline.element_types import infer_named_types
from gpudiag.trace import read_trace

_BF16, _HALF = "c10::BFloat16", "c10::Half"


def typed(tmp_path: Path, op: str, kernels: list[str], sizes: str = "[[8, 16], [16, 4], []]") -> tuple[Trace, tuple[str, ...]]:
    """Return the trace of one op that launched `kernels` of 10 us each, and the warnings."""
    file = NsysFile()
    file.range(f"{op}, seq = 1, sizes = {sizes}", 0, 1_000 * len(kernels))
    for number, kernel in enumerate(kernels):
        file.call("cudaLaunchKernel_v7000", 1_000 * number, 1_000 * number + 500, 10 + number)
        file.kernel(kernel, 100_000 + 20_000 * number, 110_000 + 20_000 * number, 10 + number)
    trace = read_trace(file.write(tmp_path / "run.sqlite"))
    trace, notices = infer_named_types(link_kernels(trace, find_steps(trace).table, on_cpu=False)[0])
    return trace, format_notices(notices)


def types(trace: Trace) -> str | None:
    row: str | None = trace.signatures["dtypes"][trace.ops["signature"][0]]
    return row


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", _BF16),
        ("sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_stage3_warpsize2x2x1_tensor16x8x16_kernel", _BF16),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>(cutlass::Params)", _BF16),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", _BF16),
        ("nvjet_sm100_tst_128x256_64x4_2x1_v_bz_TNN", _BF16),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul> >(int)",
            _BF16,
        ),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, false>(float)", _BF16),
        ("turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_nn", _HALF),
        ("volta_h884gemm_128x64_ldg8_nn", _HALF),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_TNN", _HALF),
        ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, cutlass::half_t>>()", _HALF),
        ("ampere_sgemm_128x64_tn", "float"),
        ("cutlass_80_tensorop_s1688gemm_128x256_16x3_nn_align4", "float"),
        ("void gemmSN_TN_kernel<float, 128, 16, 2, 4, 4, 9, false>(cublasGemvTensorStridedBatched<double const>)", "float"),
        ("ampere_dgemm_64x64_nn", "double"),
        ("nvjet_qqtst_128x256_64x4_TNN", None),
        ("some_kernel", None),
    ],
)
def test_the_name_of_the_kernel_tells_the_type(tmp_path: Path, kernel: str, dtype: str | None) -> None:
    trace, [warning] = typed(tmp_path, "aten::mm", [kernel])
    assert types(trace) == (f'["{dtype}","{dtype}",""]' if dtype else None)
    assert ("for 100 %" in warning) == (dtype is not None)


@pytest.mark.parametrize(
    ("op", "kernels"),
    [
        ("aten::mm", ["ampere_sgemm_128x64_tn", "ampere_bf16_s16816gemm_bf16_128x128"]),
        ("aten::embedding", ["void at::native::index_select<float>()"]),
        ("aten::cat", ["void at::native::CatArrayBatchedCopy<float>()"]),
        ("aten::mm", []),
    ],
)
def test_names_that_disagree_and_ops_of_mixed_types_stay_unknown(tmp_path: Path, op: str, kernels: list[str]) -> None:
    trace, _ = typed(tmp_path, op, kernels)
    assert types(trace) is None


def test_a_matrix_product_gets_its_worked_cost(tmp_path: Path) -> None:
    """[8, 16] x [16, 4]: 2 x 8 x 16 x 4 = 1024 FLOP, (128 + 64 + 32) x 2 = 448 B in bf16."""
    trace, _ = typed(tmp_path, "aten::mm", ["ampere_bf16_s16816gemm_bf16_128x128"], "[[8, 16], [16, 4]]")
    owners = find_attributed_ops(trace, on_cpu=False)
    [cost] = [owners.costs[call] for call in owners.call]
    assert (cost.matrix_flops, cost.dtype, cost.bytes) == (1024, "bf16", 448)  # type: ignore[union-attr]


def test_a_trace_with_types_is_left_as_it_is(tmp_path: Path) -> None:
    trace, _ = typed(tmp_path, "aten::mm", ["some_kernel"])
    recorded = trace.signatures.with_columns(pl.lit('["float","float",""]').alias("dtypes"))
    trace = Trace(**{name: getattr(trace, name) for name in trace.__struct_fields__} | {"signatures": recorded})
    assert infer_named_types(trace) == (trace, ())
