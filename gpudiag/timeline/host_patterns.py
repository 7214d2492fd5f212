"""What names of frames, marks, ops and calls say about the cause of a wait. One table, no logic.

Frames are 'file.py(line): function' or '<built-in ...>' (torch/csrc/autograd/profiler_python.cpp).
"""

from __future__ import annotations

from gpudiag.trace import kernel_names

# Kineto's names of CUPTI's overhead records (CUpti_ActivityOverheadKind). The work of the driver and of lazy loading is the run's own.
OVERHEADS: dict[str, str] = {
    "idle_compile": r"(?i)driver.?compiler|lazy.?function.?loading|module.?loading",
    "idle_profiler": r"(?i)flush|instrumentation|resource|buffer.?request|activity|uvm|overhead|unknown",
}

# Starting, stopping and stepping a torch profiler. record_function stands in torch/autograd/profiler.py too: it is the user's.
_PROFILER = (
    r"(^|/)torch/profiler/[\w/]+\.py\(\d+\): |(^|/)gpudiag/capture/windows?\.py\("
    r"|built-in method _(?:prepare|enable|disable|toggle)\w*_(?:profiler|dynamic)|built-in method _kineto_step"
)

# Not compiled_fn and the like, nor compile_wrapper (torch/_dynamo/eval_frame.py): they run what was compiled before.
_COMPILES = r"_?compile(?:_(?:[a-vx-z]\w*|with\w*))?"

# torch.compile at work (not: compiled code at run time), Triton's compiler, autotuners that time candidates, code that is loaded.
_COMPILE = (
    r"(^|/)torch/_dynamo/(?:convert_frame|symbolic_convert|output_graph|bytecode_\w+)\.py\("
    rf"|(^|/)torch/_(?:dynamo|inductor|functorch)/[\w/]+\.py\(\d+\): (?:{_COMPILES}|codegen\w*|create_aot_dispatcher_function"
    r"|aot_(?:function|module)_simplified|fx_codegen_and_compile|precompile\w*|_precompile\w*|benchmark_all_configs|autotune_to_one_config)$"
    r"|(^|/)torch/utils/cpp_extension\.py\(|(^|/)torch/fx/experimental/\w*symbolic_shapes\.py\("
    r"|(^|/)triton/compiler/|(^|/)triton/runtime/\w+\.py\(\d+\): (?:compile|_do_compile|_init_handles|_bench|benchmark|warmup)$"
    r"|built-in (?:method|function) (?:load_binary|compile)\b"
)

_LOADER = (
    r"(^|/)torch/utils/data/dataloader\.py\(\d+\): (?:__next__|__iter__|_next_data|_get_data|_get_iterator)$"
    r"|(?i:data_?loader|dataloading|nvidia/dali|webdataset|ffcv)[\w/]*\.py\(\d+\): (?:__next__|__iter__|_fetch\w*|next)$"
)

_IO = (
    r"(^|/)torch/serialization\.py\(\d+\): |(^|/)torch/distributed/checkpoint/|(^|/)safetensors/"
    r"|(^|/)torch/utils/tensorboard/|(^|/)(?:tensorboardX?|wandb|mlflow|comet_ml|neptune|aim|tqdm|loguru)/"
    r"|(^|/)logging/(?:__init__|handlers)\.py\(|(^|/)(?:shutil|tempfile|csv|zipfile)\.py\(|(^|/)json/__init__\.py\(\d+\): (?:dump|load)$"
    r"|built-in (?:method|function) (?:open|print|input|write|writelines|pwrite|flush|fsync|fdatasync|truncate|rename|replace|remove|unlink"
    r"|mkdir|rmdir|makedirs|copyfile|sendfile|readinto|readline|readlines|dump|write_record\w*|write_end_of_file)\b"
    r"|built-in (?:method|function) (?:read|close|seek)\b[^>]*(?:posix|_io|PyTorchFile)"
    r"|PyTorchFileWriter|built-in method tofile|(^|/)numpy/lib/_?npyio\w*\.py\(|(^|/)PIL/Image\.py\(\d+\): (?:open|save)$"
)

_ALLOCATION = r"(^|/)torch/cuda/memory\.py\(\d+\): (?:empty_cache|caching_allocator_\w+)$|built-in \w+ _\w+_emptyCache"

FRAMES: dict[str, str] = {
    "idle_profiler": _PROFILER,
    "idle_gc": r"built-in function collect>",
    "idle_compile": _COMPILE,
    "idle_data": _LOADER,
    "idle_io": _IO,
    "idle_allocation": _ALLOCATION,
}

# On a CPU-only run: waiting for another thread or process. On a GPU run the host is then busy elsewhere: cause launch.
WAIT_FRAMES = (
    r"built-in (?:method|function) (?:acquire|wait|join|poll|select|recv\w*|get|__enter__)\b[^>]*"
    r"(?:lock|Lock|Condition|Semaphore|select|poll|socket|Queue|Work|Future|Store|ProcessGroup)"
    r"|(^|/)threading\.py\(\d+\): (?:wait|join|acquire|_wait_for_tstate_lock)$|(^|/)queue\.py\(\d+\): get$"
    r"|(^|/)multiprocessing/(?:connection|queues|pool|synchronize)\.py\(\d+\): (?:wait|get|recv|poll|_poll|join|acquire)$"
    r"|(^|/)concurrent/futures/\w+\.py\(\d+\): (?:result|wait)$|(^|/)torch/distributed/distributed_c10d\.py\(\d+\): (?:barrier|wait)$"
)

MARKS: dict[str, str] = {"idle_compile": kernel_names.COMPILE_MARK, "idle_data": kernel_names.LOADER_MARK}

# cuModuleLoadData, cuLibraryLoadData, hipModuleLoad, cuLinkComplete...: device code is loaded or compiled by the driver; with lazy loading
# that is put off to the call that asks for a kernel (cuModuleGetFunction, cuFuncLoad, cuKernelGetFunction).
CALLS: dict[str, str] = {
    "idle_compile": r"(?i)^(cu|hip|cuda)(Module|Library|Link|Kernel)(Load|Create|Complete|Add|GetFunction|GetKernel)|^cuFuncLoad$",
    "idle_allocation": kernel_names.ALLOCATION_CALL + r"|^(cuda|hip)Host(Register|Unregister)|^(cuda|hip)MemPoolTrimTo",
}

# Frames in which a thread only waits for its partner: backward() waits for the autograd thread.
HANDED_OVER = r"run_backward"

STREAM_WAIT = r"(?i)^(cuda|hip|cu)StreamWaitEvent"
