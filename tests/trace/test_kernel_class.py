"""Names of kernels, from the libraries' sources and from traces, by the kind of work that they do."""

from __future__ import annotations

from pathlib import Path

import kept
import polars as pl
import pytest

from gpudiag.trace.kernel_names import KERNEL_CLASSES, OTHER_CLASS, classify_kernel_names

LABELLED = {
    "gemm": """
        ampere_sgemm_128x64_nn
        ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn
        turing_h1688gemm_128x64_ldg8_stages_32x1_nn
        sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas
        nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT
        void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x128_16x3_nt_align4>(cutlass_80_tensorop_s1688gemm::Params)
        void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<int> > >
        void splitKreduce_kernel<32, 16, int, float, float, float, float, true, true, false>(cublasSplitKParams<float>)
        std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float, float, float, float>
        void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 2, 2, false>
        void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensorStridedBatched<float const> > >
        Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT32x32x256_MI16x16x1_SN_LDSB1
        void magma_sgemmEx_kernel<float, float, float, true, false, 6, 4, 6, 3, 4>
        _matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1_swiglu
        fused_moe_kernel
        void marlin::Marlin<c10::Half, 256, 1, 8, 8, 4, false, 8>
        void ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemm_xdl_cshuffle_v3<int> >
        _w8a8_block_fp8_matmul
        void fbgemm_gpu::dense_vec_jagged_2d_bmm<long, float>
        void cutlass::device_kernel<fbgemm_gpu::f8f8bf16_rowwise<cutlass::gemm::kernel::GemmUniversal<int> > >
    """,
    "convolution": """
        void implicit_convolve_sgemm<float, float, 1024, 6, 7, 3, 3, 5, 1, false, true, true>
        sm80_xmma_dgrad_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x32x32_stage4_warpsize4x1x1_g1_tensor16x8x16_execute_kernel
        void cutlass_cudnn_infer::Kernel<cutlass_tensorop_bf16_s16816fprop_analytic_bf16_128x128_32x3_nhwc_align8>
        void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>
        void wgrad_alg0_engine<float, 128, 6, 8, 3, 3, 5, false, 512>
        void cudnn::detail::dgrad_engine<float, 128, 6, 7, 3, 3, 5, false>
        volta_scudnn_128x64_relu_interior_nn_v1
        igemm_bwd_gtcx3_nhwc_bf16_bx0_ex0_bt128x128x32_wt32x32x8_ws1x1_wr2x2_ta1x8x2x1
        miopenSp3AsmConv_v30_3_1_gfx9_fp32_f2x3_stride1
        void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, float, int>
        void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true, (cudnnKernelDataType_t)0>
        void causal_conv1d_fwd_kernel<Causal_conv1d_fwd_kernel_traits<128, 4, true, c10::BFloat16> >
    """,
    "attention": """
        void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::bfloat16_t> >
        void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8, 4, 2, 2, true, false, cutlass::half_t> >
        void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2> > > >
        fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t, cutlass::arch::Sm80>::Params)
        cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0
        void vllm::paged_attention_v2_reduce_kernel<__nv_bfloat16, 128, 128, 512>
        kernel_unified_attention_2d
        attn_fwd
        _ZN5aiter32fmha_bwd_hd128_bf16_causal_a32_psskE
        sage_fwd
    """,
    "norm": """
        void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, true>(int, float, float const*)
        void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel<float, float>
        void at::native::elementwise_kernel_manual_unroll<128, 4, at::native::GroupNormKernelImplInternal<float> >
        void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512, true, 1>
        MIOpenBatchNormFwdTrainSpatial
        void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>
        _layer_norm_fwd_1pass_kernel
    """,
    "softmax": """
        void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>(float*, float const*, int, int, int)
        void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, c10::BFloat16, float, c10::BFloat16>
    """,
    "elementwise": """
        void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >
        void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<at::native::tanh_kernel_cuda(at::TensorIteratorBase&)> >
        void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<2>, BinaryOpScalarFunctor<float, 2, 1, 1> >
        void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel>
        void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*, c10::BFloat16*)
        void at::native::(anonymous namespace)::upsample_bilinear2d_out_frame<double, double>
        void fbgemm_gpu::_float_to_fused8bitrowwise_cuda_kernel<float>
        void fbgemm_gpu::_fused8bitrowwise_to_float_cuda_kernel<float>
    """,
    "reduction": """
        void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float>, unsigned int> >
        void cub::DeviceScanKernel<cub::AgentScanPolicy<128, 15, int, (cub::BlockLoadAlgorithm)3> >
        void at::native::(anonymous namespace)::max_pool_forward_nchw<float, float>
        void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>
        void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<float, NormType::L2> >
    """,
    "copy": """
        void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>
        void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2, 64, 64>
        void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >
        __amd_rocclr_copyBuffer
    """,
    "embedding": """
        void split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel_warp_per_row_1<float, float, float, 1ul, 16>
        void at::native::(anonymous namespace)::EmbeddingBag_updateOutputKernel_sum_mean<long, float>
        void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float, float, long>
        void fbgemm_gpu::batched_unary_embeddings_forward_kernel<float, long>
        void fbgemm_gpu::linearize_cache_indices_kernel<long, int>
    """,
    "optimizer": """
        void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4> >
        void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>, float, float, float, float>
    """,
    "sort": """
        void cub::DeviceRadixSortOnesweepKernel<cub::DeviceRadixSortPolicy<long, int, int>::Policy800, false, long, int, int, int>
        void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>
        void at::native::bitonicSortKVInPlace<-2, -1, 16, 16, float, long, at::native::GTOp<float, true>, unsigned int>
    """,
    "index": """
        void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::index_kernel_impl<int> > >
        void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>
        void at::native::_scatter_gather_elementwise_kernel<128, 8, at::native::_cuda_scatter_gather_internal_kernel<true, float> >
        void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)
        void fbgemm_gpu::permute_2D_data_kernel<false, int, int, decltype(nullptr)>
        void fbgemm_gpu::_block_bucketize_sparse_features_cuda_kernel1<int, int>
        void fbgemm_gpu::jagged_dense_elementwise_dense_output_kernel_<2, long, float>
        void fbgemm_gpu::reorder_batched_ad_indices_kernel<float>
    """,
    "random": """
        void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4>
        void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float, unsigned int, 1, 4, bool>
    """,
    "rnn": """
        void RNN_blockPersist_fp_LSTM<float, float, float, 1, 1, 512>
        void elemWiseRNNcell<float, float, float, (cudnnRNNMode_t)2, (cudnnRNNBiasMode_t)2>
    """,
    "fft": """
        void regular_fft<512u, EPT<16u>, 8u, 8u, (padding_t)0, (twiddle_t)0, (loadstore_modifier_t)2>
        void vector_fft<256u, EPT<16u>, 16u, 1u, (padding_t)1, (twiddle_t)0>
    """,
    "collective": """
        ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)
    """,
    "triton_pointwise": """
        triton_poi_fused__unsafe_view_addmm_cat_clone_gelu_transpose_view_4
        triton_for_fused_0
        triton__0d1d2d3de4de
    """,
    "triton_reduction": """
        triton_red_fused_add_addmm_mul_native_layer_norm_split_unsqueeze_view_7
        triton_per_fused__log_softmax_nll_loss_forward_2
    """,
    "triton_template": """
        triton_tem_fused_mm_0
        triton_mm
    """,
    OTHER_CLASS: """
        my_fancy_kernel
        kernel_0
        device_kernel
    """,
}


@pytest.mark.parametrize(("word", "names"), LABELLED.items())
def test_names_labelled_by_hand(word: str, names: str) -> None:
    listed = [line.strip() for line in names.strip().splitlines()]
    found = dict(zip(listed, classify_kernel_names(pl.Series(listed)).to_list(), strict=True))
    assert found == dict.fromkeys(listed, word)
    assert word in KERNEL_CLASSES


def test_one_name_and_no_name() -> None:
    names = pl.Series(["ampere_sgemm_128x64_nn", ""], dtype=pl.String)
    assert classify_kernel_names(names).to_list() == ["gemm", OTHER_CLASS]
    assert classify_kernel_names(pl.Series(["kernel_0", None], dtype=pl.String)).to_list() == [OTHER_CLASS, None]
    assert classify_kernel_names(pl.Series([], dtype=pl.Categorical())).to_list() == []


def test_a_hostile_name_costs_no_more_than_its_length() -> None:
    names = pl.Series(["(" * 200_000, "a_" * 100_000, "cutlass" * 30_000, "triton_" + "1d" * 100_000])
    assert len(classify_kernel_names(names)) == 4


@pytest.mark.slow
def test_real_traces_hardly_hold_an_unknown_name(traces: Path) -> None:
    worst = 0.0
    for path in [*sorted(traces.glob("*.json.gz")), traces / "v100_dlrm_train_8ranks" / "rank0.json.gz"]:
        kernels = kept.tables(path).kernels.filter(pl.col("kind") == "kernel")
        time = kernels["end_ns"] - kernels["start_ns"]
        unknown = time.filter(classify_kernel_names(kernels["name"]) == OTHER_CLASS).sum() / max(1, time.sum())
        worst = max(worst, unknown)
    assert worst < 0.05
