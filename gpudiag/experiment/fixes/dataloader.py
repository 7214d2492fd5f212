"""Fixes of the DataLoader: workers, prefetching, persistent workers, pinned memory, batch size.

What a loader does is decided when it is made, and shown by its iterator. accelerate (Hugging Face) and Lightning make a second loader from
the attributes of the first, which are changed already: it is left as it is, and what the program asked for is what the first was given.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from gpudiag.capture.batch_contents import count_samples
from gpudiag.errors import InputError
from gpudiag.experiment.fixes.fix import Applier, NotAppliedError, Site, parse_whole_number, refuse_value, wrap_arguments
from gpudiag.model.fixes import FIXES

_LOADER_DEFAULTS: dict[str, Any] = {
    "num_workers": 0,
    "prefetch_factor": None,
    "persistent_workers": False,
    "pin_memory": False,
    "batch_size": 1,
}
"""Of torch.utils.data.DataLoader."""

TORCH_PREFETCH = 2
"""prefetch_factor of a loader with workers that was given none."""

_FIX_ORDER = {fix.id: place for place, fix in enumerate(FIXES)}


class MadeLoader(msgspec.Struct):
    """A loader that the program has made."""

    loader: Any
    dataset: Any
    asked: dict[str, Any]
    """What the program asked for."""
    given: dict[str, Any]
    """What the constructor got in the end."""
    now: dict[str, Any] | None = None
    """What is in effect in its last iterator; None where it was not iterated."""
    samples: int | None = None
    """In the first batch of its last iterator."""
    refused: dict[str, str] = {}
    """Why a fix left it alone."""

    def made_into(self, dataset: Any, asked: dict[str, Any], sampler: Any) -> bool:
        """Return whether a loader that is asked for is this one made once more: of its data, with its values, with its batches."""
        if not (dataset is self.dataset or _unwrap_stream(dataset) is self.dataset):
            return False
        if any(asked[name] != self.given[name] for name in _LOADER_DEFAULTS if name != "batch_size"):
            return False
        if sampler is None:
            return bool(asked["batch_size"] == self.given["batch_size"])
        known = getattr(self.loader, "batch_sampler", None)
        return sampler is known or getattr(sampler, "batch_sampler", None) is known  # the second: accelerate's share of a rank


def _unwrap_stream(dataset: Any) -> Any:
    """Return the stream of which `dataset` is a rank's share (accelerate's IterableDatasetShard); itself where it is none."""
    from torch.utils.data import IterableDataset

    return getattr(dataset, "dataset", dataset) if isinstance(dataset, IterableDataset) else dataset


LoaderChange = Callable[[MadeLoader, dict[str, Any]], str]
"""Changes the arguments of a loader in place; returns why it does not, '' where it does."""


class Loaders:
    """All loaders of the program. Fixes change their arguments in the order of model.fixes, whatever the order they were asked for in:
    a factor of prefetching needs to know of the workers."""

    def __init__(self) -> None:
        self.made: list[MadeLoader] = []
        self._changes: dict[str, LoaderChange] = {}
        self._iterators: WeakKeyDictionary[Any, MadeLoader] = WeakKeyDictionary()

    def add(self, fix: str, change: LoaderChange) -> None:
        """Have `change` called for each loader that is made from now on."""
        self._changes[fix] = change
        self._changes = {
            known: self._changes[known] for known in sorted(self._changes, key=lambda fix: _FIX_ORDER.get(fix, len(_FIX_ORDER)))
        }

    def install(self, site: Site) -> None:
        """Wrap the constructors of loaders and of their iterators."""
        from torch.utils import data
        from torch.utils.data import dataloader

        site.patches.wrap(data.DataLoader, "__init__", wrap_arguments(self._make))
        site.patches.wrap(dataloader._BaseDataLoaderIter, "__init__", self._iterates)

    def of(self, iterator: Any) -> MadeLoader | None:
        """Return the loader of an iterator; None where it was not made by a call that we saw."""
        return self._iterators.get(iterator)

    @property
    def iterated(self) -> list[MadeLoader]:
        """Return the loaders from which batches were asked for."""
        return [made for made in self.made if made.now is not None]

    def _make(self, loader: Any, arguments: dict[str, Any]) -> None:
        dataset, asked = arguments.get("dataset"), _read_arguments(arguments)
        sampler = arguments.get("batch_sampler")
        for before in reversed(self.made):
            if before.made_into(dataset, asked, sampler):
                self.made.append(MadeLoader(loader, dataset, before.asked, before.given, refused=before.refused))
                return
        made = MadeLoader(loader, dataset, asked, asked)
        made.refused = {fix: change(made, arguments) for fix, change in self._changes.items()}
        made.given = _read_arguments(arguments)
        self.made.append(made)

    def _iterates(self, original: Any) -> Any:
        def __init__(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - as torch names it
            original(iterator, loader, *args, **kwargs)
            made = next((made for made in reversed(self.made) if made.loader is loader), None)
            if made is not None:
                made.now = _read_effective_values(iterator, loader)
                self._iterators[iterator] = made

        return __init__


def _read_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the values of interest among the arguments of a DataLoader."""
    values = {name: arguments.get(name, default) for name, default in _LOADER_DEFAULTS.items()}
    if values["num_workers"] and values["prefetch_factor"] is None:
        values["prefetch_factor"] = TORCH_PREFETCH
    return values


def _read_effective_values(iterator: Any, loader: Any) -> dict[str, Any]:
    """Return what an iterator works with. It is not kept itself: its workers end when the program lets go of it."""
    workers = iterator._num_workers
    return {
        "num_workers": workers,
        "prefetch_factor": loader.prefetch_factor if workers else None,
        "persistent_workers": iterator._persistent_workers,
        "pin_memory": iterator._pin_memory,
    }


_LOADERS: WeakKeyDictionary[Site, Loaders] = WeakKeyDictionary()


def find_loaders(site: Site) -> Loaders:
    """Return the loaders of `site`, one object for all fixes."""
    known = _LOADERS.get(site)
    if known is None:
        known = _LOADERS[site] = Loaders()
        known.install(site)
    return known


class LoaderArgument(Applier):
    """Changes one argument of every DataLoader."""

    argument = ""

    def install(self, site: Site) -> None:
        """Have the argument changed in each loader that the program makes."""
        find_loaders(site).add(self.id, self.change)

    @abstractmethod
    def change(self, made: MadeLoader, arguments: dict[str, Any]) -> str:
        """Change the argument; return why it is left, '' where it is not."""

    def evidence(self, site: Site) -> str:
        """Return the value in effect beside the one asked for, of loaders that were iterated. Raises NotAppliedError where none differs."""
        iterated = find_loaders(site).iterated
        if not iterated:
            raise NotAppliedError("no DataLoader gave batches")
        changed = [made for made in iterated if self.now(made) != made.asked[self.argument]]
        if not changed:
            reasons = list(dict.fromkeys(made.refused.get(self.id, "") for made in iterated))
            kept = self.now(iterated[0])
            raise NotAppliedError("; ".join(filter(None, reasons)) or f"{self.argument} is {kept} in the loader's iterator, as without it")
        first = changed[0]
        share = f" in {len(changed)} of {len(iterated)} DataLoaders" if len(iterated) > 1 else ""
        return f"{self.argument} {self.now(first)} instead of {first.asked[self.argument]}{share}"

    def now(self, made: MadeLoader) -> Any:
        """Return what is in effect in the loader's iterator."""
        return (made.now or {}).get(self.argument)


MAX_DEFAULT_WORKERS = 4
"""Workers without a value of one's own: enough to hide most loaders, few enough for any machine."""

MAX_WORKERS = 1024
"""Workers that can be asked for: four times the cores of the largest hosts. A recipe of unknown origin starts no million processes."""

_WORKER_ARGUMENTS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
"""Arguments that a DataLoader without workers refuses."""


class LoaderWorkers(LoaderArgument):
    """Batches made by worker processes, or by more of them.

    num_workers=n; without a value: one for each core of the process, four at most, and never fewer than the program has.
    """

    id = "loader-workers"
    argument = "num_workers"

    def __init__(self, value: str | None = None) -> None:
        super().__init__(value)
        self._workers = parse_whole_number(self.id, value, 0, MAX_WORKERS)

    def change(self, made: MadeLoader, arguments: dict[str, Any]) -> str:
        """Set the number of workers, but where a stream would be read once by each of them."""
        from torch.utils.data import IterableDataset

        asked = made.asked["num_workers"]
        workers = max(asked, choose_workers()) if self._workers is None else self._workers
        if isinstance(made.dataset, IterableDataset) and not asked:
            return "an IterableDataset is read whole by every worker, unless it was written to share itself out"
        if workers == asked:
            return f"the program has {asked} workers already"
        arguments["num_workers"] = workers
        if not workers:
            for name in _WORKER_ARGUMENTS:
                arguments.pop(name, None)
        return ""


def choose_workers() -> int:
    """Return the workers for a loader of this process: its share of the cores that it may use, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return min(MAX_DEFAULT_WORKERS, max(1, cores // max(1, int(ranks) if ranks.isdigit() else 1)))


DEFAULT_PREFETCH = 2 * TORCH_PREFETCH


class LoaderPrefetch(LoaderArgument):
    """More batches made ahead by each worker: a longer queue rides out slow ones.

    prefetch_factor=n for loaders with workers.
    """

    id = "loader-prefetch"
    argument = "prefetch_factor"

    def __init__(self, value: str | None = None) -> None:
        super().__init__(value)
        self._factor = parse_whole_number(self.id, value, 1) or DEFAULT_PREFETCH

    def change(self, made: MadeLoader, arguments: dict[str, Any]) -> str:
        """Set the factor; a loader without workers makes nothing ahead."""
        if not arguments.get("num_workers"):
            return "the loader has no workers to make batches ahead: --fix loader-workers"
        if made.asked["prefetch_factor"] == self._factor:
            return f"prefetch_factor is {self._factor} already"
        arguments["prefetch_factor"] = self._factor
        return ""


class PersistentWorkers(LoaderArgument):
    """Workers that live on from one epoch to the next, and need not be started again.

    persistent_workers=True for loaders with workers.
    """

    id = "persistent-workers"
    argument = "persistent_workers"

    def __init__(self, value: str | None = None) -> None:
        refuse_value(self.id, value)
        super().__init__(value)

    def change(self, made: MadeLoader, arguments: dict[str, Any]) -> str:
        """Keep the workers, where there are any."""
        if not arguments.get("num_workers"):
            return "the loader has no workers to keep: --fix loader-workers"
        if made.asked["persistent_workers"]:
            return "the program keeps its workers already"
        arguments["persistent_workers"] = True
        return ""


class PinMemory(LoaderArgument):
    """Batches in pinned host memory, from which a copy to the GPU needs no second one on the host and can run beside the program.

    pin_memory=True.
    """

    id = "pin-memory"
    argument = "pin_memory"
    needs_gpu = True

    def __init__(self, value: str | None = None) -> None:
        refuse_value(self.id, value)
        super().__init__(value)

    def change(self, made: MadeLoader, arguments: dict[str, Any]) -> str:
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


DEFAULT_BATCH_FACTOR = 2.0
"""Without a value: twice as many samples."""


class BatchSize(LoaderArgument):
    """Another number of samples in a batch. It trains otherwise: the learning rate stays as it is.

    batch_size=n, or x times what each loader of the program has.
    """

    id = "batch-size"
    argument = "batch_size"

    def __init__(self, value: str | None = None) -> None:
        super().__init__(value)
        self._size, self._factor = parse_batch_size(value)

    def install(self, site: Site) -> None:
        """Have batches of another size made, and look at the first that each iterator gives."""
        from torch.utils.data import dataloader

        super().install(site)
        self._loaders = find_loaders(site)
        site.patches.wrap(dataloader._BaseDataLoaderIter, "__next__", self._counted)

    def change(self, made: MadeLoader, arguments: dict[str, Any]) -> str:
        """Set the size of the loader's batches, where it is the loader that makes them."""
        size = made.asked["batch_size"]
        if size is None or arguments.get("batch_sampler") is not None:
            return "the program makes its batches itself: its DataLoader has a batch_sampler, or batch_size=None"
        wanted = self._size or max(1, round(size * self._factor))
        if wanted == size:
            return f"batches have {size} samples already"
        arguments["batch_size"] = wanted
        return ""

    def evidence(self, site: Site) -> str:
        """Return the samples of a batch beside those asked for. Raises NotAppliedError where they are as many as before."""
        iterated = self._loaders.iterated
        if not iterated:
            raise NotAppliedError("no DataLoader gave batches")
        shown = next((made for made in iterated if not made.refused.get(self.id) and _is_full_batch(made)), None)
        if shown is not None:
            return f"batches of {shown.samples} samples instead of {shown.asked['batch_size']}"
        first = iterated[0]
        if first.refused.get(self.id):
            raise NotAppliedError(first.refused[self.id])
        held = "an unknown number of" if first.samples is None else str(first.samples)
        raise NotAppliedError(f"the loader makes batches of {first.given['batch_size']}, but what it gives holds {held} samples")

    def _counted(self, original: Any) -> Any:
        def __next__(iterator: Any) -> Any:  # noqa: N807 - as torch names it
            batch = original(iterator)
            if iterator._num_yielded == 1:
                made = self._loaders.of(iterator)
                if made is not None:
                    made.samples = count_samples(batch)
            return batch

        return __next__


def _is_full_batch(made: MadeLoader) -> bool:
    """Return whether a batch holds the samples that it was to hold: a collate function may pack them, and a small dataset has fewer."""
    wanted, samples = made.given["batch_size"], made.samples
    return samples is not None and (samples == wanted or made.asked["batch_size"] < samples < wanted)


def parse_batch_size(value: str | None) -> tuple[int | None, float]:
    """Return the size and the factor of a value: x2, x0.5, 64. Raises InputError for what is none."""
    if value is None:
        return None, DEFAULT_BATCH_FACTOR
    try:
        factor = float(value[1:]) if value.startswith("x") else 1.0
        size = None if value.startswith("x") else int(value)
    except ValueError:
        factor, size = 0.0, None
    if not 0 < factor <= 1024 or (size is not None and size < 1):
        raise InputError(
            f"batch-size takes a factor or a number of samples, not {value!r}", "for example --fix batch-size=x2 or batch-size=64"
        )
    return size, factor
