"""compile-reduce-overhead: compiled, and replayed as CUDA graphs."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from gpudiag.experiment.fixes.dynamo import CompileFix
from gpudiag.experiment.fixes.fix import NotAppliedError
from gpudiag.experiment.fixes.modules import device_of


class CompileReduceOverhead(CompileFix):
    """Compiles each root with mode="reduce-overhead", which on a CPU is no other than the default."""

    id = "compile-reduce-overhead"
    mode = "reduce-overhead"
    needs_gpu = True

    def targets(self, module: Any) -> list[tuple[str, Any]]:
        """Return the root. Raises NotAppliedError where it is not on a GPU, or the program compiles it itself."""
        if device_of(module).type != "cuda":
            raise NotAppliedError("CUDA graphs need a model on a GPU")
        return super().targets(module)

    def shown(self) -> str:
        """Return what was compiled and recorded. Raises NotAppliedError where no CUDA graph was."""
        compiled, recorded = super().shown(), _recorded()
        if not recorded:
            raise NotAppliedError(f"no CUDA graph was recorded, {_skipped()} were refused (TORCH_LOGS=cudagraphs says why): {compiled}")
        return f"{compiled}; {recorded} CUDA graphs"


def _recorded() -> int:
    """Return how many CUDA graphs Inductor has recorded on this device (the trees of torch/_inductor/cudagraph_trees.py)."""
    import torch

    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    with suppress(Exception):  # no public interface
        if trees is not None:
            manager = trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
            return sum(_nodes(root) for roots in manager.roots.values() for root in roots)
    return 0


def _nodes(node: Any) -> int:
    return 1 + sum(_nodes(child) for children in node.children.values() for child in children)


def _skipped() -> int:
    utils = sys.modules.get("torch._dynamo.utils")
    with suppress(Exception):
        if utils is not None:
            return int(utils.counters["inductor"]["cudagraph_skips"])
    return 0
