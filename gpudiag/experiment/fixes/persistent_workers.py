"""Workers that live on from one epoch to the next, and need not be started again."""

from __future__ import annotations

from typing import Any

from gpudiag.experiment.fixes.loaders import LoaderArgument, Made
from gpudiag.experiment.fixes.values import nothing


class PersistentWorkers(LoaderArgument):
    """persistent_workers=True for loaders with workers."""

    id = "persistent-workers"
    argument = "persistent_workers"

    def __init__(self, value: str | None = None) -> None:
        nothing(self.id, value)
        super().__init__(value)

    def change(self, made: Made, arguments: dict[str, Any]) -> str:
        """Keep the workers, where there are any."""
        if not arguments.get("num_workers"):
            return "the loader has no workers to keep: --fix loader-workers"
        if made.asked["persistent_workers"]:
            return "the program keeps its workers already"
        arguments["persistent_workers"] = True
        return ""
