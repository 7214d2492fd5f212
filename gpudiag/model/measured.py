"""A report with what was measured step by step beside it: what a comparison and a gate need to know the variance."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from gpudiag.model.report import ReportData


class OpKey(NamedTuple):
    """What tells one row of an op table from another."""

    name: str
    phase: str | None = None
    module: str | None = None
    signature: str | None = None


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a comparison. Empty: not known, as of a report that was read from a file."""

    report: ReportData
    rank: int | None = None
    """The rank that was measured; None: of a recording of one, or not told."""
    plain_ns: tuple[int, ...] = ()
    """Wall time of each step outside windows, in their order, without the first ones of the run. A trace alone has none."""
    plain_samples: tuple[int | None, ...] = ()
    """Samples of each of these steps; null: not seen."""
    analysed_ns: tuple[int, ...] = ()
    """Wall time of each analysed step, in their order: those that the profiler recorded."""
    idle_ns: tuple[int, ...] = ()
    """Idle time of the device in each analysed step."""
    ops: dict[OpKey, tuple[int, ...]] = {}
    """Kernel time of an op in ns, by the analysed step that launched it."""
