"""More batches made ahead by each worker: a longer queue rides out slow ones."""

from __future__ import annotations

from typing import Any

from gpudiag.experiment.fixes.loaders import TORCH_PREFETCH, LoaderArgument, Made
from gpudiag.experiment.fixes.values import whole

BY_DEFAULT = 2 * TORCH_PREFETCH


class LoaderPrefetch(LoaderArgument):
    """prefetch_factor=n for loaders with workers."""

    id = "loader-prefetch"
    argument = "prefetch_factor"

    def __init__(self, value: str | None = None) -> None:
        super().__init__(value)
        self._factor = whole(self.id, value, 1) or BY_DEFAULT

    def change(self, made: Made, arguments: dict[str, Any]) -> str:
        """Set the factor; a loader without workers makes nothing ahead."""
        if not arguments.get("num_workers"):
            return "the loader has no workers to make batches ahead: --fix loader-workers"
        if made.asked["prefetch_factor"] == self._factor:
            return f"prefetch_factor is {self._factor} already"
        arguments["prefetch_factor"] = self._factor
        return ""
