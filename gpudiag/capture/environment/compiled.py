"""What torch.compile did in this process: from its counters and from what is alive. Imports and changes nothing of it."""

from __future__ import annotations

import re
import sys
from collections import Counter
from functools import partial
from typing import Any

import msgspec

from gpudiag.capture.environment.alive import Alive
from gpudiag.capture.environment.reading import MAX_NAME, flag, name, read
from gpudiag.model.program import CompileCall, Compiled

MAX_WRAPPED = 16
"""Wrappers round a backend that are looked through."""

_KERNEL = re.compile(r"^\s*\w+ = async_compile\.\w+\(", re.MULTILINE)
"""How Inductor's source defines a kernel (torch/_inductor/codegen/wrapper.py): `triton_poi_fused_add_0 = async_compile.triton(`."""


def compiled(found: Alive | None) -> Compiled | None:
    """Return the counts, and from `found` (alive.alive()) the calls and the generated code; None where torch.compile was not used."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None) or {}
    calls = _calls(found) if found else ()
    graphs = int((counters.get("stats") or {}).get("unique_graphs", 0))
    if not graphs and not calls:
        return None
    generated = None if found is None else found.get("generated", [])
    return Compiled(
        calls=calls,
        graphs=graphs,
        graph_breaks=sum((counters.get("graph_break") or {}).values()),
        recompiles=_recompiles(),
        generated_graphs=None if generated is None else len(generated),
        generated_kernels=None if generated is None else sum(map(_kernels, generated)),
    )


def _recompiles() -> int:
    """Return the compilations beyond the first of each frame (torch/_dynamo/convert_frame.py counts them by frame)."""
    counts = getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COMPILE_COUNTER", None) or {}
    return sum(times - 1 for times in dict(counts).values() if times > 1)


def _kernels(graph: Any) -> int:
    source = getattr(graph, "source_code", None)
    return len(_KERNEL.findall(source)) if isinstance(source, str) else 0


def _calls(found: Alive) -> tuple[CompileCall, ...]:
    alike = Counter(call for context in found.get("compile", ()) if (call := read(partial(_call, context))) is not None)
    return tuple(msgspec.structs.replace(call, count=times) for call, times in alike.most_common())


def _call(context: Any) -> CompileCall | None:
    """Return the arguments of the torch.compile behind an OptimizeContext; None for one that compiles nothing."""
    backend = context.callback
    for _ in range(MAX_WRAPPED):
        inner = getattr(backend, "_torchdynamo_orig_backend", None) or getattr(backend, "_torchdynamo_orig_callable", None)
        if inner is None:
            break
        backend = inner
    if not callable(backend):
        return None
    return CompileCall(
        backend=_backend(backend),
        mode=_mode(backend),
        dynamic=flag(getattr(context, "_dynamic", None)),
        fullgraph=flag(getattr(context, "fullgraph", None)),
    )


def _backend(backend: Any) -> str:
    """Return the registered name of a backend, else that of the function or class that was given as one."""
    given = getattr(backend, "compiler_fn", backend)  # torch._TorchCompileWrapper; its compiler_name may be the text of an object
    words = (getattr(backend, "compiler_name", None), getattr(given, "__name__", None), type(given).__name__)
    return next((word for word in map(name, words) if word), type(given).__name__[:MAX_NAME])


def _mode(backend: Any) -> str | None:
    """Return the mode whose options the backend holds; 'options' where no mode has these, None where it is not Inductor's."""
    config, inductor = getattr(backend, "config", None), sys.modules.get("torch._inductor")
    if type(backend).__name__ != "_TorchCompileInductorWrapper" or not isinstance(config, dict) or inductor is None:
        return None
    modes = inductor.list_mode_options(dynamic=getattr(backend, "dynamic", None))
    return next((mode for mode, options in modes.items() if options == config), "options")
