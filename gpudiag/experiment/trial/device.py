"""What a trial asks of the device and of torch in its process. Every function answers None, 0 or '' where torch does not tell."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from typing import Any

from gpudiag.capture.telemetry.device import cuda_device
from gpudiag.experiment.trial.protocol import Gpu


def used_cuda() -> Any | None:
    """Return torch.cuda where this process has used a GPU, else None."""
    import torch

    return torch.cuda if torch.cuda.is_available() and torch.cuda.is_initialized() else None


def synchronize() -> None:
    """Wait for the GPU, where this process has used one."""
    cuda = used_cuda()
    if cuda is not None:
        cuda.synchronize()


def compiled_graphs() -> int:
    """Return how many graphs Dynamo has compiled in this process so far."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return 0
    with suppress(Exception):  # the counters are no public interface
        return int(utils.counters["stats"]["unique_graphs"])
    return 0


def held_bytes() -> int | None:
    """Return the most memory that torch's allocator has taken from the device so far: what has to fit beside another process."""
    cuda = used_cuda()
    return None if cuda is None else int(cuda.max_memory_reserved())


def tensor_bytes() -> int | None:
    """Return the most memory of the device that tensors held since forget_peak()."""
    cuda = used_cuda()
    return None if cuda is None else int(cuda.max_memory_allocated())


def forget_peak() -> None:
    """Have tensor_bytes() begin anew: autotuning and the first steps may have needed more than training does."""
    cuda = used_cuda()
    if cuda is not None:
        cuda.reset_peak_memory_stats()


def free_bytes() -> int | None:
    """Return the free memory of the device."""
    cuda = used_cuda()
    if cuda is not None:
        with suppress(Exception):  # a driver that does not tell
            return int(cuda.mem_get_info()[0])
    return None


def gpu() -> Gpu | None:
    """Return which GPU the training thread uses."""
    with suppress(Exception):  # a build of torch without these properties
        found = cuda_device()
        if found is not None and not found.hip:
            return Gpu(found.uuid, found.pci_bus_id, found.number)
    return None


def faults() -> int:
    """Return the page faults of this process so far that needed no disk (getrusage(2), ru_minflt)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
