"""Facts that rules name as their ceiling: what the analysed steps would save with one cost gone, from a replay of the dependency graph.

Each takes its figure from the what-if of `gpudiag whatif` that it names. Where the steps cannot be replayed, or the replayed ones hold
nothing of the kind, it falls back to a formula: the idle or exposed time itself.
"""

from __future__ import annotations

from gpudiag.facts.causes import idle_allocation_ns, idle_compile_ns, idle_launch_ns, stall_ns
from gpudiag.facts.communication import exposed_communication_ns
from gpudiag.facts.elementwise import unfused_chain_saving_ns
from gpudiag.facts.host_copies import pageable_copy_exposed_ns
from gpudiag.facts.launch import queued_gap_excess_ns
from gpudiag.facts.loader import loader_wait_ns
from gpudiag.facts.registry import Fact, fact
from gpudiag.facts.window import Window


def _number(found: Fact, window: Window) -> float:
    return float(found(window))


@fact("without_launch_ns", unit="ns")
def without_launch_ns(window: Window) -> float:
    """Time saved if Python, the framework and launch calls took none: what-if host=0, else idle_launch_ns."""
    return window.without_idle_ns("host=0", idle_ns=lambda: _number(idle_launch_ns, window))


@fact("as_graph_ns", unit="ns")
def as_graph_ns(window: Window) -> float:
    """Time saved with the step as one CUDA graph: what-if launch=0, else idle_launch_ns + queued_gap_excess_ns."""
    return window.what_if_ns("launch=0", otherwise=lambda: _number(idle_launch_ns, window) + _number(queued_gap_excess_ns, window))


@fact("compiled_ns", unit="ns")
def compiled_ns(window: Window) -> float:
    """Time saved if issuing the work cost nothing and chains of element-wise ops were one kernel each: what-ifs host=0 and fused.

    Else idle_launch_ns + unfused_chain_saving_ns. Not known where the chains are not: half of a ceiling is none.
    """
    formula = _number(idle_launch_ns, window) + _number(unfused_chain_saving_ns, window)
    return window.what_if_ns("host=0", "fused", otherwise=lambda: formula)


@fact("chains_fused_ns", unit="ns")
def chains_fused_ns(window: Window) -> float:
    """Time saved with chains of element-wise ops fused: what-if fused, else unfused_chain_saving_ns."""
    return window.less_work_ns("fused", otherwise=lambda: _number(unfused_chain_saving_ns, window))


@fact("without_loader_ns", unit="ns")
def without_loader_ns(window: Window) -> float:
    """Time saved if the next batch was always ready: what-if loader=0, else loader_wait_ns."""
    return window.without_idle_ns("loader=0", idle_ns=lambda: _number(loader_wait_ns, window))


@fact("copies_overlapped_ns", unit="ns")
def copies_overlapped_ns(window: Window) -> float:
    """Time saved if copies between host and device ran beside other work: what-if copies=overlapped, else pageable_copy_exposed_ns."""
    return window.less_work_ns("copies=overlapped", otherwise=lambda: _number(pageable_copy_exposed_ns, window))


@fact("communication_overlapped_ns", unit="ns")
def communication_overlapped_ns(window: Window) -> float:
    """Time saved if collectives ran beside other work: what-if communication=overlapped, else exposed_communication_ns."""
    return window.less_work_ns("communication=overlapped", otherwise=lambda: _number(exposed_communication_ns, window))


@fact("without_allocation_ns", unit="ns")
def without_allocation_ns(window: Window) -> float:
    """Time saved if no device memory was allocated from the driver: what-if allocation=0, else idle_allocation_ns."""
    return window.without_idle_ns("allocation=0", idle_ns=lambda: _number(idle_allocation_ns, window))


@fact("without_compile_ns", unit="ns")
def without_compile_ns(window: Window) -> float:
    """Time saved if nothing was compiled: what-if compile=0, else idle_compile_ns."""
    return window.without_idle_ns("compile=0", idle_ns=lambda: _number(idle_compile_ns, window))


@fact("without_stalls_ns", unit="ns")
def without_stalls_ns(window: Window) -> float:
    """Time saved without garbage collections and file writes: what-ifs gc=0 and io=0, else stall_ns."""
    return window.without_idle_ns("gc=0", "io=0", idle_ns=lambda: _number(stall_ns, window))
