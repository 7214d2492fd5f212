"""host=0.5: Python, the framework and its launch calls take another share of their time."""

from __future__ import annotations

from gpudiag.model.graph import Graph
from gpudiag.timeline.whatif.context import Context
from gpudiag.timeline.whatif.setting import Kind, Setting, number
from gpudiag.timeline.whatif.times import Bools, Times, of_kind, scaled


def host_nodes(graph: Graph) -> Bools:
    """Return the nodes of Python, framework and launch calls; on a CPU-only run not the ops, which are the work."""
    return of_kind(graph, "host", "launch") & (graph.kernel < 0)


def _apply(graph: Graph, times: Times, _: Context, setting: Setting) -> Times | None:
    nodes = host_nodes(graph)
    factor = number(setting, 0, 10)
    return scaled(times, nodes, factor) if times.duration_ns[nodes].any() else None


def _words(setting: Setting) -> str:
    return f"Python, framework and launch calls take {number(setting, 0, 10):g} x the time"


KIND = Kind("host", "0 to 10: factor on the time of Python, framework and launch calls", "0.5", _apply, _words, "no host time was recorded")
