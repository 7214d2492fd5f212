"""Whether the program uses a GPU, asked without touching one."""

from __future__ import annotations

from gpudiag.experiment.fixes.fix import NotAppliedError


def refuse_unused(why: str) -> None:
    """Do nothing where this process has used a GPU. Raises NotAppliedError with `why` where it has not."""
    import torch

    if not torch.cuda.is_initialized():
        raise NotAppliedError(f"{why}, and the program uses none")
