"""Segments of the CUDA caching allocator that grow, so that blocks of changing sizes leave no holes.

https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf
"""

from __future__ import annotations

import os

from gpudiag.experiment.fixes.fix import Applier, NotAppliedError, Site
from gpudiag.experiment.fixes.gpu import refuse_unused
from gpudiag.experiment.fixes.values import nothing

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The name since torch 2.9, and the one before: both are set."""

OPTION, WANTED = "expandable_segments", "expandable_segments:True"

_BEFORE = "GPUDIAG_EXPANDABLE_SEGMENTS"
"""Environment variable: set where the program was started with the option on already."""


class AllocConf(Applier):
    """expandable_segments:True beside what is configured already."""

    id = "alloc-conf"
    needs_gpu = True

    def __init__(self, value: str | None = None) -> None:
        nothing(self.id, value)
        super().__init__(value)
        self.environ = variables({name: os.environ[name] for name in NAMES if name in os.environ})

    def install(self, site: Site) -> None:
        """Do nothing: the variables are there already. Raises NotAppliedError where they were before."""
        if os.environ.get(_BEFORE):
            raise NotAppliedError(f"the program is started with {WANTED} already")

    def evidence(self, site: Site) -> str:
        """Return how many segments of the allocator can grow. Raises NotAppliedError where none can."""
        import torch

        refuse_unused("segments are those of a GPU's memory")
        backend = torch.cuda.get_allocator_backend()
        if backend != "native":
            raise NotAppliedError(f"the allocator is {backend}, which has no such segments")
        segments = torch.cuda.memory_snapshot()
        growing = sum(bool(segment.get("is_expandable")) for segment in segments)
        if not growing:
            raise NotAppliedError(f"none of the allocator's {len(segments)} segments can grow: this driver or platform does not support it")
        return f"{growing} of {len(segments)} segments of the allocator can grow"


def variables(before: dict[str, str]) -> dict[str, str]:
    """Return the variables of an arm: the option beside what `before` configures."""
    conf = next((before[name] for name in NAMES if before.get(name)), "")
    options = [option for option in conf.split(",") if option.strip()]
    if WANTED in (option.replace(" ", "") for option in options):
        return {_BEFORE: "1"}
    kept = [option for option in options if option.partition(":")[0].strip() != OPTION]
    return dict.fromkeys(NAMES, ",".join([*kept, WANTED]))
