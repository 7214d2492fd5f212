"""Names of collectives over libraries, both ways, and on every kernel of the real traces."""

from __future__ import annotations

import re
from pathlib import Path

import kept
import polars as pl
import pytest

from gpudiag.trace import kernel_names

COLLECTIVES = """
    ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)
    oneShotAllReduceKernel
    void c10d::intra_node_comm::twoShotAllReduceKernel<8u>(unsigned int, c10d::intra_node_comm::P2pState**)
    void c10d::intra_node_comm::hybridCubeMeshAllReduceKernel<true>(unsigned int)
    void tensorrt_llm::kernels::oneShotAllReduceKernel<__half, 2, true, false>(tensorrt_llm::kernels::AllReduceParams)
    void tensorrt_llm::kernels::lowPrecisionTwoShotAllReduceKernel<8>(int)
    moefinalize_allreduce_fusion_kernel_oneshot_lamport
    void tensorrt_llm::kernels::moe_comm::moeA2ADispatchKernel<tensorrt_llm::kernels::BlockPolicy, 8>(int)
    all_to_all_vdev_2d_kernel
    void c10d::nvshmem_extension::allToAllV(void*, void*, long*)
    void c10d::(anonymous namespace)::multimem_all_gather_kernel<16>(char*)
    (anonymous namespace)::two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 8>(c10::BFloat16**)
    multimem_one_shot_all_reduce_kernel
    void (anonymous namespace)::barrier_kernel(unsigned int**, int, int, int, unsigned long)
    void aiter::reduce_scatter_cross_device_store<__hip_bfloat16, 8>(aiter::RankData*)
    _ZN5aiter33reduce_scatter_cross_device_storeIDF16bLi8EEEvPNS_8RankDataENS_11RankSignalsEjiii
    void aiter::allreduce_fusion_kernel_1stage<__hip_bfloat16, 8>(aiter::RankData*)
    void aiter::allgather_lastdim<int, 8>(aiter::RankData*)
    allreduce7<__half>(mscclpp::DeviceHandle<mscclpp::MemoryChannel>*, int)
    void mscclpp::collective::allreducePacket<float>(float*)
    void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<8, false>(int)
    void quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot>(int)
    userbuffers_fp16_sum_inplace_gpu_rw<8>
    kuserbuffers_pushrecv
    EpDispatchIntraNodeKernel_bf16
    void mori::moe::EpCombineInterNodeKernel<float>(int)
    void deep_ep::internode::notify_combine<8>(int)
"""

OTHERS = """
    triton_poi_fused_add_all_gather_into_tensor_wait_tensor_3
    triton_poi_fused_two_shot_all_reduce_1
    void fmha_bwd_dispatch_combine_kernel
    void blockAllReduceSum<float>(float*)
    warpAllReduce_kernel
    void cutlass::device_kernel<cutlass::gemm::Gemm<AllReduceEpilogue> >(int)
    void foo_kernel<float>(AllReduceParams)
    vectorized_small_gather_kernel
    void moe::small_reduce_kernel(int)
    void at::native::_scatter_gather_elementwise_kernel<128, 8>(int)
    scatter_reduce_kernel
    void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long)
    void rocprim::detail::reduce_by_key_kernel(int)
    void (anonymous namespace)::barrier_kernel_of_ones_own(int)
    Cijk_Ailk_Bljk_BBS_BH_MT256x128x64
    _combined_routing_compute
    memoria::kernel
"""


def names(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


@pytest.mark.parametrize(("name", "expected"), [*((n, True) for n in names(COLLECTIVES)), *((n, False) for n in names(OTHERS))])
def test_collectives_by_name(name: str, expected: bool) -> None:
    assert bool(re.search(kernel_names.COLLECTIVE, name)) is expected
    assert pl.Series([name]).str.contains(kernel_names.COLLECTIVE).to_list() == [expected]  # the engine that is used


@pytest.mark.slow
def test_on_real_traces_only_the_kernels_of_nccl_are_collectives(traces: Path) -> None:
    found = set()
    for path in sorted(traces.glob("*.json.gz")):
        kernels = kept.tables(path).kernels.filter(pl.col("kind") == "kernel")["name"].cast(pl.String).unique()
        collective = kernels.str.contains(kernel_names.COLLECTIVE)
        assert (kernels.filter(collective).str.starts_with("nccl")).all()
        assert not kernels.filter(~collective).str.contains("(?i)nccl").any()
        found.update(kernels.filter(collective))
    assert len(found) == 4
