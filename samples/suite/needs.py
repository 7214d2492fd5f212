"""What this machine has of what samples require."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch

SIZE, TRIES = 1024, 5

FASTER = 1.5
"""Matrix products in bf16 must be this much faster than in fp32: emulated ones are slower, native ones 2 to 16 times as fast."""


def lacking(requires: tuple[str, ...]) -> str | None:
    """Return why a sample cannot run here; None where it can."""
    return next((reason for name in requires if (reason := _LACKS[name]()) is not None), None)


def device_name() -> str:
    """Return what the samples train on."""
    if torch.cuda.is_available():
        name, count = torch.cuda.get_device_name(), torch.cuda.device_count()
        return name if count == 1 else f"{count} x {name}"
    count = torch.get_num_threads()
    return f"CPU: {_processor()}, {count} thread{'' if count == 1 else 's'}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return "unknown model"


def _cuda() -> str | None:
    return None if torch.cuda.is_available() else "needs a CUDA GPU"


def _two_gpus() -> str | None:
    return None if torch.cuda.device_count() >= 2 else "needs two CUDA GPUs"


def _cpu() -> str | None:
    return "for a CPU only" if torch.cuda.is_available() else None


@cache
def _bf16() -> str | None:
    faster = _seconds(torch.float32) / _seconds(torch.bfloat16)
    return None if faster >= FASTER else f"needs fast bf16: matrix products in bf16 are x{faster:.1f} as fast as in fp32 here"


def _seconds(dtype: torch.dtype) -> float:
    """Return the best time of a matrix product."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = torch.randn(SIZE, SIZE, device=device).to(dtype)
    best = float("inf")
    for _ in range(TRIES + 1):
        begun = time.perf_counter()
        product = a @ a
        product[0, 0].item()  # waits for a GPU
        best = min(best, time.perf_counter() - begun)
    return best


def _cxx() -> str | None:
    if torch.cuda.is_available() and find_spec("triton") is not None:
        return None
    compilers = (os.environ.get("CXX"), "g++", "clang++")
    return None if any(name and shutil.which(name) for name in compilers) else "needs a C++ compiler, for torch.compile"


_LACKS: dict[str, Callable[[], str | None]] = {"cuda": _cuda, "cuda:2": _two_gpus, "cpu": _cpu, "bf16-matmul": _bf16, "cxx": _cxx}
