"""The next batch is copied to the GPU on a stream of its own while the step runs.

It is the prefetcher of NVIDIA's examples (https://github.com/NVIDIA/apex/blob/master/examples/imagenet/main_amp.py, data_prefetcher) put
round the iterator of the program's DataLoader: it gives batches that are on the GPU already, and a .to(device) returns them as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

from gpudiag.experiment.fixes.fix import Applier, NotAppliedError, Site
from gpudiag.experiment.fixes.gpu import refuse_unused
from gpudiag.experiment.fixes.values import nothing


class Ahead:
    """One batch more than was asked for. `stage` begins a batch's copy, `hand_over` makes the program's stream wait for it."""

    def __init__(self, stage: Callable[[Any], Any], hand_over: Callable[[Any], Any]) -> None:
        self._stage, self._hand_over = stage, hand_over
        self._staged: list[Any] = []
        self._ended: BaseException | None = None

    def next(self, fetch: Callable[[], Any]) -> Any:
        """Return the batch that was staged, and stage the one after it. What fetch() raises is raised when that batch is asked for."""
        if not self._staged:
            self._fill(fetch)
        if not self._staged:
            assert self._ended is not None  # noqa: S101 - _fill leaves one or the other
            raise self._ended
        batch = self._hand_over(self._staged.pop())
        self._fill(fetch)
        return batch

    def _fill(self, fetch: Callable[[], Any]) -> None:
        if self._ended is None:
            try:
                batch = fetch()
            except Exception as error:  # noqa: BLE001 - the end of the epoch, or an error in the batch after this one
                self._ended = error
            else:
                self._staged.append(self._stage(batch))


class DevicePrefetch(Applier):
    """A batch ahead in every DataLoader of the program, once it uses a GPU."""

    id = "device-prefetch"
    needs_gpu = True

    def __init__(self, value: str | None = None) -> None:
        nothing(self.id, value)
        super().__init__(value)
        self._ahead: WeakKeyDictionary[Any, Ahead] = WeakKeyDictionary()
        self._side: Any = None
        self._tensors = self._bytes = 0
        self._unpinned = 0

    def install(self, site: Site) -> None:
        """Have iterators stage a batch ahead; what an epoch left unread is dropped when its workers begin another."""
        from torch.utils.data import dataloader

        site.patches.wrap(dataloader._BaseDataLoaderIter, "__next__", lambda original: self._next(original, site))
        site.patches.wrap(dataloader._BaseDataLoaderIter, "_reset", self._reset)

    def evidence(self, site: Site) -> str:
        """Return how much was copied ahead. Raises NotAppliedError where nothing was."""
        refuse_unused("batches are copied to a GPU")
        if self._tensors:
            return f"{self._tensors} tensors of batches ({self._bytes / 1e6:.3g} MB) were copied to the GPU on a stream of their own"
        if self._unpinned:
            raise NotAppliedError(
                "the loader's batches are not in pinned memory, from where alone a copy runs beside a step: --fix pin-memory"
            )
        raise NotAppliedError("no DataLoader gave tensors that were not on the GPU yet")

    # -- iterating ----------------------------------------------------------------------------------------------------

    def _next(self, original: Any, site: Site) -> Any:
        def __next__(iterator: Any) -> Any:  # noqa: N807 - as torch names it
            if not self.ready():
                return original(iterator)
            ahead = self._ahead.get(iterator)
            if ahead is None:
                ahead = self._ahead[iterator] = Ahead(lambda batch: self.stage(batch, site), self.hand_over)
            return ahead.next(lambda: original(iterator))

        return __next__

    def _reset(self, original: Any) -> Any:
        def _reset(iterator: Any, *args: Any, **kwargs: Any) -> Any:
            self._ahead.pop(iterator, None)
            return original(iterator, *args, **kwargs)

        return _reset

    # -- copying ------------------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Return whether the program uses a GPU by now: nothing of ours begins to (False too in a process that was forked)."""
        import torch

        return bool(torch.cuda.is_initialized())

    def stage(self, batch: Any, site: Site) -> tuple[Any, list[Any], Any]:
        """Begin to copy a batch; return it on the GPU, its tensors there, and the event that ends the copies."""
        import torch

        if self._side is None:
            self._side = torch.cuda.Stream(_device(site))
        moved: list[Any] = []

        def move(tensor: Any) -> Any:
            if tensor.device.type != "cpu":
                return tensor
            if not tensor.is_pinned():
                self._unpinned += 1
                return tensor
            moved.append(tensor.to(self._side.device, non_blocking=True))
            self._bytes += tensor.nbytes
            return moved[-1]

        with torch.cuda.stream(self._side):
            placed = placed_by(move, batch)
        self._tensors += len(moved)
        return placed, moved, self._side.record_event()

    def hand_over(self, staged: tuple[Any, list[Any], Any]) -> Any:
        """Return a staged batch, for whose copies the program's stream waits; its memory is not given away while that stream uses it."""
        import torch

        batch, moved, event = staged
        stream = torch.cuda.current_stream(self._side.device)
        stream.wait_event(event)
        for tensor in moved:
            tensor.record_stream(stream)
        return batch


def _device(site: Site) -> Any:
    """Return the GPU that the program trains on: that of its optimizers' parameters, else the current one."""
    import torch

    for optimizer in site.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.is_cuda:
                    return parameter.device
    return torch.device("cuda", torch.cuda.current_device())


def placed_by(move: Callable[[Any], Any], data: Any) -> Any:
    """Return `data` with move(tensor) in the place of each tensor in it, in mappings, lists and tuples too; all else is left as it is."""
    import torch

    if isinstance(data, torch.Tensor):
        return move(data)
    if isinstance(data, MutableMapping):
        clone = copy.copy(data)  # a mapping may have more to it than its items
        clone.update({key: placed_by(move, value) for key, value in data.items()})
        return clone
    if type(data) in (list, tuple):
        return type(data)(placed_by(move, item) for item in data)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(placed_by(move, item) for item in data))
    return data
