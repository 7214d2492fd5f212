"""What `build` returns, the loop that trains it in an arm, its micro-batches, and whether it can fit into the memory of its device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from itertools import pairwise
from typing import Any

import msgspec

from gpudiag.capture import run_script
from gpudiag.capture.batch_contents import count_samples
from gpudiag.capture.estimate.model_estimate import EstimateInput, run_estimate
from gpudiag.errors import GpudiagError, InputError, UsageError
from gpudiag.experiment.fixes.fix import NotAppliedError

TASK_HINT = "return gpudiag.Task(model, optimizer, loader, step), where step(batch) returns the loss"


class Task(msgspec.Struct, frozen=True):
    """A training that `gpudiag.ab` can run: for each batch of `loader`, `step(batch)` gives the loss; the loop does the rest.

    >>> def step(batch):
    ...     x, y = batch
    ...     return torch.nn.functional.mse_loss(model(x), y)
    >>> gpudiag.Task(model, optimizer, loader, step)

    `step` runs the model and returns one number with gradients, a mean over the samples of its batch. The loop calls `backward()` on it,
    then `update()`; without one `optimizer.step()` and `optimizer.zero_grad()`. An update of your own is for clipping, a schedule, a
    gradient scaler or several optimizers. `loader` is iterated again and again.
    """

    model: Any
    optimizer: Any
    """A torch optimizer; None where `update` does without."""
    loader: Any
    step: Callable[[Any], Any]
    update: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        if not callable(self.step):
            raise UsageError(f"the step of a Task is a {type(self.step).__name__}, not a function", TASK_HINT)
        if not hasattr(type(self.loader), "__iter__"):
            raise UsageError(f"the loader of a Task is a {type(self.loader).__name__}, which gives no batches", TASK_HINT)
        if self.update is None and not hasattr(self.optimizer, "step"):
            raise UsageError(f"the optimizer of a Task is a {type(self.optimizer).__name__} without step()", "give one, or update=")


class Loop:
    """Trains a task. `accumulation`: micro-batches that each batch is split into, their gradients added up."""

    def __init__(self, task: Task, accumulation: int = 1) -> None:
        self.samples: int | None = None
        """Of the largest batch so far: the last one of an epoch may be smaller."""
        self.parts = 0
        """Micro-batches of a step, where it had most."""
        self.refused = ""
        """Why a batch was not split."""
        self.task, self.accumulation = task, accumulation

    def run(self, steps: int | None, *, first: Callable[[], None] = lambda: None) -> int:
        """Return how many steps were trained: `steps` of them (None: without end), or until the loader gives no more.

        `first` is called after the first one. Raises InputError where there is nothing to train with.
        """
        done = 0
        for batch in _iterate_batches(self.task.loader):
            if done == steps:
                break
            samples = count_samples(batch)
            self.samples = max(filter(None, (self.samples, samples)), default=None)
            parts = [(batch, 1.0)]
            if self.accumulation > 1:
                try:
                    parts = split_into_micro_batches(batch, self.accumulation)
                except NotAppliedError as error:
                    self.refused = str(error)
            self.parts = max(self.parts, len(parts))
            for part, share in parts:
                loss = self.task.step(part)
                if not hasattr(loss, "backward"):
                    raise InputError(f"step() of the Task returned a {type(loss).__name__}", "return the loss, a tensor with one number")
                (loss if share == 1 else loss * share).backward()
            if self.task.update is not None:
                self.task.update()
            else:
                self.task.optimizer.step()
                self.task.optimizer.zero_grad()
            run_script.step(samples)
            done += 1
            if done == 1:
                first()
        return done


def _iterate_batches(loader: Any) -> Iterator[Any]:
    """Yield the batches of one epoch after the other; one that gives none ends it. Raises InputError where the first gives none."""
    epochs = 0
    while True:
        given = 0
        for given, batch in enumerate(loader, 1):  # noqa: B007 - read after the loop
            yield batch
        if not given and not epochs:
            raise InputError("the loader of the Task gives no batches", "is its dataset empty, or smaller than one batch with drop_last?")
        if not given:
            return  # an iterator is over after its first epoch
        epochs += 1


_UNSPLIT_TYPES = (str, bytes, bool, int, float, complex, type(None))
"""What is the same for every sample, or has no samples."""


def split_into_micro_batches(batch: Any, count: int, rows: int | None = None) -> list[tuple[Any, float]]:
    """Return `count` parts of `batch` along the first dimension of its tensors, and the share of the samples that each has.

    The sum of share x (mean loss of the part) is the mean loss of the batch, whatever the sizes of the parts. With fewer samples than
    `count` each is a part. `rows`: its samples where that is known. Raises NotAppliedError where what belongs to a sample cannot be told.
    """
    rows = count_samples(batch) if rows is None else rows
    if not rows:
        raise NotAppliedError("batches cannot be split: no tensor in them has samples in its first dimension")
    if rows == 1:
        raise NotAppliedError("batches cannot be split: they have one sample")
    count = min(count, rows)
    bounds = [rows * number // count for number in range(count + 1)]
    return [(_slice_samples(batch, rows, start, end), (end - start) / rows) for start, end in pairwise(bounds)]


def _slice_samples(value: Any, rows: int, start: int, end: int) -> Any:
    import torch

    if isinstance(value, _UNSPLIT_TYPES):
        return value
    if isinstance(value, torch.Tensor) or (type(value).__module__ == "numpy" and hasattr(value, "ndim")):
        if value.ndim and value.shape[0] != rows:
            raise NotAppliedError(f"batches cannot be split: they hold tensors of {rows} and of {value.shape[0]} rows")
        return value[start:end] if value.ndim else value
    if isinstance(value, MutableMapping):
        part = copy.copy(value)  # keeps the class: BatchEncoding of transformers has methods that a dict has not
        for name in value:
            part[name] = _slice_samples(value[name], rows, start, end)
        return part
    if not isinstance(value, (list, tuple)):
        raise NotAppliedError(f"batches cannot be split: they hold a {type(value).__name__}")
    # a list or tuple of the same class: of names the samples' own, of anything else each item cut
    if value and len(value) == rows and all(isinstance(item, _UNSPLIT_TYPES) for item in value):
        if not all(isinstance(item, (str, bytes)) for item in value):
            raise NotAppliedError(f"batches cannot be split: it cannot be told whether a {type(value).__name__} has one number a sample")
        return value[start:end]
    items = [_slice_samples(item, rows, start, end) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


class MemoryNeed(msgspec.Struct, frozen=True):
    """Memory that a training will take. Null: not known, with the reason."""

    peak_bytes: int | None = None
    """The most that its tensors hold; what the driver and libraries take comes on top."""
    free_bytes: int | None = None
    """Of the device now; null where there is no GPU: host memory can be lent by the disk."""
    reason: str = ""


def estimate_memory_need(make: Callable[[], Loop]) -> MemoryNeed:
    """Estimate the memory of the loop that `make` makes; of what needs the values of tensors it is not known, and the reason says so."""
    import torch

    on_gpu = torch.cuda.is_available()
    try:
        found = run_estimate(lambda: _build_estimate_input(make(), "cuda" if on_gpu else "cpu"), "build()")
    except GpudiagError as error:
        return MemoryNeed(reason=str(error))
    return MemoryNeed(found.peak_bytes, torch.cuda.mem_get_info()[0] if on_gpu else None)


def _build_estimate_input(loop: Loop, device: str) -> EstimateInput:
    """Return what is estimated of a loop: the step of its task in the place of a model, with the parameters of the model."""
    import torch
    from torch.utils._pytree import tree_iter

    task, batch = loop.task, make_first_batch(loop.task.loader)
    if loop.accumulation > 1:
        with suppress(NotAppliedError):
            # by the first tensor: count_samples() asks no tensor of another class, as those without data are
            rows = next((leaf.shape[0] for leaf in tree_iter(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim), None)
            batch = split_into_micro_batches(batch, loop.accumulation, rows)[0][0]

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
    return EstimateInput(model=step, batch=batch, loss=None, optimizer=task.optimizer, device=device, accumulate=loop.accumulation > 1)


def make_first_batch(loader: Any) -> Any:
    """Make a batch of the size and form of the loader's own.

    A DataLoader is not iterated: it would draw an order, which tensors without data have not, or start processes. Its first samples are
    put together as it would.
    """
    from torch.utils.data import DataLoader, IterableDataset

    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return next(iter(loader))
    count = min(loader.batch_size, len(loader.dataset))
    return loader.collate_fn([loader.dataset[index] for index in range(count)])
