"""Batches made by worker processes, or by more of them."""

from __future__ import annotations

import os
from typing import Any

from gpudiag.experiment.fixes.loaders import LoaderArgument, Made
from gpudiag.experiment.fixes.values import whole

MOST_BY_DEFAULT = 4
"""Workers without a value of one's own: enough to hide most loaders, few enough for any machine."""

MOST = 1024
"""Workers that can be asked for: four times the cores of the largest hosts. A recipe of unknown origin starts no million processes."""

_WITH_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
"""Arguments that a DataLoader without workers refuses."""


class LoaderWorkers(LoaderArgument):
    """num_workers=n; without a value: one for each core of the process, four at most, and never fewer than the program has."""

    id = "loader-workers"
    argument = "num_workers"

    def __init__(self, value: str | None = None) -> None:
        super().__init__(value)
        self._workers = whole(self.id, value, 0, MOST)

    def change(self, made: Made, arguments: dict[str, Any]) -> str:
        """Set the number of workers, but where a stream would be read once by each of them."""
        from torch.utils.data import IterableDataset

        asked = made.asked["num_workers"]
        workers = max(asked, default_workers()) if self._workers is None else self._workers
        if isinstance(made.dataset, IterableDataset) and not asked:
            return "an IterableDataset is read whole by every worker, unless it was written to share itself out"
        if workers == asked:
            return f"the program has {asked} workers already"
        arguments["num_workers"] = workers
        if not workers:
            for name in _WITH_WORKERS:
                arguments.pop(name, None)
        return ""


def default_workers() -> int:
    """Return the workers for a loader of this process: its share of the cores that it may use, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return min(MOST_BY_DEFAULT, max(1, cores // max(1, int(ranks) if ranks.isdigit() else 1)))
