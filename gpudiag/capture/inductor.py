"""What torch.compile generated in this process: read from the compiled graphs that are alive when the recording ends.

Nothing is hooked, logged or configured: `CompiledFxGraph` keeps the source text that Inductor wrote for it, also when it came from a cache
or was compiled before the recording began. Graphs that torch has thrown away by then (recompiled, torch._dynamo.reset) are not found.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from gpudiag.capture.folder import inductor_name
from gpudiag.capture.graph_text import read_graph
from gpudiag.capture.writer import write_atomic
from gpudiag.model.inductor import CompiledGraph, GeneratedKernel, InductorCode

MAX_SOURCE_BYTES = 64 << 20
"""Source text read at most; parsing takes about 0.1 s a megabyte."""

_HOMES = ("torch._inductor.output_code", "torch._inductor.codecache")
"""Where the class is: since torch 2.6, and before."""


def collect() -> tuple[InductorCode | None, str]:
    """Return (what is known of the generated code, why some of it is not: ''). None where torch.compile generated nothing."""
    graphs = _live_graphs()
    if not graphs:
        return None, ""
    budget, unread, found = MAX_SOURCE_BYTES, 0, []
    for graph in graphs:
        key, source = getattr(graph, "_fx_graph_cache_key", None), getattr(graph, "source_code", None)
        text = source if isinstance(source, str) else ""
        budget -= len(text)
        kernels = _kernels(text) if text and budget >= 0 else None
        unread += kernels is None
        if kernels:
            found.append(CompiledGraph(key if isinstance(key, str) else "", kernels))
    problem = f"the generated code of {unread} of {len(graphs)} compiled graphs could not be read" if unread else ""
    return InductorCode(graphs=tuple(found)), problem


def write(path: Path, rank: int, warn: Callable[[str, BaseException | None], None]) -> None:
    """Write what `collect` finds into the bundle at `path`; whatever fails is one warning, the rest of the bundle is whole."""
    try:
        code, problem = collect()
        if problem:
            warn(problem, None)
        if code is not None:
            target = path / inductor_name(rank)
            target.parent.mkdir(exist_ok=True)
            write_atomic(target, msgspec.json.encode(code) + b"\n")
    except Exception as error:  # noqa: BLE001 - torch's internals may differ
        warn("the code that torch.compile generated could not be read", error)


def _kernels(source: str) -> tuple[GeneratedKernel, ...] | None:
    try:
        return read_graph(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError, AttributeError, TypeError):  # another format
        return None


def _live_graphs() -> list[Any]:
    classes = {getattr(sys.modules.get(home), "CompiledFxGraph", None) for home in _HOMES} - {None}
    return [item for item in gc.get_objects() if type(item) in classes] if classes else []
