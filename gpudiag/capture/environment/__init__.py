"""What is known about the machine, the process's rank and its device. Reads only; names no host, user, path or variable."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from gpudiag.capture.environment.process import as_count, try_read
from gpudiag.cores import count_usable_cores
from gpudiag.model.bundle import Machine
from gpudiag.model.hardware import ObservedDevice, build_device_key

_NUMA_NODES = Path("/sys/devices/system/node")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Time and period in us of the control group, version 2 ('max': no limit; Linux: Documentation/admin-guide/cgroup-v2.rst)."""


def read_gpu_uuid() -> str | None:
    """Return the UUID of the current device; None where this process has not used one (asking would initialise it)."""
    import torch

    if not torch.cuda.is_initialized():
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)[:64]


def read_machine() -> Machine:
    """Return the versions, the processor, the number of cores that this process may use, and the device in use."""
    import torch

    cpu: str | None = None
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        cpu = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), None)
    cpu_quota = None
    with suppress(Exception):  # no control group of version 2
        quota, period = _CPU_QUOTA.read_text(encoding="ascii").split()
        cpu_quota = None if quota == "max" else int(quota) / int(period)
    return Machine(
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=try_read(lambda: torch.version.cuda or torch.version.hip),
        system=f"{platform.system()} {platform.machine()}",
        cpu=platform.processor() if cpu is None else cpu,
        cpu_cores=count_usable_cores(),
        isa=try_read(torch.backends.cpu.get_cpu_capability),
        cpu_quota=cpu_quota,
        numa_nodes=try_read(lambda: len(list(_NUMA_NODES.glob("node[0-9]*"))) or None),
        gpu_uuid=try_read(read_gpu_uuid),
    )


def read_threads() -> int | None:
    """Return how many threads torch computes with by default; None without torch."""
    with suppress(Exception):  # no torch, or a broken one
        import torch

        return as_count(int(torch.get_num_threads()))
    return None


def read_observed_device() -> ObservedDevice | None:
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
        warp_size=try_read(lambda: found.warp_size),
        key=try_read(lambda: build_device_key(found.name, index, str(found.uuid), found.multi_processor_count)),
    )


def read_rank_and_world() -> tuple[int, int]:
    """Return rank and world size of this process: torch.distributed where initialised, else RANK and WORLD_SIZE, else 0 of 1."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1
    return (rank, max(world, rank + 1)) if rank >= 0 else (0, 1)


_NODE_NUMBERS = ("GROUP_RANK", "SLURM_NODEID")
"""Number of the machine: torchrun (https://docs.pytorch.org/docs/stable/elastic/run.html), Slurm (srun(1)).

Not Open MPI's OMPI_COMM_WORLD_NODE_RANK: that counts the processes of a machine.
"""


def name_node(world_size: int, environ: Mapping[str, str] | None = None) -> str:
    """Return what tells this machine from the others of a run: 'node 3' as the launcher counts, else a digest of the host's name.

    '' for a run of one process, which has no other machine to be told from, and where the host has no name.
    """
    if world_size < 2:
        return ""
    env = os.environ if environ is None else environ
    for name in _NODE_NUMBERS:
        number = env.get(name, "")
        if number.isascii() and number.isdigit() and len(number) < 8:
            return f"node {int(number)}"
    host = platform.node()
    return f"host {hashlib.sha256(host.encode()).hexdigest()[:6]}" if host else ""


class DeviceIdentity(NamedTuple):
    """What tells a CUDA device from others; None where this build of torch does not say."""

    uuid: str | None
    pci_bus_id: str | None
    number: int | None
    """NVML's own index, after CUDA_VISIBLE_DEVICES; only where nothing else is known: CUDA may count devices in another order."""
    hip: bool = False
    ordinal: int | None = None
    """CUDA's own index in this process, by which recordings name it."""
    key: str | None = None
    """model.hardware.build_device_key: holds no serial number."""


def find_stepped_device(optimizer: Any) -> int | None:
    """Return the CUDA index of the first parameters of `optimizer` that lie on one; None where none does. Waits for nothing."""
    with suppress(Exception):  # an optimizer of a shape of its own: the current device stands
        for group in optimizer.param_groups:
            # Parameters of a group that are looked at: those of one group lie on one kind of device, and this is asked at every step
            for tensor in group["params"][:8]:
                if tensor.is_cuda:
                    return int(tensor.device.index)
    return None


def identify_cuda_device(index: int | None = None) -> DeviceIdentity | None:
    """Return CUDA device `index`, by default the current one of the calling thread.

    None before CUDA is initialised (asking would initialise it).
    """
    import torch

    if not torch.cuda.is_initialized():
        return None
    number = torch.cuda.current_device() if index is None else index
    if torch.version.hip:
        return DeviceIdentity(None, None, None, hip=True, ordinal=number)
    found = torch.cuda.get_device_properties(number)
    uuid = getattr(found, "uuid", None)
    parts: list[Any] = [getattr(found, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    # as nvmlDeviceGetHandleByPciBusId takes it
    address = "{:08X}:{:02X}:{:02X}.0".format(*parts) if all(isinstance(part, int) for part in parts) else None
    known = uuid is not None or address is not None
    return DeviceIdentity(
        None if uuid is None else str(uuid).removeprefix("GPU-").removeprefix("MIG-"),  # as NVML writes it
        address,
        None if known else try_read(lambda: int(torch.cuda._get_nvml_device_index(number))),  # torch's own translation
        ordinal=number,
        key=build_device_key(found.name, number, None if uuid is None else str(uuid), found.multi_processor_count),
    )
