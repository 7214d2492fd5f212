"""The settings of torch that change speed or numerics: precision, switches, optimizers and data loaders. Reads only.

Since torch 2.9 (torch/backends/__init__.py) each backend and operation has its own `fp32_precision`, and the older getters warn once, or
raise, where the new switches were used. The new ones never do, and tell what the old setters did too. So they are asked first.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import msgspec

from gpudiag.capture.environment.process import ALLOCATOR_OPTION, MAX_NAME, MAX_VALUE, as_count, as_flag, as_name, try_read
from gpudiag.capture.hooks import Patches
from gpudiag.model.bundle import LoaderSettings, OptimizerSettings, Settings

_OPERATIONS = (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul"), ("mkldnn", "conv"))
"""Pairs for torch._C._get_fp32_precision_getter; operations 'conv' and 'rnn' of backend 'cuda' are cuDNN's (backends/cudnn)."""

_BLOCKED = "0"
"""NVIDIA_TF32_OVERRIDE=0: NVIDIA's libraries never use TF32, whatever the program says (cuBLAS documentation, "TF32")."""


def read_precision_settings() -> dict[str, Any]:
    """Return the fields of model.bundle.Settings about fp32 precision.

    `fp32_precision`: 'cuda.matmul', 'cudnn.conv', ... -> 'ieee' | 'tf32' | 'bf16' | 'none'; empty before torch 2.9. The two booleans say
    what NVIDIA's libraries do: False under NVIDIA_TF32_OVERRIDE=0.
    """
    import torch

    getter: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
    found = {}
    for backend, operation in _OPERATIONS if getter is not None else ():
        value = try_read(partial(getter, backend, operation))
        if isinstance(value, str):
            found[f"{'cudnn' if backend == 'cuda' and operation != 'matmul' else backend}.{operation}"] = value
    product: bool | None
    convolution: bool | None
    precision: str | None
    if found:
        # 'medium' is bf16 in oneDNN and TF32 in cuBLAS, 'high' TF32 (torch.set_float32_matmul_precision)
        device, host = found.get("cuda.matmul"), found.get("mkldnn.matmul")
        precision = "medium" if host == "bf16" else "high" if "tf32" in (device, host) else "highest"
        product = None if device is None else device == "tf32"
        convolution = found["cudnn.conv"] == "tf32" if "cudnn.conv" in found else None
    else:
        product = as_flag(try_read(lambda: torch._C._get_cublas_allow_tf32()))
        convolution = as_flag(try_read(lambda: torch._C._get_cudnn_allow_tf32()))
        precision = try_read(torch.get_float32_matmul_precision)
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == _BLOCKED:
        product = convolution = False
    return {
        "float32_matmul_precision": precision,
        "cuda_matmul_allow_tf32": product,
        "cudnn_allow_tf32": convolution,
        "fp32_precision": found,
    }


_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""In the order in which torch asks for them (c10/core/AllocatorConfig.cpp)."""


def has_compiled() -> bool | None:
    """Return whether torch.compile produced code in this process; the compiler is not imported."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return as_flag(try_read(lambda: dynamo is not None and dynamo.counters["stats"]["unique_graphs"] > 0))


def read_settings() -> Settings:
    """Return the switches and threads in force now."""
    import torch

    getters = {name: getattr(torch._C, f"_get_cudnn_{name}", None) for name in ("benchmark", "deterministic", "enabled")}
    cudnn: dict[str, Any] = {f"cudnn_{name}": getter and as_flag(try_read(getter)) for name, getter in getters.items()}
    options = try_read(lambda: torch._C._accelerator_getAllocatorSettings())  # since torch 2.9; also knows what the program has set
    if not isinstance(options, str) or not options:
        options = next((os.environ[name] for name in _ALLOCATOR_VARIABLES if os.environ.get(name)), "")
    reductions = {}  # whether cuBLAS may reduce in that type
    for kind in ("bf16", "fp16"):
        getter = getattr(torch._C, f"_get_cublas_allow_{kind}_reduced_precision_reduction", None)
        value = None if getter is None else try_read(getter)
        # newer torch answers with a pair: (this, split-K allowed)
        value = as_flag(value[0] if isinstance(value, tuple) and value else value)
        if value is not None:
            reductions[kind] = value
    return Settings(
        **read_precision_settings(),
        **cudnn,
        deterministic=try_read(torch.are_deterministic_algorithms_enabled),
        threads=try_read(torch.get_num_threads),
        interop_threads=try_read(torch.get_num_interop_threads),
        reduced_precision_reduction=reductions,
        sdp_backends=read_sdp_backends(),
        anomaly_detection=as_flag(try_read(torch.is_anomaly_enabled)),
        allocator={match[1]: match[2] for match in ALLOCATOR_OPTION.finditer(options)} if len(options) <= MAX_VALUE else {},
    )


def read_sdp_backends() -> tuple[str, ...] | None:
    """Return the kernels that scaled_dot_product_attention may choose from now; None where torch does not say."""
    import torch

    # Kernels of scaled_dot_product_attention with a switch in torch.backends.cuda
    getters = {name: getattr(torch._C, f"_get_{name}_sdp_enabled", None) for name in ("flash", "mem_efficient", "cudnn", "math")}
    states = {name: as_flag(try_read(getter)) for name, getter in getters.items() if getter is not None}
    return tuple(name for name, on in states.items() if on) if states else None


def read_tracers() -> list[str]:
    """Return the modules of what hears of every call or line of Python on this thread: debuggers, profilers, coverage."""
    hearing = [function for function in (sys.gettrace(), sys.getprofile()) if function is not None]
    names = [as_name(getattr(one, "__module__", None) or type(one).__module__) or "unknown" for one in hearing]
    monitoring = getattr(sys, "monitoring", None)  # since Python 3.12: tools 0 to 5 are for programs
    tools = [monitoring.get_tool(one) for one in range(6) if monitoring.get_tool(one) and monitoring.get_events(one)] if monitoring else []
    return names + [as_name(tool) or "unknown" for tool in tools]


class WindowSettings:
    """Settings as of the end of the first timing window, or of now until then. A mark stands outside the regions of a step.

    So anomaly detection is asked about where a backward pass begins. Which kernels attention may use is known there too, where
    the region spans forward and backward passes; where it spans less, it is unknown.
    """

    def __init__(self) -> None:
        self._frozen: Settings | None = None
        self._anomaly = self._chosen = False
        self._tracers: set[str] = set()
        self._inside: set[tuple[str, ...] | None] = set()

    def install(self, patches: Patches) -> None:
        """Hear of sdpa_kernel regions. Where this torch has none there is nothing to hear of."""
        from torch.nn import attention

        def wrap_region(original: Callable[..., Any]) -> Callable[..., Any]:
            def entered(*args: Any, **kwargs: Any) -> Any:
                self._chosen = True
                return original(*args, **kwargs)

            return entered

        # What torch.nn.attention.sdpa_kernel calls when it is entered, to know what to put back; the second is that of torch 2.4
        for name in [name for name in ("_cur_sdpa_kernel_backends", "math_sdp_enabled") if hasattr(attention, name)][:1]:
            patches.wrap(attention, name, wrap_region)

    def backward_began(self) -> None:
        """Look inside a step."""
        import torch

        if self._frozen is None:
            self._anomaly = self._anomaly or torch.is_anomaly_enabled()
            if sys.gettrace() is not None or sys.getprofile() is not None or hasattr(sys, "monitoring"):
                self._tracers.update(try_read(read_tracers) or ())
            if self._chosen:
                self._inside.add(read_sdp_backends())

    def now(self, *, freeze: bool = False) -> Settings:
        """Return the settings; `freeze`: they stay as they are now, for good."""
        if self._frozen is not None:
            return self._frozen
        found = read_settings()
        backends = found.sdp_backends
        if self._chosen:  # those in every backward pass where they are others than between steps, else unknown
            backends = next(iter(self._inside)) if len(self._inside) == 1 and backends not in self._inside else None
        anomaly = True if self._anomaly else found.anomaly_detection
        settings = msgspec.structs.replace(found, anomaly_detection=anomaly, sdp_backends=backends, tracers=tuple(sorted(self._tracers)))
        if freeze:
            self._frozen = settings
        return settings


def read_optimizer_settings(optimizer: Any) -> OptimizerSettings:
    """Return what the optimizer is, how many parameters it updates and how. Called once for each optimizer: about 1 us a tensor."""
    groups = optimizer.param_groups
    tensors = [tensor for group in groups for tensor in group["params"]]
    ways = set(try_read(lambda: [_find_implementation(optimizer, group) for group in groups]) or [None])
    return OptimizerSettings(
        name=type(optimizer).__name__[:MAX_NAME],
        parameters=sum(tensor.numel() for tensor in tensors),
        tensors=len(tensors),
        **{name: as_flag(optimizer.defaults.get(name)) for name in ("fused", "foreach", "capturable")},
        implementation=ways.pop() if len(ways) == 1 else "mixed",
        channels_last=try_read(lambda: _is_channels_last(tensors)),
    )


def _find_implementation(optimizer: Any, group: Mapping[str, Any]) -> Literal["fused", "foreach", "for-loop"] | None:
    """Return how torch runs the step of `group`: the decision at the head of torch/optim/adam.py, sgd.py and the others."""
    if not type(optimizer).__module__.startswith("torch.optim") or "foreach" not in group:
        return None  # of a library: what its flags mean is not known
    fused, foreach = group.get("fused"), group["foreach"]
    if fused:
        return "fused"
    if foreach is None and fused is None:  # the user has not said
        from torch import Tensor
        from torch.optim import optimizer as module

        _, foreach = module._default_to_fused_or_foreach(group["params"], bool(group.get("differentiable")), use_fused=False)
        unsupported = isinstance(group.get("lr"), Tensor) and "capturable" in group and not group["capturable"]
        foreach = foreach and not unsupported
    return "foreach" if foreach else "for-loop"


def _is_channels_last(tensors: Iterable[Any]) -> bool | None:
    """Return whether most weights of convolutions lie in channels_last.

    Only a 4-D tensor with several channels and more than one place tells: others are both layouts at once.
    """
    import torch
    from torch.nn import Parameter

    votes = [0, 0]
    for tensor in tensors:
        if tensor.ndim == 4 and type(tensor) in (Parameter, torch.Tensor):
            plain = tensor.is_contiguous()
            if plain != tensor.is_contiguous(memory_format=torch.channels_last):
                votes[not plain] += 1
    return votes[1] > votes[0] if any(votes) else None


def read_loader_settings(loader: Any) -> LoaderSettings | None:
    """Return the settings of a DataLoader, or of an iterator of one; None for any other iterable."""
    under = next((prefix for prefix in ("", "_") if as_count(getattr(loader, f"{prefix}num_workers", None)) is not None), None)
    if under is None:
        return None
    names = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "drop_last", "in_order", "pin_memory_device")
    values: dict[str, Any] = {name: getattr(loader, f"{under}{name}", None) for name in names}
    index_sampler = try_read(lambda: loader._index_sampler)  # BatchSampler, or the sampler itself
    size = None if under else getattr(loader, "batch_size", None)
    number = as_count(getattr(loader, "_dataset_kind", None))  # torch.utils.data.dataloader._DatasetKind
    kind: Literal["map", "iterable"] | None = "map" if number == 0 else "iterable" if number == 1 else None
    start_method = None
    if values["num_workers"]:
        with suppress(Exception):  # how the workers start; where the program has not chosen, Python's default once it is fixed
            context, workers = getattr(loader, "multiprocessing_context", None), getattr(loader, "_workers", None)
            chosen = context.get_start_method(allow_none=True) if context is not None else None
            chosen = chosen or (getattr(workers[0], "_start_method", None) if workers else None)
            start_method = as_name(chosen or multiprocessing.get_start_method(allow_none=True))
    return LoaderSettings(
        num_workers=values["num_workers"],
        pin_memory=bool(values["pin_memory"]),
        persistent_workers=bool(values["persistent_workers"]),
        prefetch_factor=as_count(values["prefetch_factor"]),
        batch_size=as_count(size if size is not None else getattr(index_sampler, "batch_size", None)),
        drop_last=as_flag(values["drop_last"]),
        in_order=as_flag(values["in_order"]),
        sampler=None if kind != "map" else as_name(type(getattr(index_sampler, "sampler", index_sampler)).__name__),
        dataset=kind,
        start_method=start_method,
        pin_memory_device=as_name(values["pin_memory_device"]),
    )
