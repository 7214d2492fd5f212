"""Host time of one kind gone: loader=0, gc=0, io=0, allocation=0, compile=0, profiler=0."""

from __future__ import annotations

from gpudiag.model.graph import Graph
from gpudiag.timeline.whatif.context import Context
from gpudiag.timeline.whatif.setting import Kind, Setting, number
from gpudiag.timeline.whatif.times import Times, of_kind, scaled

_WORDS = {
    "loader": ("data", "waiting for the data loader", "the steps hold no wait for a data loader"),
    "gc": ("gc", "collections of Python's garbage collector", "the steps hold no garbage collection"),
    "io": ("io", "writing files (checkpoints, logs)", "the steps write no file"),
    "allocation": ("allocation", "device memory allocations and frees", "the steps allocate no device memory from the driver"),
    "compile": ("compile", "compilation by torch.compile", "the steps compile nothing"),
    "profiler": ("profiler", "the profiler's own work", "the steps hold no work of the profiler"),
}


def _kind(name: str) -> Kind:
    code, what, absent = _WORDS[name]

    def apply(graph: Graph, times: Times, _: Context, setting: Setting) -> Times | None:
        nodes = of_kind(graph, code)
        factor = number(setting, 0, 10)
        return scaled(times, nodes, factor) if times.duration_ns[nodes].any() else None

    def words(setting: Setting) -> str:
        factor = number(setting, 0, 10)
        return f"{what}: none" if factor == 0 else f"{what}: {factor:g} x the time"

    return Kind(name, "0 (gone) to 10: factor on that time", "0", apply, words, absent)


LOADER, GC, IO, ALLOCATION, COMPILE, PROFILER = (_kind(name) for name in _WORDS)
