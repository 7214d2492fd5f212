"""What is known about the machine and the process. Reads only; names no host, user, path or variable."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from gpudiag.capture.environment.loaders import loader_settings
from gpudiag.capture.environment.node import node
from gpudiag.capture.environment.optimizers import optimizer_settings
from gpudiag.capture.environment.reading import count, read
from gpudiag.capture.environment.settings import as_recorded, settings
from gpudiag.model.bundle import Machine
from gpudiag.model.hardware import ObservedDevice, device_key

__all__ = [
    "as_recorded", "gpu_uuid", "loader_settings", "machine", "node", "observed_device", "optimizer_settings", "rank_and_world", "settings",
    "threads",
]  # fmt: skip

_NODES = Path("/sys/devices/system/node")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Time and period in us of the control group, version 2 ('max': no limit; Linux: Documentation/admin-guide/cgroup-v2.rst)."""


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


def _cpu_quota() -> float | None:
    quota, period = _QUOTA.read_text(encoding="ascii").split()
    return None if quota == "max" else int(quota) / int(period)


def _numa_nodes() -> int | None:
    return sum(entry.name.startswith("node") and entry.name[4:].isdigit() for entry in _NODES.iterdir()) or None


def gpu_uuid() -> str | None:
    """Return the UUID of the current device; None where this process has not used one (asking would initialise it)."""
    import torch

    if not torch.cuda.is_initialized():
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)[:64]


def machine() -> Machine:
    """Return the versions, the processor, the number of cores that this process may use, and the device in use."""
    import torch

    return Machine(
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=read(lambda: torch.version.cuda or torch.version.hip),
        system=f"{platform.system()} {platform.machine()}",
        cpu=_cpu_name(),
        cpu_cores=_cores(),
        isa=read(torch.backends.cpu.get_cpu_capability),
        cpu_quota=read(_cpu_quota),
        numa_nodes=read(_numa_nodes),
        gpu_uuid=read(gpu_uuid),
    )


def threads() -> int | None:
    """Return how many threads torch computes with by default; None without torch."""

    def found() -> int:
        import torch

        return int(torch.get_num_threads())

    return count(read(found))


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
        warp_size=read(lambda: found.warp_size),
        key=read(lambda: device_key(found.name, index, str(found.uuid), found.multi_processor_count)),
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
