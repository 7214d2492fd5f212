"""What steps() returns: the batches of a loader, with marks before them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeVar

from gpudiag.capture.events import Listener

Batch = TypeVar("Batch")
BatchOut = TypeVar("BatchOut", covariant=True)


Mark = Callable[..., bool]
"""Calls a method of loop.Loop by its name; returns whether it was done. It never raises: a failure ends the recording, not the loop."""


class Batches(Iterator[BatchOut]):
    """The batches of `loader`, once.

    A class and not a generator: a generator is over once its loader has raised, so that a loop that leaves out a bad batch would end
    early; and what it does when it is dropped is done in a destructor, where a Ctrl-C is lost. Nothing is done here on dropping:
    who keeps the marks sees at the next of them that this object is no more.
    """

    __slots__ = ("__weakref__", "_counted", "_group", "_iterator", "_loader", "_mark", "_over")

    def __init__(self, loader: Iterable[BatchOut], group: int, mark: Mark) -> None:
        self._loader, self._group, self._mark = loader, group, mark
        self._iterator: Iterator[BatchOut] | None = None
        self._counted = self._over = False

    def __iter__(self) -> Batches[BatchOut]:
        if self._over:
            self._mark("again")
        return self

    def __next__(self) -> BatchOut:
        if self._over:
            raise StopIteration
        iterator = self._iterator
        if iterator is None:
            iterator = self._iterator = iter(self._loader)
            self._counted = self._mark("begin_epoch", self, self._loader, self._group)
        asked = self._counted and self._mark("ask")
        try:
            batch = next(iterator)
        except StopIteration:
            self._end()
            raise
        except BaseException:
            if asked:
                self._mark("failed")
            raise
        if asked:
            self._mark("received", batch, self._loader)
        return batch

    def _end(self) -> None:
        self._over, self._iterator = True, None
        if self._counted:
            self._mark("exhausted")


class SizedBatches(Batches[BatchOut]):
    """The batches of a loader that has a length: len() is the loader's."""

    __slots__ = ()

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # batches_of() looks


def batches_of(loader: Iterable[Batch], group: int, mark: Mark) -> Iterator[Batch]:
    """Return an iterator over `loader` that marks every `group` batches as one step."""
    kind = SizedBatches if isinstance(loader, Sized) else Batches
    return kind(loader, group, mark)


class Leaving(Listener):
    """Calls `left` when the training thread does something: where a loop was left by `break`, the next mark may be far away."""

    def __init__(self, left: Callable[[], object]) -> None:
        self._left = left

    def batch_asked(self, at_ns: int) -> None:
        """Look before a batch of another loop, such as one of a validation."""
        self._left()

    def backward_began(self, at_ns: int, loss: object) -> None:
        """Look before a backward pass."""
        self._left()

    def optimizer_began(self, at_ns: int, optimizer: object) -> None:
        """Look before an optimizer step."""
        self._left()
