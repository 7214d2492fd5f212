"""roof=0.8: no kernel slower than its roofline time over 0.8."""

from __future__ import annotations

import numpy as np

from gpudiag.model.graph import Graph
from gpudiag.timeline.whatif.context import Context
from gpudiag.timeline.whatif.setting import Kind, Setting, number
from gpudiag.timeline.whatif.times import Times, kernel_sums, with_kernels

_LOWEST_SHARE = 0.01


def _share(setting: Setting) -> float:
    return number(setting, _LOWEST_SHARE, 1) if setting.value else 1.0


def _apply(graph: Graph, times: Times, context: Context, setting: Setting) -> Times | None:
    by = times.samples / _share(setting)
    now = kernel_sums(graph, times, context.busy_ns)
    slower = (now > 0) & (now / by > context.t_roof_ns)  # False where the roof is not known
    floor = np.where(slower, context.t_roof_ns, np.nan) * by
    return with_kernels(graph, times, floor, context.busy_ns) if slower.any() else None


def _words(setting: Setting) -> str:
    return f"every kernel with a known roofline at {_share(setting):.0%} of it (those that are faster stay)"


KIND = Kind("roof", "0.01 to 1: share of the roofline that kernels reach", "0.8", _apply, _words, "no kernel has a known roofline")
