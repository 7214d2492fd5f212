"""What the process brought along: packages and environment variables; and reading one thing that may not be there, silently.

A value is kept only where it has the form that the variable is documented to have: numbers, switches and fixed words. Such a form can hold
neither a secret nor a path; any other value is recorded as 'set', without the value.
"""

from __future__ import annotations

import email.parser  # noqa: F401 - importlib.metadata imports it when it reads a version; no import may happen in our thread
import gc
import operator
import os
import re
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from itertools import chain, compress, repeat
from typing import Any

MAX_NAME = 80
"""Characters kept of the name of a class or function of the user's."""

_NAME = re.compile(r"[A-Za-z_][\w.]*")


def try_read(getter: Callable[[], Any]) -> Any:
    """Return what `getter` returns; None where this build of torch does not have it."""
    try:
        return getter()
    except Exception:  # noqa: BLE001 - a setting that cannot be read is unknown; the training run must not notice
        return None


def as_flag(value: object) -> bool | None:
    """Return `value` if it is a truth value, else None."""
    return value if isinstance(value, bool) else None


def as_count(value: object) -> int | None:
    """Return `value` if it is a whole number, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def as_name(value: object) -> str | None:
    """Return `value` if it is a dotted Python name of at most MAX_NAME characters, else None."""
    return value if isinstance(value, str) and len(value) <= MAX_NAME and _NAME.fullmatch(value) else None


def as_dtype_name(value: object) -> str | None:
    """Return a torch.dtype as 'bfloat16'; None for None."""
    return None if value is None else str(value).removeprefix("torch.")[:MAX_NAME]


KNOWN_PACKAGES = {
    "torch": "torch", "torchvision": "torchvision", "torchaudio": "torchaudio", "torchdata": "torchdata", "torchao": "torchao",
    "torchtitan": "torchtitan", "triton": "triton", "numpy": "numpy", "transformers": "transformers", "tokenizers": "tokenizers",
    "datasets": "datasets", "accelerate": "accelerate", "lightning": "lightning", "pytorch_lightning": "pytorch-lightning",
    "deepspeed": "deepspeed", "megatron": "megatron-core", "peft": "peft", "trl": "trl", "timm": "timm", "diffusers": "diffusers",
    "flash_attn": "flash-attn", "xformers": "xformers", "apex": "apex", "transformer_engine": "transformer-engine",
    "bitsandbytes": "bitsandbytes", "liger_kernel": "liger-kernel", "unsloth": "unsloth", "torch_geometric": "torch-geometric",
    "dgl": "dgl", "webdataset": "webdataset", "nvidia.dali": "nvidia-dali-cuda120", "kornia": "kornia", "composer": "mosaicml",
    "tensordict": "tensordict", "fla": "flash-linear-attention", "mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d",
    "hivemind": "hivemind", "jax": "jax", "tensorflow": "tensorflow",
}  # fmt: skip
"""Module -> the distribution that installs it."""

_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+!_-]{0,63}")
"""PEP 440, local versions included."""


def read_packages() -> dict[str, str]:
    """Return distribution -> version of the known packages in sys.modules; nothing is imported."""
    found = {}
    for name, distribution in KNOWN_PACKAGES.items():
        if name not in sys.modules:
            continue
        module = sys.modules[name]
        # what the module itself says (an attribute: lazy modules are not made to load), else what was installed
        version = vars(module).get("__version__") if hasattr(module, "__dict__") else None
        if not isinstance(version, str):
            try:
                version = metadata.version(distribution)
            except (metadata.PackageNotFoundError, OSError, ValueError):
                continue
        if _VERSION.fullmatch(str(version)):
            found[distribution] = str(version)
    return found


MAX_VALUE = 200
"""Characters of a value that is kept."""

_NUMBER = r"\d{1,9}"
_NUMBERS = rf"{_NUMBER}(,{_NUMBER}){{0,7}}"
_COLLECTIVE = r"(allreduce|allgather|reducescatter|broadcast|reduce):"
_SWITCH = r"0|1|true|false|yes|no|on|off"
_ALLOCATOR_VALUE = rf"True|False|native|cudaMallocAsync|{_NUMBER}(\.\d{{1,6}})?|\[[\d:,> ]{{1,100}}\]"

ALLOCATOR_KEYS = (
    "backend", "expandable_segments", "garbage_collection_threshold", "max_split_size_mb", "max_non_split_rounding_mb",
    "pinned_num_register_threads", "pinned_reserve_segment_size_mb", "pinned_use_background_threads", "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register", "per_process_memory_fraction", "graph_capture_record_stream_reuse", "large_segment_size_mb",
    "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "roundup_power2_divisions",
)  # fmt: skip
"""Options of PYTORCH_ALLOC_CONF (PyTorch's CUDA semantics, "Optimizing memory usage with PYTORCH_ALLOC_CONF")."""

_OPTION = rf"({'|'.join(ALLOCATOR_KEYS)}):({_ALLOCATOR_VALUE})"
_ALLOCATOR = rf"{_OPTION}(,{_OPTION}){{0,15}}"

_LOG = (
    r"[+-]?(all|dynamo|aot|inductor|dynamic|torch|distributed|c10d|ddp|fsdp|export|guards|recompiles|graph_breaks|graph|graph_code|"
    r"output_code|schedule|perf_hints|cudagraphs|compiled_autograd|autograd)"
)
"""A name that TORCH_LOGS takes (torch/_logging/_registrations.py), with its level."""

FORMS: dict[str, str] = {
    # Where memory comes from; expandable_segments and max_split_size_mb decide about fragmentation (three names, by age and vendor).
    "PYTORCH_ALLOC_CONF": _ALLOCATOR,
    "PYTORCH_CUDA_ALLOC_CONF": _ALLOCATOR,
    "PYTORCH_HIP_ALLOC_CONF": _ALLOCATOR,
    # Every allocation is a cudaMalloc, which synchronises.
    "PYTORCH_NO_CUDA_MEMORY_CACHING": _SWITCH,
    # Threads of the CPU kernels; torchrun sets OMP_NUM_THREADS=1 where it is not set.
    "OMP_NUM_THREADS": _NUMBERS,
    "MKL_NUM_THREADS": _NUMBER,
    # Every launch waits for its kernel: no figure of the host means anything then.
    "CUDA_LAUNCH_BLOCKING": _SWITCH,
    # 1 keeps the order of launches over streams (tensor and sequence parallelism rely on it); more lets them overlap.
    "CUDA_DEVICE_MAX_CONNECTIONS": _NUMBER,
    # EAGER loads all kernels at start, LAZY each at its first launch.
    "CUDA_MODULE_LOADING": "LAZY|EAGER|DEFAULT",
    # TF32 against what the program says.
    "NVIDIA_TF32_OVERRIDE": "0|1",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0|1",
    # xf32 on AMD.
    "HIPBLASLT_ALLOW_TF32": "0|1",
    # Workspace of cuBLAS: memory, and whether its results repeat.
    "CUBLAS_WORKSPACE_CONFIG": rf"(:{_NUMBER}:{_NUMBER}){{1,4}}",
    # Switched off ways between GPUs, forced algorithms: collectives below the rate of the link.
    "NCCL_P2P_DISABLE": "0|1",
    "NCCL_SHM_DISABLE": "0|1",
    "NCCL_IB_DISABLE": "0|1",
    "NCCL_ALGO": rf"({_COLLECTIVE}|Ring|Tree|CollnetDirect|CollnetChain|NVLSTree|NVLS|PAT|[,;^]){{1,32}}",
    "NCCL_PROTO": rf"({_COLLECTIVE}|LL128|LL|Simple|[,;^]){{1,32}}",
    # Collectives that block the host.
    "TORCH_NCCL_BLOCKING_WAIT": _SWITCH,
    "TORCH_DISTRIBUTED_DEBUG": "OFF|INFO|DETAIL",
    # Logs of every collective and of what the compiler does.
    "NCCL_DEBUG": "VERSION|WARN|INFO|ABORT|TRACE",
    "TORCH_LOGS": rf"{_LOG}(,{_LOG}){{0,8}}",
    # torch.compile switched off, or tuned for longer.
    "TORCH_COMPILE_DISABLE": _SWITCH,
    "TORCHDYNAMO_DISABLE": _SWITCH,
    "TORCHINDUCTOR_MAX_AUTOTUNE": _SWITCH,
    # Tokenizers in forked workers run on one thread.
    "TOKENIZERS_PARALLELISM": _SWITCH,
}
"""Name -> the form (a regular expression) that its value must have to be kept."""

_FORMS = {name: re.compile(form, re.IGNORECASE) for name, form in FORMS.items()}


def read_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """Return the variables of FORMS that are set; None for a value that does not have its form."""
    found: dict[str, str | None] = {}
    for name, form in _FORMS.items():
        if value := environment.get(name):
            found[name] = value.strip() if len(value) <= MAX_VALUE and form.fullmatch(value.strip()) else None
    return found


ALLOCATOR_OPTION = re.compile(_OPTION)
"""A known option (1) and its value (2) in a text that is written as PYTORCH_ALLOC_CONF is."""


def list_objects() -> list[Any]:
    """Return the objects that Python's collector knows, but tuples: where another thread is making one (`tuple(generator)`), CPython raises
    SystemError there if somebody else holds it (_PyTuple_Resize).

    From the collector's answer until the tuples are gone from it no line calls anything, and only after calls do other threads run.
    """
    every: list[Any] = []
    others = compress(every, map(operator.is_not, map(type, every), repeat(tuple)))
    source = chain.from_iterable(map(gc.get_objects, (None,)))
    every += source
    found = [*others]
    del every[:]
    return found


def find_instances(wanted: Mapping[type, str]) -> dict[str, list[Any]]:
    """Return the living objects of each kind in `wanted`; subclasses are of the kind too, and the first kind that fits counts.

    Told by their types alone, by the order of their bases: isinstance would run code of proxies and of metaclasses.
    """
    kinds: dict[int, str | None] = {}  # by the type's id: a metaclass may define its own equality
    found: dict[str, list[Any]] = {kind: [] for kind in wanted.values()}
    for item in list_objects():
        cls = id(type(item))
        if cls not in kinds:
            bases = type.__dict__["__mro__"].__get__(type(item))
            kinds[cls] = next((kind for base, kind in wanted.items() if base in bases), None)
        if (kind := kinds[cls]) is not None:
            found[kind].append(item)
    return found
