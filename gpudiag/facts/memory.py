"""Facts about memory at its peak within the recording."""

from __future__ import annotations

from gpudiag.facts.registry import NotKnownError, fact
from gpudiag.facts.window import Window
from gpudiag.model.memory import MemoryReport

_RECORD = "record with gpudiag.profile(memory=True)"


def memory_of(window: Window) -> MemoryReport:
    """Return the memory of the window; raises NotKnownError where none was recorded, or none was in use."""
    found = window.analysis.memory
    if found is None or not found.peak_bytes:
        raise NotKnownError(f"no memory was recorded: {_RECORD}")
    return found


def _told(window: Window) -> MemoryReport:
    """Return the memory where more than half of the peak has a use; raises NotKnownError otherwise: a share would be a guess."""
    found = memory_of(window)
    dark = sum(found.by_category.get(kind, 0) for kind in ("before_recording", "unknown"))
    if 2 * dark > found.peak_bytes:
        raise NotKnownError(f"what more than half of the memory is used for is not known: {_RECORD}")
    return found


def _share(window: Window, *kinds: str) -> float:
    found = _told(window)
    return sum(found.by_category.get(kind, 0) for kind in kinds) / found.peak_bytes


@fact("peak_memory_bytes", unit="B")
def peak_memory_bytes(window: Window) -> int:
    """Memory in use on the device at its peak within the recording, as its allocator counts."""
    return memory_of(window).peak_bytes


@fact("peak_memory_share", unit="share")
def peak_memory_share(window: Window) -> float:
    """Peak of the memory in use over the memory of the device."""
    window.require_accelerator()
    found = memory_of(window)
    if not found.capacity_bytes:
        raise NotKnownError("the memory of this device was not recorded")
    return found.peak_bytes / found.capacity_bytes


@fact("activation_share", unit="share")
def activation_share(window: Window) -> float:
    """Share of the peak in activations that the forward pass keeps for the backward pass."""
    return _share(window, "activations")


@fact("optimizer_state_share", unit="share")
def optimizer_state_share(window: Window) -> float:
    """Share of the peak in optimizer state."""
    return _share(window, "optimizer_state")


@fact("model_memory_share", unit="share")
def model_memory_share(window: Window) -> float:
    """Share of the peak in parameters, gradients and buffers."""
    return _share(window, "parameters", "gradients", "buffers")


@fact("fragmentation_share", unit="share")
def fragmentation_share(window: Window) -> float:
    """Share of the memory reserved by the allocator that no tensor used at the peak: (reserved - allocated) / reserved."""
    window.require_accelerator()
    found = memory_of(window).fragmentation_share
    if found is None:
        raise NotKnownError("the recording does not hold how much the allocator had reserved")
    return found


@fact("alloc_retries", unit="count")
def alloc_retries(window: Window) -> int:
    """Times that the allocator gave its cached segments back to the driver and tried again, since the process began (num_alloc_retries)."""
    window.require_accelerator()
    found = memory_of(window).retries
    if found is None:
        raise NotKnownError(f"the counters of the allocator were not recorded: {_RECORD}")
    return found
