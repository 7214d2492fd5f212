"""The parts that record beside the steps unless a session is told otherwise."""

from __future__ import annotations

from gpudiag.capture.accumulation import Accumulation
from gpudiag.capture.environment.inventory import Inventory
from gpudiag.capture.memory.part import Memory
from gpudiag.capture.nvtx_ranges import Ranges
from gpudiag.capture.parts import Part
from gpudiag.capture.phases.part import Phases
from gpudiag.capture.telemetry.part import DEFAULT_HZ, Telemetry


def standard_parts(*, telemetry_hz: float = DEFAULT_HZ, nvtx: bool = False, memory: bool = False) -> list[Part]:
    """Return new parts for one session, in the order in which they hear of events.

    `telemetry_hz`: samples of clocks, power and load per second (0: none); `nvtx`: ranges for Nsight; `memory`: what memory is used for.
    Raises UsageError for what is no rate.
    """
    return [Accumulation(), Phases(), Telemetry(telemetry_hz), Inventory(), *([Ranges()] if nvtx else []), *([Memory()] if memory else [])]
