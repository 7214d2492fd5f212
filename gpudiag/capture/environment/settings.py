"""The switches of torch that change speed or numerics, as they stand now. Reads only: quick, silent, and it initialises nothing."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from gpudiag.capture.environment.precision import precision_settings
from gpudiag.capture.environment.reading import flag, read
from gpudiag.capture.environment.variables import allocator_options
from gpudiag.model.bundle import LoaderSettings, OptimizerSettings, Settings

_SDP = ("flash", "mem_efficient", "cudnn", "math")
"""Kernels of scaled_dot_product_attention with a switch in torch.backends.cuda."""

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""In the order in which torch asks for them (c10/core/AllocatorConfig.cpp)."""


def settings(
    autocast: tuple[str, ...] = (), optimizers: tuple[OptimizerSettings, ...] = (), loader: LoaderSettings | None = None
) -> Settings:
    """Return the switches and threads in force now, with what was seen of autocast, optimizers and the loader."""
    import torch

    return Settings(
        **precision_settings(),
        **_cudnn(),
        deterministic=read(torch.are_deterministic_algorithms_enabled),
        autocast=autocast,
        threads=read(torch.get_num_threads),
        interop_threads=read(torch.get_num_interop_threads),
        optimizers=optimizers,
        loader=loader,
        compiled=read(_compiled),
        reduced_precision_reduction=_reductions(),
        sdp_backends=sdp_backends(),
        anomaly_detection=flag(read(torch.is_anomaly_enabled)),
        allocator=_allocator(),
    )


def as_recorded(then: Settings, now: Settings) -> Settings:
    """Return the switches as they stood `then`, with what is learnt on the way (autocast, optimizers, loader, compiled) as of `now`."""
    return msgspec.structs.replace(then, autocast=now.autocast, optimizers=now.optimizers, loader=now.loader, compiled=now.compiled)


def _cudnn() -> dict[str, Any]:
    import torch

    names = ("benchmark", "deterministic", "enabled")
    getters = {name: getattr(torch._C, f"_get_cudnn_{name}", None) for name in names}
    return {f"cudnn_{name}": None if getter is None else flag(read(getter)) for name, getter in getters.items()}


def _reductions() -> dict[str, bool]:
    """Return 'bf16', 'fp16' -> whether cuBLAS may reduce in that type. Newer torch answers with a pair: (this, split-K allowed)."""
    import torch

    found = {}
    for kind in ("bf16", "fp16"):
        getter = getattr(torch._C, f"_get_cublas_allow_{kind}_reduced_precision_reduction", None)
        value = None if getter is None else read(getter)
        value = flag(value[0] if isinstance(value, tuple) and value else value)
        if value is not None:
            found[kind] = value
    return found


def sdp_backends() -> tuple[str, ...] | None:
    """Return the kernels that scaled_dot_product_attention may choose from now; None where torch does not say."""
    import torch

    getters = {name: getattr(torch._C, f"_get_{name}_sdp_enabled", None) for name in _SDP}
    states = {name: flag(read(getter)) for name, getter in getters.items() if getter is not None}
    return tuple(name for name, on in states.items() if on) if states else None


def _allocator() -> dict[str, str]:
    """Return the options of the caching allocator: those in force where torch tells them, else those of the environment."""
    import torch

    told = read(lambda: torch._C._accelerator_getAllocatorSettings())  # since torch 2.9; also knows what the program has set
    if not isinstance(told, str) or not told:
        told = next((os.environ[name] for name in _ALLOCATOR_VARIABLES if os.environ.get(name)), "")
    return allocator_options(told)


def _compiled() -> bool:
    """Return whether torch.compile produced code in this process, without importing the compiler."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and utils.counters["stats"]["unique_graphs"] > 0
