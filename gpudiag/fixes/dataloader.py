"""Fixes of the DataLoader: workers and their threads, prefetching, persistent workers, pinned memory, batch size.

What a loader does is decided when it is made, and shown by its iterator. accelerate (Hugging Face) and Lightning make a second loader from
the attributes of the first, which are changed already: it is left as it is, and what the program asked for is what the first was given.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import msgspec

from gpudiag.cores import count_usable_cores
from gpudiag.errors import InputError
from gpudiag.fixes.fix import OWN_LOOP, Applier, Fix, NoPlaceError, NotAppliedError, Site, around, parse_whole_number, wrap_arguments

if TYPE_CHECKING:
    from gpudiag.fixes.training_code import TrainingCode

_LOADER_DEFAULTS = dict[str, Any](num_workers=0, prefetch_factor=None, persistent_workers=False, pin_memory=False, batch_size=1)
"""Of torch.utils.data.DataLoader."""

_WORKERS_PLACE, _PIN_PLACE = 5, 7
"""Among the positional arguments of a DataLoader."""

_TRAINING_ARGUMENTS = "transformers.TrainingArguments"

TORCH_PREFETCH = 2
"""prefetch_factor of a loader with workers that was given none."""


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

    def is_remade(self, dataset: Any, asked: dict[str, Any], sampler: Any) -> bool:
        """Return whether a loader that is asked for is this one made once more: of its data, with its values, with its batches."""
        from torch.utils.data import IterableDataset

        # a stream of which a rank has its share: accelerate's IterableDatasetShard
        stream = getattr(dataset, "dataset", None) if isinstance(dataset, IterableDataset) else None
        if dataset is not self.dataset and (stream is None or stream is not self.dataset):
            return False
        if any(asked[name] != self.given[name] for name in _LOADER_DEFAULTS if name != "batch_size"):
            return False
        if sampler is None:
            return bool(asked["batch_size"] == self.given["batch_size"])
        known = getattr(self.loader, "batch_sampler", None)
        return sampler is known or getattr(sampler, "batch_sampler", None) is known  # the second: accelerate's share of a rank


LoaderChange = Callable[[MadeLoader, dict[str, Any]], str]
"""Changes the arguments of a loader in place; returns why it does not, '' where it does."""


class Loaders:
    """All loaders of the program. Workers are decided first, whatever the order the fixes were asked for in: a factor of prefetching needs
    to know of them."""

    def __init__(self, site: Site) -> None:
        from torch.utils import data
        from torch.utils.data import dataloader

        self.made: list[MadeLoader] = []
        self.changes: dict[str, LoaderChange] = {}
        """By fix: called for each loader that is made from now on."""
        self.iterators: WeakKeyDictionary[Any, MadeLoader] = WeakKeyDictionary()
        """The loader of each iterator that was made by a call that we saw."""
        site.patches.wrap(data.DataLoader, "__init__", wrap_arguments(self._make))
        site.patches.wrap(dataloader._BaseDataLoaderIter, "__init__", around(self._iterate))

    @property
    def iterated(self) -> list[MadeLoader]:
        """Return the loaders from which batches were asked for. Raises NotAppliedError where there are none."""
        found = [made for made in self.made if made.now is not None]
        if not found:
            raise NotAppliedError("no DataLoader gave batches")
        return found

    def _make(self, loader: Any, arguments: dict[str, Any]) -> None:
        dataset, asked = arguments.get("dataset"), _read_arguments(arguments)
        sampler = arguments.get("batch_sampler")
        for before in reversed(self.made):
            if before.is_remade(dataset, asked, sampler):
                self.made.append(MadeLoader(loader, dataset, before.asked, before.given, refused=before.refused))
                return
        made = MadeLoader(loader, dataset, asked, asked)
        order = sorted(self.changes, key=lambda fix: fix != LoaderWorkers.id)
        made.refused = {fix: self.changes[fix](made, arguments) for fix in order}
        made.given = _read_arguments(arguments)
        self.made.append(made)

    def _iterate(self, original: Any, iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        original(iterator, loader, *args, **kwargs)
        made = next((made for made in reversed(self.made) if made.loader is loader), None)
        if made is not None:
            # the iterator is not kept itself: its workers end when the program lets go of it
            workers = iterator._num_workers
            made.now = {
                "num_workers": workers,
                "prefetch_factor": loader.prefetch_factor if workers else None,
                "persistent_workers": iterator._persistent_workers,
                "pin_memory": iterator._pin_memory,
            }
            self.iterators[iterator] = made


def _read_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    values = {name: arguments.get(name, default) for name, default in _LOADER_DEFAULTS.items()}
    if values["num_workers"] and values["prefetch_factor"] is None:
        values["prefetch_factor"] = TORCH_PREFETCH
    return values


_LOADERS: WeakKeyDictionary[Site, Loaders] = WeakKeyDictionary()


def find_loaders(site: Site) -> Loaders:
    """Find the loaders of `site`, one object for all fixes."""
    if site not in _LOADERS:
        _LOADERS[site] = Loaders(site)
    return _LOADERS[site]


class LoaderArgument(Applier):
    """Changes one argument of every DataLoader."""

    argument = ""
    wanted: Any = True
    """Value of the argument."""
    workerless = ""
    """Why a loader without workers is left as it is; '' where it is not."""
    already = ""
    """Why one is left that has the value, {}, already."""

    def install(self, site: Site) -> None:
        find_loaders(site).changes[self.id] = self.change

    def change(self, made: MadeLoader, arguments: dict[str, Any]) -> str:
        if self.workerless and not arguments.get("num_workers"):
            return self.workerless
        if made.asked[self.argument] == self.wanted:
            return self.already.format(self.wanted)
        arguments[self.argument] = self.wanted
        return ""

    def patch(self, code: TrainingCode) -> None:
        """Give the loader of the training loop the argument, where its own is a plain value."""
        made = code.find_training_loader()
        given = code.find_argument(made, self.argument, _PIN_PLACE if self.argument == "pin_memory" else -1)
        asked, value = code.read_literal(given.value if given else None), repr(self.wanted)
        if asked == self.wanted:
            raise NoPlaceError(self.already.format(self.wanted), code.line(made))
        workers = code.find_argument(made, "num_workers", _WORKERS_PLACE)
        if self.workerless and workers is not None and code.is_plain_name(workers.value) and code.render(workers.value) != "None":
            count = code.render(workers.value)  # of a configuration: without workers none of it
            value = f"{count} > 0" if self.wanted is True else f"{value} if {count} > 0 else None"
        elif self.workerless and not code.read_literal(workers.value if workers else None):
            raise NoPlaceError(self.workerless, code.line(made))
        code.set_argument(made, self.argument, value, _PIN_PLACE if self.argument == "pin_memory" else -1)

    def evidence(self, site: Site) -> str:
        """Return the value in effect beside the one asked for, of loaders that were iterated. Raises NotAppliedError where none differs."""
        held = [(made, (made.now or {}).get(self.argument)) for made in find_loaders(site).iterated]
        changed = [(now, made.asked[self.argument]) for made, now in held if now != made.asked[self.argument]]
        if not changed:
            reasons = dict.fromkeys(made.refused.get(self.id, "") for made, _ in held)
            unchanged = f"{self.argument} is {held[0][1]} in the loader's iterator, as without it"
            raise NotAppliedError("; ".join(filter(None, reasons)) or unchanged)
        share = f" in {len(changed)} of {len(held)} DataLoaders" if len(held) > 1 else ""
        return f"{self.argument} {changed[0][0]} instead of {changed[0][1]}{share}"


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

    fix = Fix(
        "loader-workers", "Load in worker processes, or in more of them", "semantics",
        "DataLoader(..., num_workers=4)  # one for each core, where there are fewer",
        values="a number of processes; by default one for each core, four at most",
    )  # fmt: skip
    argument = "num_workers"
    frameworks = MappingProxyType({_TRAINING_ARGUMENTS: "dataloader_num_workers=4"})

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

    def patch(self, code: TrainingCode) -> None:
        """Set the number of workers of the loader of the training loop, where its own is written there."""
        made = code.find_training_loader()
        given = code.find_argument(made, "num_workers", _WORKERS_PLACE)
        asked = code.read_literal(given.value if given else None, 0)
        workers = max(asked, choose_workers()) if self._workers is None else self._workers
        if workers == asked:
            raise NoPlaceError(f"it has {asked} workers already", code.line(made))
        if not workers and any(code.find_argument(made, name) for name in _WORKER_ARGUMENTS):
            raise NoPlaceError("without workers other arguments have to go too", code.line(made))
        code.set_argument(made, "num_workers", str(workers), _WORKERS_PLACE)


def choose_workers() -> int:
    """Choose the workers for a loader of this process: its share of the cores that it may use, at least 1."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return min(MAX_DEFAULT_WORKERS, max(1, count_usable_cores() // max(1, int(ranks) if ranks.isdigit() else 1)))


_THREAD_FUNCTIONS = (
    ("get_num_threads", "set_num_threads"),  # torch, numba
    ("getNumThreads", "setNumThreads"),  # OpenCV
    *(
        (f"{name}_get_num_threads{bits}", f"{name}_set_num_threads{bits}")
        for name in ("openblas", "scipy_openblas")
        for bits in ("", "64_")
    ),
    ("MKL_Get_Max_Threads", "MKL_Set_Num_Threads"),
    ("bli_thread_get_num_threads", "bli_thread_set_num_threads"),
    ("omp_get_max_threads", "omp_set_num_threads"),
)
"""How modules and libraries tell and take the number of their threads: their documentation."""


def find_thread_functions() -> list[tuple[Callable[[], int], Callable[[int], object]]]:
    """Find the functions that get and set the threads of what computes in this process."""
    holders: list[Any] = [sys.modules[name] for name in ("torch", "cv2", "numba") if name in sys.modules]
    for path in sorted(set(re.findall(r" (/.*\.so\b.*)", Path("/proc/self/maps").read_text(errors="replace")))):
        with suppress(OSError):  # a file that was replaced since
            holders.append(ctypes.CDLL(path, mode=os.RTLD_NOLOAD))
    pairs = [(holder, get, put) for holder in holders for get, put in _THREAD_FUNCTIONS if hasattr(holder, get) and hasattr(holder, put)]
    return [(getattr(holder, get), getattr(holder, put)) for holder, get, put in pairs]


def _start_on_one_thread(own: Callable[[int], object] | None, seen: Any, worker: int) -> None:
    """Do what the program has a worker do at its start, then let it compute on one thread; `seen`: threads before and after, by worker."""
    if own is not None:
        own(worker)
    later = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OPENCV_FOR_THREADS_NUM")  # of what is not loaded yet
    os.environ.update(dict.fromkeys(later, "1"))
    functions = find_thread_functions()
    seen[worker, 0] = max(get() for get, _ in functions)
    for _, put in functions:
        put(1)
    seen[worker, 1] = max(get() for get, _ in functions)


class WorkerThreads(Applier):
    """worker-threads: torch, BLAS, OpenMP, OpenCV and numba compute on one thread in each worker of a DataLoader.

    Says so in worker_init_fn, after the program's own.
    """

    fix = Fix(
        "worker-threads", "One thread in each loader worker", "rounding",
        "DataLoader(..., worker_init_fn=lambda _: (cv2.setNumThreads(1), threadpoolctl.threadpool_limits(1)))  # or OPENBLAS_NUM_THREADS=1",
    )  # fmt: skip
    _seen: Any = None

    def install(self, site: Site) -> None:
        import torch
        from torch.utils.data import dataloader

        def start(original: Any, iterator: Any, loader: Any) -> None:
            own, self._seen = loader.worker_init_fn, torch.zeros(loader.num_workers, 2, dtype=torch.int64, device="cpu").share_memory_()
            loader.worker_init_fn = partial(_start_on_one_thread, own, self._seen)
            try:
                original(iterator, loader)
            finally:
                loader.worker_init_fn = own  # frameworks look at it

        find_loaders(site)
        site.patches.wrap(dataloader._MultiProcessingDataLoaderIter, "__init__", around(start))

    def evidence(self, site: Site) -> str:
        """Return the threads of a worker with and without the fix, as its libraries tell. Raises NotAppliedError where it is no change."""
        workers = [row for row in self._seen.tolist() if row[1]] if self._seen is not None else []
        before, after = (max((row[place] for row in workers), default=0) for place in (0, 1))
        if after != 1 or before == 1:
            none = "the loader has no workers" if find_loaders(site).iterated else ""
            held = "each worker computes on one thread already" if before == 1 else f"a worker computes on {after} threads still"
            raise NotAppliedError(held if workers else none)
        return f"1 thread instead of {before} in each of {len(workers)} loader workers"


class LoaderPrefetch(LoaderArgument):
    """More batches made ahead by each worker: a longer queue rides out slow ones.

    prefetch_factor=n for loaders with workers.
    """

    fix = Fix(
        "loader-prefetch", "Prefetch more batches", "exact", "DataLoader(..., prefetch_factor=4)", values="batches a worker, 4 by default"
    )
    argument = "prefetch_factor"
    frameworks = MappingProxyType({_TRAINING_ARGUMENTS: "dataloader_prefetch_factor=4"})
    workerless = "the loader has no workers to make batches ahead: --fix loader-workers"
    already = "prefetch_factor is {} already"

    def __init__(self, value: str | None = None) -> None:
        super().__init__(value)
        self.wanted = parse_whole_number(self.id, value, 1) or 2 * TORCH_PREFETCH


class PersistentWorkers(LoaderArgument):
    """Workers that live on from one epoch to the next, and need not be started again.

    persistent_workers=True for loaders with workers.
    """

    fix = Fix("persistent-workers", "Keep loader workers between epochs", "semantics", "DataLoader(..., persistent_workers=True)")
    argument = "persistent_workers"
    frameworks = MappingProxyType({_TRAINING_ARGUMENTS: "dataloader_persistent_workers=True"})
    workerless = "the loader has no workers to keep: --fix loader-workers"
    already = "the program keeps its workers already"


class PinMemory(LoaderArgument):
    """Batches in pinned host memory, from which a copy to the GPU needs no second one on the host and can run beside the program.

    pin_memory=True.
    """

    fix = Fix("pin-memory", "Pinned host memory", "exact", "DataLoader(..., pin_memory=True)  # or pinned tensors of your own", verified=())
    argument = "pin_memory"
    frameworks = MappingProxyType({_TRAINING_ARGUMENTS: "dataloader_pin_memory=True"})
    needs_gpu = True
    already = "the program pins its batches already"

    def evidence(self, site: Site) -> str:
        """Return that iterators pin their batches: they do so only where there is an accelerator. Raises NotAppliedError."""
        shown = super().evidence(site)
        if "pin_memory True" not in shown:
            raise NotAppliedError(shown)
        return shown


class BatchSize(LoaderArgument):
    """Another number of samples in a batch. It trains otherwise: the learning rate stays as it is.

    batch_size=n, or x times what each loader of the program has.
    """

    fix = Fix(
        "batch-size", "Another batch size", "semantics", "batch_size = ...  # adjust accumulation or learning rate",
        values="a factor (x2, the default) or a number of samples",
    )  # fmt: skip
    argument = "batch_size"

    def __init__(self, value: str | None = None) -> None:
        super().__init__(value)
        self._size, self._factor = parse_batch_size(value)

    def install(self, site: Site) -> None:
        from torch.utils.data import dataloader

        from gpudiag.capture.batch_contents import count_samples

        super().install(site)
        loaders = find_loaders(site)

        def count_first(original: Any, iterator: Any) -> Any:
            batch = original(iterator)
            made = loaders.iterators.get(iterator) if iterator._num_yielded == 1 else None
            if made is not None:
                made.samples = count_samples(batch)
            return batch

        site.patches.wrap(dataloader._BaseDataLoaderIter, "__next__", around(count_first))

    def change(self, made: MadeLoader, arguments: dict[str, Any]) -> str:
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
        iterated = find_loaders(site).iterated
        for made in iterated:
            # a collate function may pack samples, and a small dataset has fewer
            asked, wanted, samples = made.asked["batch_size"], made.given["batch_size"], made.samples
            if not made.refused.get(self.id) and samples is not None and (samples == wanted or asked < samples < wanted):
                return f"batches of {samples} samples instead of {asked}"
        first = iterated[0]
        if first.refused.get(self.id):
            raise NotAppliedError(first.refused[self.id])
        held = "an unknown number of" if first.samples is None else str(first.samples)
        raise NotAppliedError(f"the loader makes batches of {first.given['batch_size']}, but what it gives holds {held} samples")


BATCH_REQUESTS = Fix(
    "batch-requests", "More inputs at once", "rounding", "outputs = model(torch.cat(inputs))", injected=False, by_hand=OWN_LOOP
)

PREPROCESS_IN_DATASET = Fix(
    "preprocess-in-dataset", "Preprocess in the Dataset", "semantics",
    "class Rows(Dataset): ...  # its __getitem__, or collate_fn, does what the loop does to a batch, in worker processes",
    injected=False, by_hand="which lines of the loop belong to a sample is known to its author alone",
)  # fmt: skip


def parse_batch_size(value: str | None) -> tuple[int | None, float]:
    """Parse the size and the factor of a value: x2 (without one), x0.5, 64. Raises InputError for what is none."""
    value = "x2" if value is None else value
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
