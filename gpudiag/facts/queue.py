"""Facts about how far the host runs ahead of the device."""

from __future__ import annotations

from gpudiag.facts.registry import NotKnownError, fact
from gpudiag.facts.window import Window
from gpudiag.model.replay import QueueStats


def _queue(window: Window) -> QueueStats:
    """Return the queue figures of the window; raises NotKnownError where no launch was recorded."""
    window.require_accelerator()
    found = window.analysis.queue
    if found is None:
        raise NotKnownError("no launch of the device's work was recorded in the analysed steps: record with activities=[CPU, CUDA]")
    return found


@fact("launch_delay_ns", unit="ns")
def launch_delay_ns(window: Window) -> int:
    """Median time from the return of the call that launched work to the start of that work; of a graph launch the first kernel.

    Some microseconds: the device was waiting for the host. Much more: work was queued, the host is ahead.
    """
    return _queue(window).delay_median_ns


@fact("queue_depth", unit="count")
def queue_depth(window: Window) -> float:
    """Kernels issued and not yet over, median by time over the analysed steps."""
    return _queue(window).depth_median


@fact("queue_empty_share", unit="share")
def queue_empty_share(window: Window) -> float:
    """Share of the analysed time in which no work was issued and unfinished: the host had given the device nothing to do."""
    return _queue(window).empty_share


@fact("launches_per_step", unit="count")
def launches_per_step(window: Window) -> float:
    """Calls that started work of the device per analysed step; one launch of a graph counts once."""
    return _queue(window).launches_per_step


@fact("host_bound_share", unit="share")
def host_bound_share(window: Window) -> float:
    """Share of the kernels (by count) that began within the normal launch latency of their call: the device was waiting for them."""
    return _queue(window).host_bound_share
