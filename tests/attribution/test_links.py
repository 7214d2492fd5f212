"""Kernel -> launch -> op -> step on traces of a few events, and which kernels are collectives."""

from __future__ import annotations

import pytest
from handmade import call, kernel, linked, op, steps


def test_a_kernel_belongs_to_the_step_and_op_of_its_launch() -> None:
    found = linked(*steps(0, 100, 200), op("aten::linear", 10, 40), op("aten::addmm", 15, 30), call(20, 3), kernel(150, 160, 3)).kernels
    row = found.row(0, named=True)
    assert (row["launch"], row["op"], row["step"], row["busy_ns"]) == (0, 1, 0, 10_000)  # it ran in step 1, launched in step 0


def test_a_kernel_launched_before_the_window_is_linked_to_nothing() -> None:
    row = linked(*steps(0, 100), op("aten::mm", 0, 90), kernel(5, 9, 77)).kernels.row(0, named=True)
    assert (row["launch"], row["op"], row["step"]) == (None, None, None)


@pytest.mark.parametrize("correlation", [0, None])
def test_no_correlation_joins_nothing(correlation: int | None) -> None:
    found = linked(*steps(0, 100), op("aten::mm", 0, 90), call(5, correlation), kernel(10, 20, correlation)).kernels
    assert found["launch"].to_list() == [None]


def test_a_correlation_that_two_calls_carry_gives_one_row_a_kernel() -> None:
    found = linked(*steps(0, 100), op("aten::mm", 0, 50), call(5, 4), call(60, 4), kernel(70, 80, 4)).kernels
    assert found.select("launch", "op").rows() == [(0, 0)]


def test_a_graph_launch_carries_many_kernels() -> None:
    replay = call(10, 8, api="cudaGraphLaunch")
    found = linked(
        *steps(0, 100), op("aten::mm", 0, 30), replay, call(20, 9), *(kernel(30 + n, 31 + n, 8) for n in range(5)), kernel(40, 41, 9)
    )
    assert found.kernels["replay"].to_list() == [True] * 5 + [False]
    assert found.kernels["launch"].to_list() == [0] * 5 + [1]


def test_a_launch_on_another_thread_or_between_ops_has_no_op() -> None:
    found = linked(
        *steps(0, 100), op("aten::mm", 0, 30), op("aten::mm", 50, 60, tid=2), call(10, 1, tid=2), call(40, 2), call(55, 3, tid=2)
    )
    assert found.launches["op"].to_list() == [None, None, 1]


def test_whole_microseconds_cut_the_end_of_an_op_to_its_last_launch() -> None:
    found = linked(*steps(0, 100), op("aten::mm", 10, 12), call(12, 1, end=12), kernel(20, 30, 1))
    assert found.kernels["op"].to_list() == [0]


COLLECTIVES = [
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)",
    "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)",
    "ncclSymkDevKernel_AllReduce_AGxLL_R_sum_bf16",
    "void rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)",
    "nvshmemi_transfer_rma_block",
    "multimem_all_reduce_kernel<c10::BFloat16>",
    "two_shot_all_reduce_kernel",
    "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)",
    "void deep_ep::internode_ll::combine<true, 7168, 9>(void*)",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(RankData*)",
]  # fmt: skip

OTHERS = [
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float>>>",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2, 64, 64>",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float>",
    "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x32_stage4_warpsize2x2x1_tensor16x8x16",
    "void at::native::(anonymous namespace)::indexing_backward_kernel",
    "void cub::DeviceReduceSingleTileKernel<cub::DeviceReducePolicy<bool>>",
    "triton_red_fused_all_reduce_like_name_0",
    "void fmha_bwd_dispatch_combine_kernel",
]


@pytest.mark.parametrize(("name", "expected"), [*((name, True) for name in COLLECTIVES), *((name, False) for name in OTHERS)])
def test_collectives_by_kernel_name(name: str, expected: bool) -> None:
    assert linked(*steps(0, 100), kernel(5, 9, 1, name)).kernels["collective"].to_list() == [expected]


def test_a_copy_is_no_collective_whatever_its_op() -> None:
    events = [
        op("record_param_comms", 10, 20),
        call(12, 1),
        call(14, 2),
        kernel(30, 40, 1, "anything"),
        kernel(40, 50, 2, "Memcpy DtoD (Device -> Device)"),
    ]
    assert linked(*steps(0, 100), *events).kernels["collective"].to_list() == [True, False]


def test_a_kernel_with_the_fields_of_a_collective_is_one() -> None:
    fields = {"Collective name": "allreduce", "In msg nelems": 100, "Out msg nelems": 100, "Group size": 8, "dtype": "Float"}
    assert linked(*steps(0, 100), kernel(5, 9, 1, "quack"), kernel(10, 12, 2, "moo", **fields)).kernels["collective"].to_list() == [
        False,
        True,
    ]
