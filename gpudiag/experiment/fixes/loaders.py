"""DataLoaders whose arguments fixes change, and the values that are in effect in those that were iterated.

What a loader does is decided when it is made, and shown by its iterator. accelerate (Hugging Face) and Lightning make a second loader from
the attributes of the first, which are changed already: it is left as it is, and what the program asked for is what the first was given.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from gpudiag.experiment.fixes.calls import with_arguments
from gpudiag.experiment.fixes.fix import Applier, NotAppliedError, Site
from gpudiag.model.fixes import FIXES

_DEFAULTS: dict[str, Any] = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "pin_memory": False, "batch_size": 1}
"""Of torch.utils.data.DataLoader."""

TORCH_PREFETCH = 2
"""prefetch_factor of a loader with workers that was given none."""

_ORDER = {fix.id: place for place, fix in enumerate(FIXES)}


class Made(msgspec.Struct):
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
        if not (dataset is self.dataset or _streamed(dataset) is self.dataset):
            return False
        if any(asked[name] != self.given[name] for name in _DEFAULTS if name != "batch_size"):
            return False
        if sampler is None:
            return bool(asked["batch_size"] == self.given["batch_size"])
        known = getattr(self.loader, "batch_sampler", None)
        return sampler is known or getattr(sampler, "batch_sampler", None) is known  # the second: accelerate's share of a rank


def _streamed(dataset: Any) -> Any:
    """Return the stream of which `dataset` is a rank's share (accelerate's IterableDatasetShard); itself where it is none."""
    from torch.utils.data import IterableDataset

    return getattr(dataset, "dataset", dataset) if isinstance(dataset, IterableDataset) else dataset


Change = Callable[[Made, dict[str, Any]], str]
"""Changes the arguments of a loader in place; returns why it does not, '' where it does."""


class Loaders:
    """All loaders of the program. Fixes change their arguments in the order of model.fixes, whatever the order they were asked for in:
    a factor of prefetching needs to know of the workers."""

    def __init__(self) -> None:
        self.made: list[Made] = []
        self._changes: dict[str, Change] = {}
        self._iterators: WeakKeyDictionary[Any, Made] = WeakKeyDictionary()

    def add(self, fix: str, change: Change) -> None:
        """Have `change` called for each loader that is made from now on."""
        self._changes[fix] = change
        self._changes = {known: self._changes[known] for known in sorted(self._changes, key=lambda fix: _ORDER.get(fix, len(_ORDER)))}

    def install(self, site: Site) -> None:
        """Wrap the constructors of loaders and of their iterators."""
        from torch.utils import data
        from torch.utils.data import dataloader

        site.patches.wrap(data.DataLoader, "__init__", with_arguments(self._make))
        site.patches.wrap(dataloader._BaseDataLoaderIter, "__init__", self._iterates)

    def of(self, iterator: Any) -> Made | None:
        """Return the loader of an iterator; None where it was not made by a call that we saw."""
        return self._iterators.get(iterator)

    @property
    def iterated(self) -> list[Made]:
        """Return the loaders from which batches were asked for."""
        return [made for made in self.made if made.now is not None]

    def _make(self, loader: Any, arguments: dict[str, Any]) -> None:
        dataset, asked = arguments.get("dataset"), _values(arguments)
        sampler = arguments.get("batch_sampler")
        for before in reversed(self.made):
            if before.made_into(dataset, asked, sampler):
                self.made.append(Made(loader, dataset, before.asked, before.given, refused=before.refused))
                return
        made = Made(loader, dataset, asked, asked)
        made.refused = {fix: change(made, arguments) for fix, change in self._changes.items()}
        made.given = _values(arguments)
        self.made.append(made)

    def _iterates(self, original: Any) -> Any:
        def __init__(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - as torch names it
            original(iterator, loader, *args, **kwargs)
            made = next((made for made in reversed(self.made) if made.loader is loader), None)
            if made is not None:
                made.now = _in_effect(iterator, loader)
                self._iterators[iterator] = made

        return __init__


def _values(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the values of interest among the arguments of a DataLoader."""
    values = {name: arguments.get(name, default) for name, default in _DEFAULTS.items()}
    if values["num_workers"] and values["prefetch_factor"] is None:
        values["prefetch_factor"] = TORCH_PREFETCH
    return values


def _in_effect(iterator: Any, loader: Any) -> dict[str, Any]:
    """Return what an iterator works with. It is not kept itself: its workers end when the program lets go of it."""
    workers = iterator._num_workers
    return {
        "num_workers": workers,
        "prefetch_factor": loader.prefetch_factor if workers else None,
        "persistent_workers": iterator._persistent_workers,
        "pin_memory": iterator._pin_memory,
    }


_LOADERS: WeakKeyDictionary[Site, Loaders] = WeakKeyDictionary()


def loaders_of(site: Site) -> Loaders:
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
        loaders_of(site).add(self.id, self.change)

    @abstractmethod
    def change(self, made: Made, arguments: dict[str, Any]) -> str:
        """Change the argument; return why it is left, '' where it is not."""

    def evidence(self, site: Site) -> str:
        """Return the value in effect beside the one asked for, of loaders that were iterated. Raises NotAppliedError where none differs."""
        iterated = loaders_of(site).iterated
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

    def now(self, made: Made) -> Any:
        """Return what is in effect in the loader's iterator."""
        return (made.now or {}).get(self.argument)
