"""Batches in pinned host memory, from which a copy to the GPU needs no second one on the host and can run beside the program."""

from __future__ import annotations

from typing import Any

from gpudiag.experiment.fixes.fix import NotAppliedError, Site
from gpudiag.experiment.fixes.loaders import LoaderArgument, Made
from gpudiag.experiment.fixes.values import nothing


class PinMemory(LoaderArgument):
    """pin_memory=True."""

    id = "pin-memory"
    argument = "pin_memory"
    needs_gpu = True

    def __init__(self, value: str | None = None) -> None:
        nothing(self.id, value)
        super().__init__(value)

    def change(self, made: Made, arguments: dict[str, Any]) -> str:
        """Pin what the loader gives."""
        if made.asked["pin_memory"]:
            return "the program pins its batches already"
        arguments["pin_memory"] = True
        return ""

    def evidence(self, site: Site) -> str:
        """Return that iterators pin their batches: they do so only where there is an accelerator. Raises NotAppliedError."""
        shown = super().evidence(site)
        if "pin_memory True" not in shown:
            raise NotAppliedError(shown)
        return shown
