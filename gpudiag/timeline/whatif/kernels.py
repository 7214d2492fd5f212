"""kernel:NAME=0.5: kernels whose name, or whose op's name, holds NAME take another share of their time."""

from __future__ import annotations

import numpy as np

from gpudiag.errors import InputError
from gpudiag.model.graph import Graph
from gpudiag.timeline.whatif.context import Context
from gpudiag.timeline.whatif.setting import Kind, Setting, number
from gpudiag.timeline.whatif.times import Times, scaled


def _apply(graph: Graph, times: Times, context: Context, setting: Setting) -> Times | None:
    if not setting.target:
        raise InputError("kernel needs a name", "for example kernel:gemm=0.5 or kernel:aten::add=0")
    nodes = np.append(context.named(setting.target), False)[graph.kernel]
    factor = number(setting, 0, 10)
    return scaled(times, nodes, factor) if times.duration_ns[nodes].any() else None


def _words(setting: Setting) -> str:
    return f"kernels and ops with '{setting.target}' in their name take {number(setting, 0, 10):g} x the time"


KIND = Kind(
    "kernel", "0 to 10: factor on the kernels of that name", None, _apply, _words, "no kernel or op of that name", takes_target=True
)
