"""Whether what `build` makes can fit into the memory of its device, before anything is trained: two steps on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from gpudiag.capture.estimate.estimate import Given, estimate
from gpudiag.errors import GpudiagError
from gpudiag.experiment.fixes.fix import NotAppliedError
from gpudiag.experiment.micro import micro_batches
from gpudiag.experiment.task import Loop


class Need(msgspec.Struct, frozen=True):
    """Memory that a training will take. Null: not known, with the reason."""

    peak_bytes: int | None = None
    """The most that its tensors hold; what the driver and libraries take comes on top."""
    free_bytes: int | None = None
    """Of the device now; null where there is no GPU: host memory can be lent by the disk."""
    reason: str = ""

    @property
    def impossible(self) -> bool:
        """Return whether it cannot fit: its tensors alone need more than is free."""
        return self.peak_bytes is not None and self.free_bytes is not None and self.peak_bytes > self.free_bytes


def need(make: Callable[[], Loop]) -> Need:
    """Return the memory of the loop that `make` makes; of what needs the values of tensors it is not known, and the reason says so."""
    import torch

    on_gpu = torch.cuda.is_available()
    try:
        found = estimate(lambda: _given(make(), "cuda" if on_gpu else "cpu"), "build()")
    except GpudiagError as error:
        return Need(reason=str(error))
    return Need(found.peak_bytes, torch.cuda.mem_get_info()[0] if on_gpu else None)


def _given(loop: Loop, device: str) -> Given:
    """Return what is estimated of a loop: the step of its task in the place of a model, with the parameters of the model."""
    import torch

    task, batch = loop.task, first_batch(loop.task.loader)
    if loop.accumulation > 1:
        with suppress(NotAppliedError):
            batch = micro_batches(batch, loop.accumulation, _rows(batch))[0][0]

    class Step(torch.nn.Module):  # type: ignore[misc]
        """Gives the loss of a batch."""

        def __init__(self) -> None:
            super().__init__()
            self.model = task.model
            self.one_by_one = False

        def forward(self, *parts: Any, **named: Any) -> Any:
            """Return the loss; the estimate gives the items of a sequence one by one, and those of a mapping by name."""
            if named:
                return task.step(named)
            return task.step(list(parts) if self.one_by_one else parts[0])

    step = Step()
    step.one_by_one = isinstance(batch, (list, tuple))
    if isinstance(batch, Mapping):
        batch = dict(batch)
    return Given(model=step, batch=batch, loss=None, optimizer=task.optimizer, device=device, accumulate=loop.accumulation > 1)


def _rows(batch: Any) -> int | None:
    """Return the first dimension of the first tensor; samples_of() asks no tensor of another class, as those without data are."""
    import torch
    from torch.utils._pytree import tree_iter

    return next((leaf.shape[0] for leaf in tree_iter(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim), None)


def first_batch(loader: Any) -> Any:
    """Return a batch of the size and form of the loader's own.

    A DataLoader is not iterated: it would draw an order, which tensors without data have not, or start processes. Its first samples are
    put together as it would.
    """
    from torch.utils.data import DataLoader, IterableDataset

    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return next(iter(loader))
    count = min(loader.batch_size, len(loader.dataset))
    return loader.collate_fn([loader.dataset[index] for index in range(count)])
