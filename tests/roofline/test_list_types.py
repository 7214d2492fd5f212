"""Tensor lists have the dtype that their kernels' names hold: names of real traces, and calls of two dtypes with one signature."""

from __future__ import annotations

from pathlib import Path

import kept
import polars as pl
import pytest

from gpudiag.roofline.element_types import parse_item_bytes

_ANONYMOUS = "at::native::(anonymous namespace)::"
NAMES = {
    f"void {_ANONYMOUS}CatArrayBatchedCopy<{_ANONYMOUS}OpaqueType<2u>, unsigned int, 4, 64, 64>({_ANONYMOUS}OpaqueType<2u>*": 2,
    f"void {_ANONYMOUS}CatArrayBatchedCopy_aligned16_contig<{_ANONYMOUS}OpaqueType<8u>, unsigned int, 1, 128, 1>(": 8,
    f"void {_ANONYMOUS}CatArrayBatchedCopy<c10::BFloat16, unsigned int, 3, 128, 1>(c10::BFloat16*, {_ANONYMOUS}": 2,
    f"void {_ANONYMOUS}CatArrayBatchedCopy<float, unsigned int, 2, 64, 64>(float*, {_ANONYMOUS}CatArrInputTensorMetadata<float,": 4,
    f"void {_ANONYMOUS}CatArrayBatchedCopy_aligned16_contig<long, unsigned int, 1, 128, 1>(long*": 8,
    f"void {_ANONYMOUS}CatArrayBatchedCopy_vectorized<char, unsigned int, 3, 128, 1, 16, 2>(char*": 8,
    f"void {_ANONYMOUS}CatArrayBatchedCopy_vectorized<{_ANONYMOUS}OpaqueType<2u>, unsigned int, 3, 128, 1, 16, 8>(char*": 2,
    "void at::native::<unnamed>::CatArrayBatchedCopy_vectorized<at::native::<unnamed>::OpaqueType<(unsigned int)2>, unsigned int, (int)3, "
    "(int)128, (int)1, (int)16, (int)8>(char *, at::native::<unnamed>::CatArrInputTensorMetadata<T1, T2, T4, T5>": 2,
    "void at::native::<unnamed>::CatArrayBatchedCopy<at::native::<unnamed>::OpaqueType<(unsigned int)4>, unsigned int, (int)2": 4,
    f"void {_ANONYMOUS}multi_tensor_apply_kernel<{_ANONYMOUS}TensorListMetadata<1>, {_ANONYMOUS}UnaryOpFunctor<float, 1, 1, 0>, "
    "at::native::Sqrt<float> >(": 4,
    f"void {_ANONYMOUS}multi_tensor_apply_kernel<{_ANONYMOUS}FusedOptimizerTensorListMetadata<4>, {_ANONYMOUS}FusedAdamMathFunctor<"
    "c10::BFloat16, 4, (at::native::(anonymous namespace)::ADAM_MODE)1, false>, float const*": 2,
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3> >(": None,
    "ampere_sgemm_128x64_nn": None,
}


@pytest.mark.parametrize(("name", "expected"), NAMES.items())
def test_names(name: str, expected: int | None) -> None:
    assert parse_item_bytes(name) == expected


def test_half_precision_joins_of_a_real_trace(traces: Path) -> None:
    """Qwen joins rotated halves in bf16 and positions in fp32: [16, 16, 559, 32] twice is 36.6 MB in bf16, twice that in fp32."""
    analysis = kept.analysis(traces / "h100_qwen1.5-0.5b_prefill.json.gz")
    kernels = analysis.trace.kernels.with_columns(pl.col("name").cast(pl.String)).filter(pl.col("name").str.contains("CatArray"))
    half = kernels.filter(pl.col("name").str.contains("OpaqueType<2u>"))
    assert half["bytes_moved"].drop_nulls().unique().to_list() == [2 * 2 * 2 * 16 * 16 * 559 * 32]
    full = kernels.filter(pl.col("name").str.contains("OpaqueType<4u>"))
    assert full["bytes_moved"].drop_nulls().unique().to_list() == [4 * 2 * 2 * 559 * 32]
