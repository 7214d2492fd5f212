"""What the names of kernels, copies and runtime calls tell, over libraries and versions. One table, no logic."""

from __future__ import annotations

# Collectives. NCCL 2.x: ncclKernel_..., since 2.19 ncclDevKernel_..., symmetric: ncclSymk...; RCCL keeps the names or rccl...;
# MSCCL; NVSHMEM; torch symmetric memory (multimem_*, one_shot/two_shot_*); DeepEP (internode/intranode dispatch and combine);
# vLLM, SGLang and TensorRT-LLM custom all-reduce (cross_device_reduce, quickreduce, allreduce_fusion); AITER on ROCm.
COLLECTIVE = (
    r"(?i)nccl|rccl|mscclKernel|nvshmem"
    r"|(multimem|one_shot|two_shot|symm_mem)_\w*(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)"
    r"|cross_device_reduce|quick_?reduce|allreduce_fusion|allreduce_fused"
    r"|(internode|intranode|internode_ll)::\w*(dispatch|combine)"
    r"|deep_?ep::"
)

# One such call carries the kernels of a whole graph under one correlation id.
GRAPH_LAUNCH = r"(?i)graph_?launch"

# Host calls that wait for the device (CUDA runtime and driver API, HIP).
SYNC_CALL = r"(?i)synchronize|^(cuda|hip)Memcpy$|^cuMemcpy(HtoD|DtoH)(_v2)?$"

# Host calls that take or give back device memory.
ALLOCATION_CALL = (
    r"^(cuda|hip)(Malloc|Free|HostAlloc|HostMalloc|MallocHost|FreeHost)|^cu(MemAlloc|MemFree|MemCreate|MemMap|MemUnmap|MemRelease)"
)

# Dynamo and Inductor at work (torch 2.x): compiling, not running compiled code.
COMPILE_MARK = r"dynamo_timed|entire_frame_compile|backend_compile|_compile_inner|compile_fx|CompileId|GraphLowering|codecache"

# Host <-> device, in the words of CUDA ("HtoD"), ROCm ("HostToDevice", "H2D") and Kineto's memory kinds.
HOST_COPY = r"(?i)HtoD|DtoH|HtoH|HostToDevice|DeviceToHost|H2D|D2H|Host|Pinned|Pageable"
PEER_COPY = r"(?i)PtoP|Peer|P2P"

LOADER_MARK = r"^enumerate\(DataLoader\)#.*__next__"
OPTIMIZER_MARK = r"^Optimizer\.(step|zero_grad)#"
STEP_MARK = r"^ProfilerStep[#*]+\s*(\d+)"
