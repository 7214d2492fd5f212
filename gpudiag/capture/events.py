"""What the training thread does, as events: batches, backward passes, optimizer steps. One set of wrappers, many listeners."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType
from typing import Any, Protocol, TypeVar

from gpudiag.capture.patches import Patches
from gpudiag.capture.untraced import skip_frame

Note = Callable[[str, BaseException | None], None]


class Switch(Protocol):
    """What turns the events on and off, and keeps marks of waits: HostMarks in a session."""

    on: bool

    def waited(self, what: str, wait_ns: int, frame: FrameType | None) -> None:
        """A wait for a batch has just ended; `frame`: whoever asked for it."""


class Listener:
    """Hears what the training thread does. Every method does nothing unless overridden; times are those of time.perf_counter_ns()."""

    def batch_asked(self, at_ns: int) -> None:
        """A batch is asked for: a DataLoader's __next__ begins, or that of the iterable given to steps()."""

    def batch_received(self, at_ns: int, wait_ns: int, batch: object, iterator: object) -> None:
        """A batch has come after `wait_ns`. `iterator`: what gave it (a _BaseDataLoaderIter, or the iterable given to steps())."""

    def backward_began(self, at_ns: int, loss: Any) -> None:
        """Tensor.backward is called on `loss`."""

    def backward_ended(self, at_ns: int) -> None:
        """Tensor.backward has returned or raised."""

    def optimizer_began(self, at_ns: int, optimizer: Any) -> None:
        """The step of a torch optimizer begins (before its closure, where it has one)."""

    def optimizer_ended(self, at_ns: int, optimizer: Any) -> None:
        """The step of a torch optimizer has ended."""


T = TypeVar("T")


def overriding(objects: Iterable[T], base: type, name: str) -> list[tuple[T, Callable[..., None]]]:
    """Return (object, its method `name`) for those whose class overrides that of `base`: a call that does nothing costs too, every step."""
    return [(item, getattr(item, name)) for item in objects if getattr(type(item), name) is not getattr(base, name)]


class Events:
    """Emits the events of one thread to the listeners that were added, in their order.

    A listener that raises is taken off with one warning; the wrapped call goes on in any case. `on` is the marks' own switch, so that
    nothing is emitted before the session began, after it ended, or in a forked child.
    """

    def __init__(self, marks: Switch, note: Note) -> None:
        self.failed: Callable[[Listener], None] = lambda _: None
        """Called with a listener that was taken off because it raised."""
        self.thread = threading.get_ident()
        self.muted = False
        """True while steps() asks for a batch: it emits the two events itself."""
        self._marks, self._note = marks, note
        self._hooked = False
        self._listeners: list[Listener] = []
        self._hearing: dict[str, list[tuple[Listener, Callable[..., None]]]] = {}

    def add(self, listener: Listener) -> None:
        """Let `listener` hear all events from now on, after those that were added before."""
        self._listeners.append(listener)
        self._hearing = {}

    def remove(self, listener: Listener) -> None:
        """Let `listener` hear nothing more; does nothing where it was not added."""
        if listener in self._listeners:
            self._listeners.remove(listener)
            self._hearing = {}

    def clear(self) -> None:
        """Let nobody hear anything more."""
        self._listeners, self._hearing = [], {}

    @property
    def here(self) -> bool:
        """Return whether an event on this thread is to be emitted."""
        return self._marks.on and threading.get_ident() == self.thread

    def emit(self, name: str, *args: object) -> None:
        """Call `name`(now, *args) of every listener."""
        hearing = self._hearing.get(name)
        if hearing is None:
            hearing = self._hearing[name] = overriding(self._listeners, Listener, name)
        if not hearing:
            return
        at = time.perf_counter_ns()
        for listener, method in hearing:
            try:
                method(at, *args)
            except Exception as error:  # noqa: BLE001 - the training run comes first
                self.remove(listener)
                self._note(f"{type(listener).__name__.lower()} was switched off", error)
                self.failed(listener)

    def install(self, patches: Patches) -> None:
        """Put the wrappers in place; what this version of torch does not have is left out."""
        import torch
        from torch.optim import optimizer
        from torch.utils.data import dataloader

        skip_frame(Events.emit, inner=True)  # the listeners too: none of them is part of the program
        skip_frame(vars(Events)["here"].fget)
        patches.wrap(dataloader._BaseDataLoaderIter, "__next__", self._next)
        patches.wrap_method(torch.Tensor, "backward", self._backward)
        for name, hook in (
            ("register_optimizer_step_pre_hook", self._optimizer("optimizer_began")),
            ("register_optimizer_step_post_hook", self._optimizer("optimizer_ended")),
        ):
            register = getattr(optimizer, name, None)
            if register is not None:
                patches.on_restore(self._removal(register(hook)))

    def _optimizer(self, event: str) -> Callable[..., None]:
        def hook(optimizer: Any, *_: Any) -> None:
            if self.here:
                self._hooked = True
                try:
                    self.emit(event, optimizer)
                finally:
                    self._hooked = False

        hook._torchdynamo_disable = True  # type: ignore[attr-defined]  # as torch._dynamo.disable sets it: a compiled step() leaves it out
        return hook

    def _removal(self, handle: Any) -> Callable[[], None]:
        def remove() -> None:
            if not self._hooked:  # torch is going through its hooks: one less there raises in the training; it stays, and does nothing
                handle.remove()

        return remove

    def _next(self, original: Any) -> Any:
        def timed_next(iterator: Any) -> Any:
            if self.muted or not self.here:
                return original(iterator)
            self.emit("batch_asked")
            begun = time.perf_counter_ns()
            batch = original(iterator)
            wait = time.perf_counter_ns() - begun
            self.emit("batch_received", wait, batch, iterator)
            frame = sys._getframe(1)
            with suppress(Exception):  # a mark that fails is left out
                self._marks.waited(type(iterator).__name__, wait, frame)
            return batch

        return timed_next

    def _backward(self, original: Any) -> Any:
        def noted_backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.here:
                return original(loss, *args, **kwargs)
            self.emit("backward_began", loss)
            try:
                return original(loss, *args, **kwargs)
            finally:
                self.emit("backward_ended")

        return noted_backward
