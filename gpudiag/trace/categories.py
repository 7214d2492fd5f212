"""What the categories of events of 2020 to 2026 are to us. Names: ActivityType.h of pytorch/kineto, and traces of each age."""

from __future__ import annotations

from typing import Literal, get_args

Kind = Literal["op", "annotation", "launch", "kernel", "memcpy", "memset", "frame", "overhead", "sync", "ignored", "unknown"]

KINDS: dict[str, Kind] = {
    "cpu_op": "op",
    "operator": "op",  # 2020-21, like the other words in capitals; compared in lower case
    "user_annotation": "annotation",
    "runtime": "launch",
    "hpu_op": "launch",
    "kernel": "kernel",
    "mtia_ccp_events": "kernel",
    "memcpy": "memcpy",
    "memset": "memset",
    "python_function": "frame",
    "overhead": "overhead",
    # the profiler's own span, copies of annotations on the device, counters, and the ends of arrows that some schemas write as "X"
    "trace": "ignored",
    "gpudiag": "ignored",  # the overlay of `gpudiag export perfetto`
    "cpu_instant_event": "ignored",
    "external_correlation": "ignored",
    "cuda_profiler_range": "ignored",
    "xpu_scope_profiler": "ignored",
    "cuda_event": "ignored",
    "collective_comm": "ignored",
    "mtia_insight": "ignored",
    "mtia_counters": "ignored",
    "ac2g": "ignored",
    "fwdbwd": "ignored",
    "async": "ignored",
    "async_gpu": "ignored",
    "async_cpu_to_gpu": "ignored",
}

# cuda_runtime, xpu_driver, privateuse1_runtime, gpu_memcpy, mlu_memset, ...: every back end has a prefix of its own.
_SUFFIXES: tuple[tuple[str, Kind], ...] = (
    ("_user_annotation", "ignored"),
    ("_runtime", "launch"),
    ("_driver", "launch"),
    ("_memcpy", "memcpy"),
    ("_memset", "memset"),
    ("_sync", "sync"),
)

BACKEND_CALLS = ("gloo:", "mpi:", "ucc:")
"""How the profiler names the work of torch.distributed's CPU back ends (c10d::Work; ProcessGroupGloo.cpp, ProcessGroupMPI.cpp). Since
torch 2.13 the category is that of annotations, but they are calls: the threads of a back end record nothing else."""

GRAPH_CALL = "## Call CompiledFxGraph "
"""Start of the annotation around a call of compiled code: on a CPU the kernels inside record nothing, their time is its own, as an op's."""

# Before 2021-07 annotations had the category of ops; these are the ones that torch itself writes.
_ANNOTATION_PREFIXES = ("ProfilerStep#", "Optimizer.step#", "Optimizer.zero_grad#", "enumerate(DataLoader)#")


def _kind(category: str) -> Kind:
    if category in KINDS:
        return KINDS[category]
    return next((kind for suffix, kind in _SUFFIXES if category.endswith(suffix)), "unknown")


ALL_KINDS: tuple[Kind, ...] = get_args(Kind)
CODES: dict[Kind, int] = {kind: code for code, kind in enumerate(ALL_KINDS)}


class CodeOf(dict[str | None, int]):
    """Code of the kind by category as the file spells it; remembers spellings, up to a limit that only a hostile file reaches."""

    def __missing__(self, category: str | None) -> int:
        code = CODES[_kind((category or "").lower())]
        if len(self) < 1000:
            self[category] = code
        return code


class IsAnnotation(dict[str | None, bool]):
    """Whether an event of an op category is an annotation, by its name."""

    def __missing__(self, name: str | None) -> bool:
        self[name] = found = bool(name) and str(name).startswith(_ANNOTATION_PREFIXES)
        return found
