"""What the names of kernels, copies and runtime calls tell, over libraries and versions: patterns, and the class of a kernel.

Names come from kernel sources and from traces of 2020 to 2026; the comment above each group names the library. The first pattern that
matches wins, so the special comes before the general: a GroupNorm inside ATen's element-wise template is a norm.
Patterns run on a linear-time engine (no look-around, no back-references): a name from a file cannot make them slow.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

# A function whose own name holds all-reduce, all-gather, reduce-scatter or all-to-all, as a word. Template arguments and parameters do
# not count, nor names that begin with b, t or w: block and warp reductions, and the code of Inductor, which names a kernel after the ops
# around it (triton_poi_fused_all_reduce_0); two-shot, tree, TensorRT and tiled ones are back in.
_PREFIX = r"(?:[ac-su-vx-zAC-SU-VX-Z_]|[Tt](?:wo|ree|rt|ile))\w*"
_MESSAGE_WORDS = (
    r"^(?:(?:[^<(]|\(anonymous namespace\))*[\s:])?"
    rf"(?:(?:{_PREFIX}(?:[_\d][Aa]|[a-z]A)|[Aa])ll_?(?:[Rr]educe|[Gg]ather|[Tt]o_?[Aa]ll)"
    rf"|(?:{_PREFIX}(?:[_\d][Rr]|[a-z]R)|[Rr])educe_?[Ss]catter)"
)

# Collectives. NCCL 2.x: ncclKernel_..., since 2.19 ncclDevKernel_..., symmetric: ncclSymk...; RCCL keeps the names or rccl...; MSCCL and
# MSCCL++ (its types stand among the parameters); NVSHMEM; torch symmetric memory (multimem_*, one_shot/two_shot_*, its barriers and
# signals); DeepEP, MORI and TensorRT-LLM expert dispatch and combine; user buffers of Transformer Engine; custom all-reduce of vLLM,
# SGLang, FlashInfer and TensorRT-LLM (Lamport flags), AITER on ROCm (cross_device_*), quickreduce.
COLLECTIVE = (
    r"(?i:nccl|rccl|hccl|oneccl|msccl|nvshmem|rocshmem|userbuffers|lamport|cross_device_reduce|quick_?reduce"
    r"|(?:internode|intranode|internode_ll)::\w*(?:dispatch|combine)|deep_?ep::|hybrid_ep::|pplx::|\bmori::"
    r"|\bEp(?:Dispatch|Combine)\w*Kernel|moe_?a2a_?(?:dispatch|combine)|\ba2a_(?:dispatch|combine))"
    r"|\b(?:barrier|put_signal|wait_signal)_kernel\(unsigned int ?\*\*"
    rf"|{_MESSAGE_WORDS}"
)

# One such call carries the kernels of a whole graph under one correlation id.
GRAPH_LAUNCH = r"(?i)graph_?launch"

# Calls that start one kernel: cudaLaunchKernel(ExC), cudaLaunchCooperativeKernel, cuLaunchKernel(Ex), hip(Ext)ModuleLaunchKernel, ...;
# on Intel GPUs those of SYCL's unified runtime.
KERNEL_LAUNCH = r"(?i)^(cuda|hip|cu)\w*Launch\w*Kernel|^urEnqueue\w*KernelLaunch"

# Between these calls launches are recorded into a graph and nothing runs (stream capture of the CUDA runtime and driver and of HIP).
CAPTURE_BEGIN = r"(?i)^(cuda|hip|cu)StreamBeginCapture"
CAPTURE_END = r"(?i)^(cuda|hip|cu)StreamEndCapture"

# Host calls that wait for the device (CUDA runtime and driver API, HIP, SYCL's unified runtime).
SYNC_CALL = r"(?i)synchronize|^(cuda|hip)Memcpy$|^cuMemcpy(HtoD|DtoH)(_v2)?$|^ur(QueueFinish|EventWait)$"

# Host calls that take or give back device memory.
ALLOCATION_CALL = (
    r"^(cuda|hip)(Malloc|Free|HostAlloc|HostMalloc|MallocHost|FreeHost)|^cu(MemAlloc|MemFree|MemCreate|MemMap|MemUnmap|MemRelease)"
    r"|^urUSM(DeviceAlloc|HostAlloc|SharedAlloc|Free)"
)

# Dynamo and Inductor at work (torch 2.x): compiling, not running compiled code. 'dynamo' is the phase around all others
# (torch/_dynamo/convert_frame.py, chromium_event_timed).
COMPILE_MARK = r"dynamo_timed|entire_frame_compile|backend_compile|_compile_inner|compile_fx|CompileId|GraphLowering|codecache|^dynamo$"

# Host <-> device, in the words of CUDA ("HtoD"), ROCm ("HostToDevice", "H2D") and Kineto's memory kinds.
HOST_COPY = r"(?i)HtoD|DtoH|HtoH|HostToDevice|DeviceToHost|H2D|D2H|Host|Pinned|Pageable"
PEER_COPY = r"(?i)PtoP|Peer|P2P"

LOADER_MARK = r"^enumerate\(DataLoader\)#.*__next__"
OPTIMIZER_MARK = r"^Optimizer\.(step|zero_grad)#"
STEP_MARK = r"^ProfilerStep[#*]+\s*(\d+)"

OTHER_CLASS = "other"

_CLASS_PATTERNS: tuple[tuple[str, str], ...] = (
    ("collective", COLLECTIVE),
    # Inductor (torch/_inductor/codegen/triton.py): triton_<category>_fused_...; before torch 2.1 triton__0d1d2..., whose category is not
    # told (point-wise by far the most often, and a reduction has a loop or a persistent block: neither shows in the name).
    ("triton_template", r"^triton_(tem_|mm|bmm|addmm|flex_attention|flex_decoding|convolution|scaled_mm)"),
    ("triton_reduction", r"^triton_(red|per|split_scan|cooperative_red|mix_order)_"),
    ("triton_pointwise", r"^triton_(poi|for|unk|fused)_|^triton_[_\d]"),
    # Optimizers: ATen multi_tensor_apply with a fused functor, apex/amp_C, FBGEMM, bitsandbytes, DeepSpeed
    (
        "optimizer",
        r"(?i)multi_tensor_apply.*(adam|lamb|sgd|adagrad|adafactor|novograd|fusedoptim|lars|rmsprop)|fused_?(adam|sgd|lamb|adagrad)"
        r"|k(PreconditionOptimizer|Optimizer)|adam_cuda_kernel|lamb_cuda_kernel|multi_tensor_(adam|lamb|sgd|novograd|l2norm_scale)"
        r"|\bkOptimizerStatic",
    ),
    # Embedding tables: ATen (EmbeddingBag.cu, Embedding.cu), FBGEMM table-batched embedding
    (
        "embedding",
        r"(?i)embedding_?bag|split_embedding|dense_embedding|ssd_embedding|embedding_(backward|forward|renorm|dense|codegen|feature)"
        r"|EmbeddingBackward|unary_embeddings|linearize_(index|cache)|permute_pooled_embs|find_long_segments|compute_grad_weight|krn_partials|krn_partial_segment"
        r"|lfu_cache|lru_cache|lxu_cache|bounds_check_indices|recat_copy|pruned_(hashmap|array)_lookup|nobag_|int_nbit",
    ),
    # Attention: FlashAttention 1-3 (also inside torch: pytorch_flash), xFormers/CUTLASS fmha, cuDNN SDPA, FlashInfer, vLLM paged
    # attention, TensorRT-LLM mmha/xqa, AITER and CK on ROCm, Triton kernels of vLLM/SageAttention/segment-anything-fast, flex attention
    (
        "attention",
        r"(?i)flash_?(fwd|bwd|attn|attention|decod|mla)|pytorch_flash|fmha|mem_?eff_?attention|AttentionKernel|sdpa|paged_?attention"
        r"|unified_attention|reduce_segments|masked_multihead_attention|\bmmha|xqa_|flashinfer|flex_attention|attn_(fwd|bwd)|_attn_|^attn"
        r"|sage_(fwd|attn)|sage_quant|BatchPrefillWith|BatchDecodeWith|SinglePrefillWith|SingleDecodeWith|multi_?head_?attention"
        r"|aiter::(mla|pa_|fmha)|\bmla_|^_fwd_kernel|^_bwd_kernel|^_fwd_grouped_kernel|concat_and_cache_mla|reshape_and_cache|merge_attn_states"
        r"|_attention_(fwd|bwd|kernel)|attention_kernel|ring_attention|(fwd|bwd)_kernel_(d|aligned)",
    ),
    # Convolution: cuDNN (legacy, cask, v8/v9 engines, xmma), CUTLASS, MIOpen igemm/winograd/direct, CK, ATen depthwise and im2col
    (
        "convolution",
        r"(?i)implicit_(con|gemm)|convolve|_scudnn_|scudnn|\w*(fprop|dgrad|wgrad)|winograd|conv_?(\d?d_)?(fwd|bwd|forward|backward|depthwise|kernel)"
        r"|convolution|conv_depthwise|depthwise|igemm_(fwd|bwd|wrw)|gridwise_?conv|bwd_weight|bwd_data|im2d?2?col|col2im|vol2col|Im2d2Col|Col2Im"
        r"|cask_cudnn|kern_precompute_indices|computeOffsets|computeB?OffsetsKernel|miopen_?(sp3|conv|gcn)|SubTensorOpWith|gcnAsmConv|MIOpenConv"
        r"|(_|\b)conv[123]d|(nchw|nhwc|ndhwc|ncdhw|cnhw)2?To?_?(nhwc|nchw|cnhw)|transpose_(CNHW|NCHW)\w*|batched_transpose_\d+x\d+|causal_conv1d"
        r"|scalePackedTensor|naive_conv|AddPaddingKernel",
    ),
    # RNN and FFT: cuDNN (persistent and elementwise LSTM/GRU), ATen fused cells, MIOpen; cuFFT, rocFFT, vkFFT
    ("rnn", r"(?i)lstm|gru_(cell|fwd|bwd|forward|backward)|_gru|RNN_|rnn_(block|persist|fwd|bwd|elementwise)|elem(ent)?WiseRNN|persistRNN"),
    (
        "fft",
        r"(?i)(regular|vector|multi|composite)_fft|cufft|rocfft|vkfft|_fft_|fft_(rtc|fwd|back)|\bfft\b|dpRadix|spRadix|spVector\d+C|dpVector",
    ),
    # Softmax: ATen (SoftMax.cu, PersistentSoftmax.cuh), cuDNN, apex/Megatron scaled masked softmax, MIOpen
    ("softmax", r"(?i)soft_?max"),
    # Norms: ATen layer/group/batch norm, apex, cuDNN bn_*, MIOpen, CK, Liger, vLLM, TensorRT-LLM, SyncBatchNorm
    (
        "norm",
        r"(?i)(layer|batch|group|instance|rms|local_?response)_?norm|rmsnorm|layernorm|ln_(fwd|bwd|parallel)|_ln_|cudnn::bn_|bn_(fw|bw)_|batchnorm"
        r"|GammaBeta|cuComputePartGrad|cuComputeGrad|RowwiseMoments|WelfordOps.*norm|welford_(kernel|parallel)|ComputeFusedParams"
        r"|ComputeInternalGradients|ComputeBackwardFusedParams|bn_update|compute_(rms|ln)_|qk_norm|add_norm",
    ),
    # Mixture of experts: routing is sorting; the products are GEMMs (below)
    (
        "sort",
        r"(?i)radix_?sort|bitonic|merge_?sort|_sort_|sortKV|sort_?kernel|topk|top_k|top_p|gatherTopK|gatherKthValue|gather_?median|nms_kernel|_nms_"
        r"|searchsorted|moe_align|moe_(sort|routing)|expert_?(count|offset|sort)|combined_routing|sum_bitmatrix|mode_kernel|unique_|adjacent_diff|MoeSorting",
    ),
    # GEMM: cuBLAS and cuBLASLt (gemm, gemv, splitK, nvjet), CUTLASS, DeepGEMM, magma, xmma, hipBLASLt/rocBLAS/Tensile (Cijk_), CK,
    # Marlin/AWQ/GPTQ/Machete, grouped and MoE GEMMs, bitsandbytes, torch int4
    (
        "gemm",
        r"(?i)gemm|gemv|splitk_?reduce|nvjet|\bCijk_|^Cijk|cutlass.*(tensorop|simt|wmma|sm\d+)|cutlass::device_kernel|matmul|_mm_kernel|\bmm_kernel"
        r"|grouped_mm|fused_moe|moe_(mmk|ck|gemm|kernel|wna16|stage|sum)|marlin|machete|awq_|gptq|dequant_gemm|dot_kernel|reduce_1Block_kernel|trsm|syrk|getrf|potrf"
        r"|cublasLt|cublas|hgemm|xmma|epilogue::impl|wvSpltK|LLGemm|jagged_\w*bmm|int4mm|int8mm|dequantize_blockwise|tinygemm|_gmm_|mxfp4|scaled_mm|ger_kernel"
        r"|^_?(mm|bmm|addmm)(_|$)",
    ),
    # Random numbers: ATen distributions, curand, fused dropout
    (
        "random",
        r"(?i)distribution_|philox|curand|hiprand|rocrand|random_|_rand_|dropout|bernoulli|multinomial|normal_and_transform|randperm|poisson",
    ),
    # Index: gather, scatter, cat is a copy (below)
    (
        "index",
        r"(?i)index(ing)?_?(elementwise|put|select|add|copy|fill|func|backward|kernel)|indexSelect|indexFunc|index_\w*kernel|gather|scatter"
        r"|masked_(select|fill_sorted)|nonzero|write_indices|DeviceSelect|DeviceCompact|flag_kernel|compact|take_kernel|put_kernel|take_put"
        r"|permute_\w*(data|indices|lengths|sequence|embeddings)_?\w*kernel|bucketize|reorder_batched|pack_segments|offsets_range|to_dense_representation|one_?hot|expand_into_jagged"
        r"|jagged|dense_to|segment_(sum|reduce)|tril_|triu_|TriuTril|triu_tril|roll_cuda|flip_cuda|elementwise_kernel_with_index|arange|linspace",
    ),
    # Copies: ATen direct copy and cat, fills, transposes, memcpy/memset kernels of the runtimes
    (
        "copy",
        r"(?i)direct_copy_kernel|CatArray|_copy_kernel|copy_kernel|copy_device_to_device|memcpy|memset|fillBuffer|copyBuffer|__amd_rocclr|FillFunctor"
        r"|transpose|permute_?(kernel|cuda)|PermuteKernel|tensor_?permute|fill_kernel|cast_kernel|CopyFunctor|conj_copy|split_with_sizes_copy|chunk_cat",
    ),
    # Reductions: ATen reduce_kernel, cub/hipcub/rocprim reduce and scan, losses, pooling windows
    (
        "reduction",
        r"(?i)reduce_kernel|DeviceReduce|DeviceScan|DeviceSegmentedReduce|ReduceByKey|device_reduce|device_scan|rocprim|ReduceSingleTile|BlockReduce"
        r"|LpNorm|lpmax|l2norm|amax_kernel|scan_(innermost|outer|kernel|dim)|_scan_|cumsum|cumprod|pool(ing)?_?(\dd_)?(forward|backward|kernel|nchw|nhwc)"
        r"|pool\dd|_pool_|avg_pool|max_pool|adaptive_\w*pool|nll_loss|ClassNLL|cross_entropy|ctc_loss|_sum_|sum_kernel|mean_kernel|norm_kernel|histogram|bincount"
        r"|segmented_|cub::Device|arg(max|min)|WelfordOps|cdist|pdist",
    ),
    # Element-wise: ATen loops, foreach without an optimizer's functor, interpolation, rotary embedding, activations, quantisation
    (
        "elementwise",
        r"(?i)elementwise|element_wise|multi_tensor_apply|foreach|pointwise|rotary|rope|silu|gelu|relu|swiglu|act_and_mul|activation|upsample"
        r"|interpolat|grid_sample|quantize|quant_kernel|dequant|_quant_|to_fp8|cast_|scale_kernel|add_kernel|mul_kernel|unary|binary|OpTensor|op_(generic_)?tensor"
        r"|rowwise_(cuda|to)|qparam|_to_b?float|float_to_|residual|bias_(add|act)|modulate|fused_(add|bias|mul)|where_kernel|clamp|lerp|_fill|amp_(update|non_finite|foreach)|update_scale|threshold"
        r"|masked_fill|loops_kernel|Eltwise|loss",
    ),
)  # fmt: skip

_MISLEADING = r"(?i)fbgemm(_gpu|_genai)?"
"""A library whose name says a kind of work: FBGEMM's GPU kernels are look-ups, jagged tensors and permutations more than products."""

KERNEL_CLASSES: tuple[str, ...] = (*(word for word, _ in _CLASS_PATTERNS), OTHER_CLASS)
"""Every word that a kernel's class may be."""


def choose_first(chain: Sequence[tuple[pl.Expr | str, str]], otherwise: str | None) -> pl.Expr:
    """Return the word of the first condition (an expression or a column) of `chain` that holds, else `otherwise`."""
    chosen = pl.lit(otherwise, dtype=pl.String)
    for condition, word in reversed(chain):
        chosen = pl.when(condition).then(pl.lit(word)).otherwise(chosen)
    return chosen


def classify_kernel_names(names: pl.Series) -> pl.Series:
    """Find the class of each name (a String column, null stays null); each distinct name is looked at once."""
    distinct = names.unique().drop_nulls()
    text = pl.col("name").cast(pl.String).str.replace_all(_MISLEADING, "")
    chosen = choose_first([(text.str.contains(pattern), word) for word, pattern in _CLASS_PATTERNS], OTHER_CLASS)
    table = pl.DataFrame({"name": distinct}).with_columns(chosen.alias("kernel_class"))
    return pl.DataFrame({"name": names}).join(table, on="name", how="left", maintain_order="left")["kernel_class"]


IN_NEXT, DECODING = "in __next__", "in a decoder"
"""What the call chain of a call of the operating system tells, after its name (Nsight Systems)."""
