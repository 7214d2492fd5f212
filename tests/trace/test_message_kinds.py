"""Kinds of messages by real names of kernels, operators and annotations over libraries and versions; null where a name does not tell."""

from __future__ import annotations

import polars as pl
import pytest

from gpudiag.trace.collectives import MESSAGE_KINDS, match_kernel_message_kind, match_message_kind

KERNELS: dict[str, str | None] = {
    # NCCL 2.4 to 2.8, 2.9 to 2.18, since 2.19, symmetric memory (2.27)
    "ncclAllReduceRingLLKernel_sum_f32(ncclColl)": "all_reduce",
    "ncclReduceScatterRingLLKernel_sum_f16(ncclColl)": "reduce_scatter",
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)": "all_reduce",
    "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "all_gather",
    "ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "broadcast",
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "point_to_point",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all_reduce",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all_gather",
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce_scatter",
    "ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce",
    "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "broadcast",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "point_to_point",
    "ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_bf16(ncclSymkDevWorkArgs4K)": "all_reduce",
    "ncclSymDevKernel_AllGather_LLMC(ncclSymDevArgs)": "all_gather",
    "ncclSymkDevKernel_ReduceScatter_LDMC_sum_bf16(ncclSymkDevWorkArgs4K)": "reduce_scatter",
    # RCCL: one kernel for all
    "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)": None,
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)": None,
    "rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)": None,
    "mscclKernel_Sum_half_LL_false(ncclDevComm*, mscclAlgo*)": None,
    # MSCCL++
    "allreduce7<__half>(mscclpp::DeviceHandle<mscclpp::MemoryChannel>*, int)": "all_reduce",
    "void mscclpp::collective::allreducePacket<float>(float*)": "all_reduce",
    "allgather8<char>(mscclpp::DeviceHandle<mscclpp::MemoryChannel>*)": "all_gather",
    # symmetric memory of torch, NVSHMEM
    "multimem_all_reduce_kernel": "all_reduce",
    "multimem_one_shot_all_reduce_kernel": "all_reduce",
    "(anonymous namespace)::two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 8>(c10::BFloat16**)": "all_reduce",
    "void (anonymous namespace)::one_shot_all_reduce_kernel<float, 16, 8, true>(float**)": "all_reduce",
    "void c10d::(anonymous namespace)::multimem_all_gather_kernel<16>(char*)": "all_gather",
    "void (anonymous namespace)::barrier_kernel(unsigned int**, int, int, int, unsigned long)": "barrier",
    "void (anonymous namespace)::put_signal_kernel(unsigned int**, int, int)": None,
    "void c10d::nvshmem_extension::allToAllV(void*, void*, long*)": "all_to_all",
    "all_to_all_vdev_2d_kernel": "all_to_all",
    "void nvshmemi_transfer_put<(threadgroup_t)0>(void*, int)": None,
    # experts: DeepEP, MORI, pplx, TensorRT-LLM
    "void deep_ep::internode::dispatch<false, 8>(int4*, float*)": "all_to_all",
    "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>(__nv_bfloat16*)": "all_to_all",
    "void deep_ep::internode_ll::dispatch<true, 3, 7168>(void*)": "all_to_all",
    "void deep_ep::layout::get_dispatch_layout<256, 4, 8>(long const*)": None,
    "EpDispatchIntraNodeKernel_bf16": "all_to_all",
    "void mori::moe::EpCombineInterNodeKernel<float>(int)": "all_to_all",
    "void tensorrt_llm::kernels::moe_comm::moeA2ADispatchKernel<tensorrt_llm::kernels::BlockPolicy, 8>(int)": "all_to_all",
    # custom all-reduces: vLLM, SGLang, AITER, TensorRT-LLM, FlashInfer, quickreduce
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals)": "all_reduce",
    "void aiter::cross_device_reduce_2stage<__hip_bfloat16, 8>(aiter::RankData*)": "all_reduce",
    "void aiter::reduce_scatter_cross_device_store<__hip_bfloat16, 8>(aiter::RankData*)": "reduce_scatter",
    "void tensorrt_llm::kernels::oneShotAllReduceKernel<__half, 2, true, false>(tensorrt_llm::kernels::AllReduceParams)": "all_reduce",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<8, false>(int)": "all_reduce",
    "void quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot>(int)": "all_reduce",
    # user buffers of Transformer Engine do not say it
    "userbuffers_fp16_sum_inplace_gpu_rw<8>": None,
    "kuserbuffers_pushrecv": None,
    # what stands among template arguments and parameters does not count
    "ncclDevKernel_Generic(AllReduceParams)": None,
    "void foo_kernel<AllGather>(int)": None,
}

CALLS: dict[str, str | None] = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce", "_allgather_base": "all_gather", "all_gather": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather", "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all": "all_to_all", "all_to_allv": "all_to_all", "broadcast": "broadcast", "_broadcast_oop": "broadcast", "reduce": "reduce",
    "_reduce_oop": "reduce", "gather": "gather", "scatter": "scatter", "send": "point_to_point", "recv": "point_to_point",
    "recvAnySource": "point_to_point", "barrier": "barrier", "wait": None, "init": None, "coalesced": None,
    "nccl:all_reduce": "all_reduce", "nccl:reduce_scatter": "reduce_scatter", "nccl:send 0->1": "point_to_point",
    "gloo:all_gather": "all_gather",
    "gloo:barrier": "barrier", "c10d::allreduce_": "all_reduce", "c10d::alltoall_base_": "all_to_all",
    "_c10d_functional::all_gather_into_tensor": "all_gather", "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "record_param_comms": None, "nccl:coalesced": None,
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), KERNELS.items())
def test_kernels(name: str, kind: str | None) -> None:
    assert pl.DataFrame({"name": [name]}).select(match_kernel_message_kind(pl.col("name"))).item() == kind


@pytest.mark.parametrize(("name", "kind"), CALLS.items())
def test_calls_and_annotations(name: str, kind: str | None) -> None:
    assert pl.DataFrame({"name": [name]}).select(match_message_kind(pl.col("name"))).item() == kind


def test_every_kind_is_told_by_some_name() -> None:
    assert {*KERNELS.values(), *CALLS.values()} - {None} == set(MESSAGE_KINDS)
