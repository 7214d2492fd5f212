"""What `build` returns, the loop that trains it in an arm, and its micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from itertools import pairwise
from typing import Any

import msgspec

from gpudiag.capture import run_script
from gpudiag.capture.batch_contents import count_samples
from gpudiag.errors import InputError, UsageError
from gpudiag.fixes.fix import NotAppliedError

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


def split_into_micro_batches(batch: Any, count: int) -> list[tuple[Any, float]]:
    """Return `count` parts of `batch` along the first dimension of its tensors, and the share of the samples that each has.

    The sum of share x (mean loss of the part) is the mean loss of the batch, whatever the sizes of the parts. With fewer samples than
    `count` each is a part. Raises NotAppliedError where what belongs to a sample cannot be told.
    """
    rows = count_samples(batch)
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
