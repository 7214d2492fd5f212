"""Fixes of copies to the GPU: not waited for (non_blocking), or made ahead on a stream of their own (device-prefetch).

Only copies from pinned memory are changed: one from pageable memory is staged by the driver, and the way back from the GPU must be
waited for (https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html).

The next batch is copied to the GPU on a stream of its own while the step runs.

It is the prefetcher of NVIDIA's examples (https://github.com/NVIDIA/apex/blob/master/examples/imagenet/main_amp.py, data_prefetcher) put
round the iterator of the program's DataLoader: it gives batches that are on the GPU already, and a .to(device) returns them as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from gpudiag.fixes.fix import Applier, Fix, NoPlaceError, NotAppliedError, Site, around, require_used_gpu

if TYPE_CHECKING:
    from gpudiag.fixes.training_code import TrainingCode


class NonBlocking(Applier):
    """Copies to the GPU that the program does not wait for.

    non_blocking=True in Tensor.to(device) and Tensor.cuda().
    """

    fix = Fix("non-blocking", "Asynchronous copies to the device", "exact", "x = x.to(device, non_blocking=True)", verified=())
    needs_gpu = True

    _copies = _pinned = _changed = 0

    def install(self, site: Site) -> None:
        import torch

        def wrap_copies(method: str, original: Any) -> Any:
            def copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and (method == "cuda" or is_copy_to_gpu(args, kwargs)):
                    self._copies += 1
                    pinned = tensor.is_pinned()
                    self._pinned += pinned
                    if pinned and (changed := set_non_blocking(method, args, kwargs)) is not None:
                        self._changed += 1
                        args, kwargs = changed
                return original(tensor, *args, **kwargs)

            return copy

        for name in ("to", "cuda"):
            site.patches.wrap_method(torch.Tensor, name, partial(wrap_copies, name))

    def evidence(self, site: Site) -> str:
        """Return how many copies from pinned memory no longer wait. Raises NotAppliedError where there are none."""
        if self._changed:
            return f"{self._changed} of {self._copies} copies to the GPU, all from pinned memory, are no longer waited for"
        if not self._copies:
            raise NotAppliedError("the program copies nothing to a GPU by Tensor.to() or .cuda()")
        if not self._pinned:
            raise NotAppliedError(f"none of {self._copies} copies to the GPU comes from pinned memory: --fix pin-memory")
        raise NotAppliedError("the program's copies from pinned memory are non_blocking already")

    def patch(self, code: TrainingCode) -> None:
        """Have the copies of batches in the training loop not be waited for."""
        copies = code.find_batch_copies()
        if not copies:
            raise NoPlaceError("no batch.to(device) or batch.cuda() stands in a training loop of this file")
        for call in copies:
            code.set_argument(call, "non_blocking", "True")


def is_copy_to_gpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether Tensor.to with these arguments leads to a CUDA or HIP device: it takes a device, another tensor, or only a type."""
    import torch

    where = args[0] if args else kwargs.get("device", kwargs.get("other"))
    if isinstance(where, torch.Tensor):
        where = where.device
    if isinstance(where, str):
        return where.partition(":")[0] == "cuda"
    if isinstance(where, torch.device):
        return bool(where.type == "cuda")
    return isinstance(where, int) and not isinstance(where, bool)


def set_non_blocking(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments with non_blocking=True, given by place or by name as the program does; None where it is set already.

    Its place: Tensor.to(other, non_blocking) or (device, dtype, non_blocking), Tensor.cuda(device, non_blocking).
    """
    import torch

    place = 1 if method == "cuda" or (args and isinstance(args[0], torch.Tensor)) else 2
    if kwargs.get("non_blocking") or (len(args) > place and args[place]):
        return None
    if len(args) > place:
        return (*args[:place], True, *args[place + 1 :]), kwargs
    return args, {**kwargs, "non_blocking": True}


class BatchPrefetcher:
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
            except StopIteration as end:
                self._ended = end.with_traceback(None)  # whose frames hold the iterator, and that its workers, beyond the epoch
            except Exception as error:  # noqa: BLE001 - an error in the batch after this one
                self._ended = error
            else:
                self._staged.append(self._stage(batch))


class DevicePrefetch(Applier):
    """The next batch is copied to the GPU on a stream of its own while the step runs.

    A batch ahead in every DataLoader of the program, once it uses a GPU.
    """

    fix = Fix("device-prefetch", "Copy the next batch on a side stream", "exact", "copy batch k+1 while step k runs", verified=())
    needs_gpu = True

    _side: Any = None
    _tensors = _bytes = _unpinned = 0

    def install(self, site: Site) -> None:
        """Have iterators stage a batch ahead; what an epoch left unread is dropped when its workers begin another."""
        from torch.utils.data import dataloader

        known: WeakKeyDictionary[Any, BatchPrefetcher] = WeakKeyDictionary()

        def fetch_ahead(original: Any, iterator: Any) -> Any:
            if not self.ready():
                return original(iterator)
            ahead = known.get(iterator)
            if ahead is None:
                ahead = known[iterator] = BatchPrefetcher(lambda batch: self.stage(batch, site), self.hand_over)
            return ahead.next(lambda: original(iterator))

        def drop_ahead(original: Any, iterator: Any, *args: Any, **kwargs: Any) -> Any:
            known.pop(iterator, None)
            return original(iterator, *args, **kwargs)

        site.patches.wrap(dataloader._BaseDataLoaderIter, "__next__", around(fetch_ahead))
        site.patches.wrap(dataloader._BaseDataLoaderIter, "_reset", around(drop_ahead))

    def evidence(self, site: Site) -> str:
        """Return how much was copied ahead. Raises NotAppliedError where nothing was."""
        require_used_gpu("batches are copied to a GPU")
        if self._tensors:
            return f"{self._tensors} tensors of batches ({self._bytes / 1e6:.3g} MB) were copied to the GPU on a stream of their own"
        if self._unpinned:
            raise NotAppliedError(
                "the loader's batches are not in pinned memory, from where alone a copy runs beside a step: --fix pin-memory"
            )
        raise NotAppliedError("no DataLoader gave tensors that were not on the GPU yet")

    # -- copying ------------------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Return whether the program uses a GPU by now: nothing of ours begins to (False too in a process that was forked)."""
        import torch

        return bool(torch.cuda.is_initialized())

    def stage(self, batch: Any, site: Site) -> tuple[Any, list[Any], Any]:
        """Begin to copy a batch; return it on the GPU, its tensors there, and the event that ends the copies."""
        import torch

        if self._side is None:
            # the GPU that the program trains on: that of its optimizers' parameters, else the current one
            groups = (group for optimizer in site.optimizers for group in optimizer.param_groups)
            trained = (parameter.device for group in groups for parameter in group["params"] if parameter.is_cuda)
            self._side = torch.cuda.Stream(next(trained, torch.device("cuda", torch.cuda.current_device())))
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
            placed = move_tensors(move, batch)
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


def move_tensors(move: Callable[[Any], Any], data: Any) -> Any:
    """Return `data` with move(tensor) in the place of each tensor in it, in mappings, lists and tuples too; all else is left as it is."""
    import torch

    if isinstance(data, torch.Tensor):
        return move(data)
    if isinstance(data, MutableMapping):
        clone = copy.copy(data)  # a mapping may have more to it than its items
        clone.update({key: move_tensors(move, value) for key, value in data.items()})
        return clone
    if type(data) in (list, tuple):
        return type(data)(move_tensors(move, item) for item in data)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(move_tensors(move, item) for item in data))
    return data
