"""The words that free text may keep in a scrubbed copy. What is not listed here is replaced, so a new word is a decision."""

from __future__ import annotations

_TEXT = """
    a ac2g accumulate accumulation activity adagrad adam adamw add affine after all all2all allgather allgatherv allocate allocation
    allreduce alltoall alltoalltensors alltoallv allv amp amx and annotation any aot aotdispatcher arch area argmax args argument as
    asked assign async at attempt attention attn attn2 autocast autograd autotuner available averaged avg avx avx2 avx512 await
    awaitable b backbones backend background backward backwards barrier base batch batchnorm before begin bert between bf16 bfloat
    bfloat16 bicubic bilinear bin block board bool boost border bottom broadcast bubble bucket bucketing buffer build bw bwd by byte
    bytecode c c10 cache call callbacks capture cast ccp cdouble cell cfloat cfloat32 char checkpoint chunk circular ckpt clip clock
    cnn coalesced codecache codegen collate collection collective comm command common compile compiled compilefx compileid compiler
    complete complex complexdouble complexfloat compute config configs constant context contiguous conv conv1d conv2d conv3d convert
    coordinator copy core correlation counters cp cpu create criterion csv ctr cublas cuda cudagraph cudnn current d d2d d2h data
    dataloader dataloading dataset ddp decode decoder default delete device discriminator dispatch dist distributed divisions dma
    done double down dp driver dropout dtod dtoh dynamo e e2m1fn e4m3fn e4m3fnuz e5m2 e5m2fnuz e8m0fnu each eager ecc efficient emb
    embed embedding empty encode encoder end energy enforced engine enter entire entry enumerate ep epilogue epoch equal error eval
    evaluate event events example examples execute exit expandable expert experts export external f fake false fc feature features
    fetch ffn figures file final finish first flash float float16 float32 float4 float64 float8 floor flop flops flow flush for fork
    forkserver forward forwardbackward forwards found fp16 fp32 fp4 fp64 fp8 free from frozen fsdp full fullgraph function fused fwd
    fwdbwd fx gan garbage gather gc gelu gen gen2 generate generation generator genericlist get gflop global gloo gpt gpu gpudiag
    grad gradient gradients graph graphics graphlowering group groupnorm gru guard guards h2d half hccl head heads high highest hip
    hook hooks host hpu htod htoh i id ids ieee ij import in index inductor inf infer inference init input inputs insight instance
    instant instantaneous instrumentation insufficient int int16 int32 int64 int8 into invalid ipython is iter iterable iteration
    jit joint json k kernel kernels key keyed kjt kv kwargs labels last latest launch layer layernorm layers lazy learning left
    lengths level lib libs limit line linear link list llama load loaded loader loading local log logging logits long lookup lookups
    loop loss losses lost lower lowering lr lstm m main make malloc map marker markers mask masks math matmul max mb mean medium mem
    memcpy memory memset mesh metric metrics mflop mha micro microbatch min mini mismatch mlp mlu model models module modules moe
    monitor move mpi mps mtia n name nan native nccl ne nearest neg neon new next nn no node none norm not notebook npu npy npz null
    num number nvlink nvtx of often on oop op open operator ops optim optimize optimizer optimizers optional or other out output
    outputs over overhead overheads p p2p pad pageable params pass pcie peer permission permissions permute pg phase pin pin2
    pin_memory pinned pipeline plain pool pooled pooling pos post power power2 pp pre prefetch prefill pregraph premul prepare
    present privateuse1 process processing product profile profiler proj prologue proxy pt pth ptop publish python python2 python3
    pytorch q qint8 qkv queue quint8 r random range rank rccl read rec recat receive recompute record recv reduce reduced
    reducescatter reflect reflection region register release relu replay replicate request reset residual resnet resource result
    resume right rms rmsnorm rmsprop rnn roctracer root rope rotary roundup router run runner runners runtime s safetensors same
    sample sampler samples save scalar scalarlist scale scaler scatter schedule scheduler scope score script scripts seed segments
    select self send sequential sgd shape shard sharded short sigmoid signed silu single sites size slow slower sm softmax sort
    spans sparse spawn split splits src stage start state stdin step steps stop stream streaming strided string subgraph sum
    supported sve swiglu sync synchronize t table tables tanh task temperature tensor tensorlist tensors test tf32 tfevents tflop
    than thread threshold tile time timed timeout times timing to token tokenizer tokens too tools top topk torch torchdynamo tp
    trace traces train trainer training transfer transform transformer triggered trilinear triton true trunc tw txt type u ucc
    uint16 uint32 uint64 uint8 unet uninitialized unknown unscale unshard unsigned up update user util utilization utils uvm v vae
    val valid validate validation value values version view views vit vsx wait warm warmup was weight weights whole whose width
    window with without work worker workers world wrap wrapper write x x2 xccl xid xpu xy y z zero zeros
"""

WORDS = frozenset(_TEXT.split())
"""Lower case. From torch.profiler, torch.distributed, Lightning, Accelerate, DeepSpeed and TorchRec, data types, and training loops."""
