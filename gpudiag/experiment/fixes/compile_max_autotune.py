"""compile-max-autotune: matrix products by the fastest of several kernels, found by timing them."""

from __future__ import annotations

import sys
from contextlib import suppress

from gpudiag.experiment.fixes.dynamo import CompileFix


class CompileMaxAutotune(CompileFix):
    """Compiles each root with mode="max-autotune"; on a GPU that makes CUDA graphs too."""

    id = "compile-max-autotune"
    mode = "max-autotune"

    def shown(self) -> str:
        """Return what was compiled, and how many ops were tuned: none where their kernels came from a cache. Raises NotAppliedError."""
        return f"{super().shown()}; {_tuned()} ops tuned in this process"


def _tuned() -> int:
    """Return how many ops Inductor has chosen a kernel for by timing (torch/_inductor/select_algorithm.py)."""
    utils = sys.modules.get("torch._dynamo.utils")
    with suppress(Exception):  # no public interface
        if utils is not None:
            return int(utils.counters["inductor"]["select_algorithm_autotune"])
    return 0
