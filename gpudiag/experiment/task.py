"""What `build` returns, and the loop that trains it in an arm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from gpudiag.capture.samples import samples_of
from gpudiag.capture.unmodified import marker
from gpudiag.errors import InputError, UsageError
from gpudiag.experiment.fixes.fix import NotAppliedError
from gpudiag.experiment.micro import micro_batches

GIVE = "return gpudiag.Task(model, optimizer, loader, step), where step(batch) returns the loss"


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
        """Raise UsageError for what cannot be trained."""
        if not callable(self.step):
            raise UsageError(f"the step of a Task is a {type(self.step).__name__}, not a function", GIVE)
        if not hasattr(type(self.loader), "__iter__"):
            raise UsageError(f"the loader of a Task is a {type(self.loader).__name__}, which gives no batches", GIVE)
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
        self._update = task.update or self._step_and_clear

    def run(self, steps: int | None, *, first: Callable[[], None] = lambda: None) -> int:
        """Return how many steps were trained: `steps` of them (None: without end), or until the loader gives no more.

        `first` is called after the first one. Raises InputError where there is nothing to train with.
        """
        done = 0
        for batch in _batches(self.task.loader):
            if done == steps:
                break
            samples = samples_of(batch)
            self.samples = max(filter(None, (self.samples, samples)), default=None)
            self._train(batch)
            marker.step(samples)
            done += 1
            if done == 1:
                first()
        return done

    def _train(self, batch: Any) -> None:
        parts = self._parts(batch)
        self.parts = max(self.parts, len(parts))
        for part, share in parts:
            loss = self.task.step(part)
            if not hasattr(loss, "backward"):
                raise InputError(f"step() of the Task returned a {type(loss).__name__}", "return the loss, a tensor with one number")
            (loss if share == 1 else loss * share).backward()
        self._update()

    def _parts(self, batch: Any) -> list[tuple[Any, float]]:
        if self.accumulation > 1:
            try:
                return micro_batches(batch, self.accumulation)
            except NotAppliedError as error:
                self.refused = str(error)
        return [(batch, 1.0)]

    def _step_and_clear(self) -> None:
        self.task.optimizer.step()
        self.task.optimizer.zero_grad()


def _batches(loader: Any) -> Iterator[Any]:
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
