"""What the names of kernels, copies and runtime calls tell, over libraries and versions. One table, no logic."""

from __future__ import annotations

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

# Calls that start one kernel: cudaLaunchKernel(ExC), cudaLaunchCooperativeKernel, cuLaunchKernel(Ex), hip(Ext)ModuleLaunchKernel, ...
KERNEL_LAUNCH = r"(?i)^(cuda|hip|cu)\w*Launch\w*Kernel"

# Between these calls launches are recorded into a graph and nothing runs (stream capture of the CUDA runtime and driver and of HIP).
CAPTURE_BEGIN = r"(?i)^(cuda|hip|cu)StreamBeginCapture"
CAPTURE_END = r"(?i)^(cuda|hip|cu)StreamEndCapture"

# Host calls that wait for the device (CUDA runtime and driver API, HIP).
SYNC_CALL = r"(?i)synchronize|^(cuda|hip)Memcpy$|^cuMemcpy(HtoD|DtoH)(_v2)?$"

# Host calls that take or give back device memory.
ALLOCATION_CALL = (
    r"^(cuda|hip)(Malloc|Free|HostAlloc|HostMalloc|MallocHost|FreeHost)|^cu(MemAlloc|MemFree|MemCreate|MemMap|MemUnmap|MemRelease)"
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
