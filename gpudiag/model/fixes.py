"""Descriptors of the fixes that rules may name and experiments can apply. `apply` and `evidence` live in experiment/fixes/."""

from __future__ import annotations

from typing import Literal

import msgspec

Parity = Literal["exact", "rounding", "low_precision", "semantics"]


class Fix(msgspec.Struct, frozen=True):
    """A change that can be tried: its id, what it does, how far results may differ, what it cannot be combined with."""

    id: str
    title: str
    parity: Parity
    change: str
    """The code change that a user would make."""
    conflicts: tuple[str, ...] = ()
    values: str = ""
    """What `--fix ID=VALUE` takes, for a person: 'x2, or a number of samples'; '' for nothing."""
    verified: tuple[str, ...] = ("cpu",)
    """Device kinds on which an experiment has shown it to work: of a fix without "gpu" is said `not verified on a GPU`."""
    injected: bool = True
    """Whether `gpudiag ab --fix ID` can put it into a running program; else a copy of the script has to hold the change."""
    needs_value: bool = False
    """Whether `--fix ID` is refused without a value."""


_EITHER_OR = (
    ("compile", "compile-reduce-overhead", "compile-max-autotune", "fuse-region"),
    ("cuda-graphs", "compile-reduce-overhead"),
    ("cuda-graphs", "compile-max-autotune"),
    ("bf16", "fp16"),
    ("fused-optimizer", "foreach-optimizer"),
)
"""Fixes of which no two can be combined."""

_FIXES = (
    Fix("compile", "Compile the model", "rounding", "model = torch.compile(model)"),
    Fix(
        "compile-reduce-overhead",
        "Compile with CUDA graphs",
        "rounding",
        'model = torch.compile(model, mode="reduce-overhead")',
        verified=(),
    ),
    Fix("compile-max-autotune", "Compile and autotune GEMMs", "rounding", 'model = torch.compile(model, mode="max-autotune")'),
    Fix(
        "cuda-graphs", "The step as a CUDA graph", "rounding", "model = torch.cuda.make_graphed_callables(model, sample_args)", verified=()
    ),
    Fix(
        "fuse-region",
        "Compile the region that fuses",
        "rounding",
        "region = torch.compile(region)",
        values="the path of a module below the model; '*' stands for any part, as in layers.*.mlp",
        needs_value=True,
    ),
    Fix("bf16", "bfloat16 autocast", "low_precision", "with torch.autocast(device_type, dtype=torch.bfloat16): loss = ..."),
    Fix(
        "fp16",
        "float16 autocast with a GradScaler",
        "low_precision",
        "with torch.autocast(device_type, dtype=torch.float16): loss = ...; scaler = torch.amp.GradScaler()",
    ),
    Fix(
        "tf32",
        "TF32 for float32 matrix products",
        "low_precision",
        'torch.set_float32_matmul_precision("high")',
        values="high (TF32, the default) or medium (bfloat16)",
    ),
    Fix("channels-last", "NHWC memory format", "rounding", "model = model.to(memory_format=torch.channels_last)"),
    Fix("fused-optimizer", "Fused optimizer step", "rounding", "torch.optim.AdamW(params, fused=True)  # Adam, AdamW, SGD, Adagrad"),
    Fix("foreach-optimizer", "Multi-tensor optimizer step", "rounding", "torch.optim.AdamW(params, foreach=True)"),
    Fix(
        "sdpa",
        "Fused attention",
        "rounding",
        "F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p if model.training else 0)  # is_causal=True: a causal mask",
        values="flash, efficient or cudnn: the back-end that is to be preferred; without a value a Hugging Face model is switched to sdpa",
    ),
    Fix("gelu-tanh", "GELU by its approximation", "low_precision", 'nn.GELU(approximate="tanh"); F.gelu(x, approximate="tanh")'),
    Fix("checkpointing", "Activation checkpointing", "exact", "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"),
    Fix(
        "batch-size",
        "Another batch size",
        "semantics",
        "batch_size = ...  # adjust accumulation or learning rate",
        values="a factor (x2, the default) or a number of samples",
    ),
    Fix("batch-requests", "More inputs at once", "rounding", "outputs = model(torch.cat(inputs))", injected=False),
    Fix(
        "accumulation",
        "Gradient accumulation",
        "rounding",
        "loss = loss / n; step every n micro-batches",
        values="a number of micro-batches, 2 by default; only gpudiag.ab(build) can apply it",
        injected=False,
    ),
    Fix(
        "loader-workers",
        "Load in worker processes, or in more of them",
        "semantics",
        "DataLoader(..., num_workers=n)",
        values="a number of processes; by default one for each core, four at most",
    ),
    Fix(
        "worker-threads",
        "One thread in each loader worker",
        "rounding",
        "DataLoader(..., worker_init_fn=lambda _: (cv2.setNumThreads(1), threadpoolctl.threadpool_limits(1)))  # or OPENBLAS_NUM_THREADS=1",
    ),
    Fix("loader-prefetch", "Prefetch more batches", "exact", "DataLoader(..., prefetch_factor=4)", values="batches a worker, 4 by default"),
    Fix("persistent-workers", "Keep loader workers between epochs", "semantics", "DataLoader(..., persistent_workers=True)"),
    Fix("pin-memory", "Pinned host memory", "exact", "DataLoader(..., pin_memory=True)  # or pinned tensors of your own", verified=()),
    Fix("non-blocking", "Asynchronous copies to the device", "exact", "x = x.to(device, non_blocking=True)", verified=()),
    Fix("device-prefetch", "Copy the next batch on a side stream", "exact", "copy batch k+1 while step k runs", verified=()),
    Fix("zero-grad-none", "Drop gradients instead of zeroing them", "exact", "optimizer.zero_grad(set_to_none=True)"),
    Fix("cudnn-benchmark", "Let cuDNN choose algorithms by timing", "rounding", "torch.backends.cudnn.benchmark = True", verified=()),
    Fix("alloc-conf", "Allocator settings", "exact", "PYTORCH_ALLOC_CONF=expandable_segments:True", verified=()),
    Fix("malloc", "Keep host memory instead of returning it", "exact", "MALLOC_MMAP_THRESHOLD_=268435456 MALLOC_TRIM_THRESHOLD_=268435456"),
    Fix("gc-freeze", "Collect garbage of the steps alone", "exact", "gc.collect(); gc.freeze()  # after the first steps"),
    Fix(
        "ddp-options",
        "DistributedDataParallel options",
        "rounding",
        "DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True, static_graph=True)",
        values="bucket=MIB, view, static, no-buffers (broadcast_buffers=False), joined by commas; by default bucket=100,view,static",
    ),
)

FIXES = tuple(
    msgspec.structs.replace(fix, conflicts=tuple(other for group in _EITHER_OR if fix.id in group for other in group if other != fix.id))
    for fix in _FIXES
)
FIX_BY_ID = {fix.id: fix for fix in FIXES}
