"""What is known about the machine and the numeric settings of the run. Reads only; names no host, user, path or variable."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from typing import Any

from gpudiag.model.bundle import LoaderSettings, Machine, OptimizerSettings, Settings
from gpudiag.model.hardware import device_key
from gpudiag.model.trace import ObservedDevice


def _read(getter: Callable[[], Any]) -> Any:
    """Return what `getter` returns; None where this build of torch does not have it."""
    try:
        return getter()
    except Exception:  # noqa: BLE001 - a setting that cannot be read is unknown; the training run must not notice
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def _cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def machine() -> Machine:
    """Return the versions, the processor and the number of cores that this process may use."""
    import torch

    return Machine(
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=_read(lambda: torch.version.cuda or torch.version.hip),
        system=f"{platform.system()} {platform.machine()}",
        cpu=_cpu_name(),
        cpu_cores=_cores(),
        isa=_read(torch.backends.cpu.get_cpu_capability),
    )


def settings(
    autocast: tuple[str, ...] = (), optimizers: tuple[OptimizerSettings, ...] = (), loader: LoaderSettings | None = None
) -> Settings:
    """Return the numeric settings and threads in force now, with what was seen of autocast, optimizers and the loader."""
    import torch

    return Settings(
        float32_matmul_precision=_read(torch.get_float32_matmul_precision),
        cuda_matmul_allow_tf32=_read(lambda: torch._C._get_cublas_allow_tf32()),
        cudnn_allow_tf32=_read(lambda: torch._C._get_cudnn_allow_tf32()),
        cudnn_benchmark=_read(lambda: torch.backends.cudnn.benchmark),
        deterministic=_read(torch.are_deterministic_algorithms_enabled),
        autocast=autocast,
        threads=_read(torch.get_num_threads),
        interop_threads=_read(torch.get_num_interop_threads),
        optimizers=optimizers,
        loader=loader,
        compiled=_read(_compiled),
    )


def threads() -> int | None:
    """Return how many threads torch computes with by default; None without torch."""

    def read() -> int:
        import torch

        return int(torch.get_num_threads())

    found = _read(read)
    return found if isinstance(found, int) else None


def _compiled() -> bool:
    """Return whether torch.compile produced code in this process, without importing the compiler."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and utils.counters["stats"]["unique_graphs"] > 0


def observed_device() -> ObservedDevice | None:
    """Return the current CUDA/HIP device; None where this process has not used one (asking would initialise it)."""
    import torch

    if not torch.cuda.is_initialized():
        return None
    index = torch.cuda.current_device()
    found = torch.cuda.get_device_properties(index)
    return ObservedDevice(
        index=index,
        name=found.name,
        sm_count=found.multi_processor_count,
        memory_bytes=found.total_memory,
        compute_capability=None if torch.version.hip else f"{found.major}.{found.minor}",
        warp_size=_read(lambda: found.warp_size),
        key=_read(lambda: device_key(found.name, index, str(found.uuid), found.multi_processor_count)),
    )


def optimizer_settings(optimizer: Any) -> OptimizerSettings:
    """Return what the optimizer is and how many parameters it updates."""
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    flags = {name: _flag(optimizer.defaults.get(name)) for name in ("fused", "foreach", "capturable")}
    return OptimizerSettings(
        name=type(optimizer).__name__, parameters=sum(tensor.numel() for tensor in tensors), tensors=len(tensors), **flags
    )


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def loader_settings(loader: object) -> LoaderSettings | None:
    """Return the settings of a DataLoader, or of an iterator of one; None for any other iterable."""
    get = getattr
    if _count(get(loader, "num_workers", None)) is not None:
        under = ""
    elif _count(get(loader, "_num_workers", None)) is not None:
        under = "_"
    else:
        return None
    sampler = get(loader, "_index_sampler", None)
    size = get(loader, "batch_size", None) if not under else None
    return LoaderSettings(
        num_workers=get(loader, f"{under}num_workers"),
        pin_memory=bool(get(loader, f"{under}pin_memory", False)),
        persistent_workers=bool(get(loader, f"{under}persistent_workers", False)),
        prefetch_factor=_count(get(loader, f"{under}prefetch_factor", None)),
        batch_size=_count(size if size is not None else get(sampler, "batch_size", None)),
    )


def rank_and_world() -> tuple[int, int]:
    """Return rank and world size of this process: torch.distributed where initialised, else RANK and WORLD_SIZE, else 0 of 1."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1
    return (rank, max(world, rank + 1)) if rank >= 0 else (0, 1)
